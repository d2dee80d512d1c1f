"""Methods of a module that something stands around while it is fitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_fp8.uncopied import StandIn

_Method = Callable[..., Any]


def surround(module: nn.Module, name: str, around: Callable[[_Method], _Method]) -> Callable[[], None]:
    """Let ``around(method)`` stand in for a method of this one module.

    It stands in the module's own attributes, as Lightning's redirection of ``forward`` does; copies of the module that
    are made meanwhile have the method itself.

    Args:
        module: whose method it is.
        name: of the method.
        around: makes the stand-in, given the method.

    Returns:
        To be called to leave the module as it was.
    """
    own, method = module.__dict__.get(name), getattr(module, name)
    setattr(module, name, StandIn(method, around(method)))

    def release() -> None:
        if own is not None:
            setattr(module, name, own)
        else:
            nn.Module.__delattr__(module, name)

    return release
