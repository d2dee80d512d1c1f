"""The tensors of a batch, whatever it is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Those in what Lightning moves to a device, in their order.

    They lie in sequences, mappings of any class (such as the ``BatchEncoding`` of transformers), named tuples and
    dataclasses. Into objects that move themselves by a ``to`` of their own nobody can look.
    """
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            yield leaf
        else:
            for part in _parts_of(leaf):
                yield from tensors_of(part)


def _parts_of(leaf: Any) -> Iterable[Any]:
    """What is in a container that torch takes for a leaf."""
    if isinstance(leaf, Mapping):
        return leaf.values()
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return [getattr(leaf, field.name) for field in dataclasses.fields(leaf)]
    return ()
