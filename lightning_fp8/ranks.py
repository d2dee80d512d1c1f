"""What each rank has of its own: its part of a tensor, and of a checkpoint, which is one file for all."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

T = TypeVar("T")


def local_values(tensor: Tensor) -> Tensor:
    """This rank's dense values of a parameter or gradient."""
    if tensor.is_sparse:
        return tensor.coalesce().values()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather_from_ranks(mine: T) -> list[T]:
    """Everybody's ``mine``, by rank: plain values and CPU tensors. Every rank must call."""
    ranks, _ = _ranks()
    if ranks == 1:
        return [mine]
    everybodys: list[T | None] = [None] * ranks
    dist.all_gather_object(everybodys, mine)
    return everybodys  # type: ignore[return-value]


def own_part(everybodys: list[T]) -> T | None:
    """This rank's of what :func:`gather_from_ranks` gave; ``None`` where the number of ranks changed."""
    ranks, rank = _ranks()
    return everybodys[rank] if len(everybodys) == ranks else None


def _ranks() -> tuple[int, int]:
    """How many there are, and which this is."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return 1, 0
