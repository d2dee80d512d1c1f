"""``lightning_fp8.compile``: ``torch.compile`` with casts that compute what they cast."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

if TYPE_CHECKING:
    from lightning_fp8.kernels.folding import FoldIntoCasts

#: A module or a function.
_Compiled = TypeVar("_Compiled", bound=Callable[..., Any])

_PASS = "post_grad_custom_pre_pass"


def compile(
    model: _Compiled,
    *,
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
) -> _Compiled:
    """``torch.compile``, by Inductor, with FP8 casts folded into what computes their operands.

    Where scales are stored (``delayed``, ``static``), the elementwise operations before a cast, such as an activation
    or the end of a norm, and their gradients, become part of the cast's kernel, so that their result is never written
    to memory in 16 bits. Values are then rounded where Inductor rounds them within a kernel of its own. Everything else
    is compiled as ever; sizes that are dynamic, or no multiples of the cast's tiles (64 rows, 128 columns), are left
    alone.

    Args:
        model: a module or a function.
        mode: as ``torch.compile`` takes it.
        fullgraph: as ``torch.compile`` takes it.
        dynamic: as ``torch.compile`` takes it.
        options: Inductor's, on top of those of ``mode``.

    Returns:
        What ``torch.compile`` returns.

    Raises:
        ValueError: ``options`` hold a pass of their own where this one goes.
    """
    return cast(
        "_Compiled", torch.compile(model, fullgraph=fullgraph, dynamic=dynamic, options=compile_options(mode, options))
    )


def compile_options(mode: str | None = None, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The ``options`` that make ``torch.compile`` and ``module.compile`` do what :func:`compile` does.

    They take the place of a ``mode``, which torch does not allow beside options.

    Args:
        mode: the mode whose options these shall include.
        options: Inductor's, on top of those.

    Raises:
        ValueError: ``options`` hold a pass of their own where this one goes.
    """
    merged = {**(torch._inductor.list_mode_options(mode) if mode else {}), **(options or {})}
    if merged.get(_PASS) is not None:
        raise ValueError(
            f"options[{_PASS!r}] is where the pass that folds casts goes: make yours post_grad_custom_post_pass, or "
            "compile with torch.compile."
        )
    return {**merged, _PASS: _fold_into_casts()}


def module_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """``nn.Module.compile``'s arguments, with casts folded where they choose Inductor, the default."""
    if arguments.get("backend", "inductor") != "inductor":
        return dict(arguments)
    others = {name: value for name, value in arguments.items() if name not in ("mode", "options")}
    return {**others, "options": compile_options(arguments.get("mode"), arguments.get("options"))}


@functools.cache
def _fold_into_casts() -> FoldIntoCasts:
    """The one pass: the compiler would take another object for other options, and compile again."""
    # Inductor takes long to import.
    from lightning_fp8.kernels.folding import FoldIntoCasts

    return FoldIntoCasts()
