"""Compiled code of a model runs eagerly for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

#: Where a model keeps who has its compiled code run eagerly, while somebody does.
_ATTRIBUTE = "_lightning_fp8_eager"


def run_eagerly(model: nn.Module) -> Callable[[], None]:
    """Let compiled code run eagerly, with everything that stands around its parts; nothing is compiled again.

    Several may ask for it side by side and end in any order. Torch's stances alone must end the last one first, for
    each restores what it found.

    Args:
        model: which they have in common.

    Returns:
        To be called once to end it.
    """
    holders: _Holders | None = model.__dict__.get(_ATTRIBUTE)
    if holders is None:
        holders = model.__dict__[_ATTRIBUTE] = _Holders()
    holders.count += 1

    def end() -> None:
        holders.count -= 1
        if holders.count == 0:
            holders.stance.__exit__(None, None, None)
            del model.__dict__[_ATTRIBUTE]

    return end


class _Holders:
    """How many there are, and the stance that ends with the last one."""

    def __init__(self) -> None:
        self.count = 0
        # It takes effect as it is made.
        self.stance: Any = torch.compiler.set_stance("force_eager")
