"""``lightning_fp8.compile``: ``torch.compile`` with casts that compute what they cast, and a setting for memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, overload

import torch

if TYPE_CHECKING:
    from lightning_fp8.kernels.folding import FoldIntoCasts
    from lightning_fp8.kernels.recomputing import RecomputeTransposed

#: Which transposed operands of forward backward casts itself.
Recompute = Literal["none", "cheap", "all"]
#: A module or a function.
_Compiled = TypeVar("_Compiled", bound=Callable[..., Any])

_FOLD = "post_grad_custom_pre_pass"
_RECOMPUTE = "joint_custom_post_pass"
#: Where a pass of the user's own may go instead.
_INSTEAD = {_FOLD: "post_grad_custom_post_pass", _RECOMPUTE: "joint_custom_pre_pass"}


@overload
def compile(
    model: _Compiled,
    *,
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    recompute: Recompute = "none",
) -> _Compiled: ...


@overload
def compile(
    model: None = None,
    *,
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    recompute: Recompute = "none",
) -> Callable[[_Compiled], _Compiled]: ...


def compile(
    model: Callable[..., Any] | None = None,
    *,
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    recompute: Recompute = "none",
    **unknown: Any,
) -> Callable[..., Any]:
    """``torch.compile``, by Inductor, with FP8 casts folded into what computes their operands.

    With scales of tensors or rows (``delayed``, ``static``, ``tensorwise``, ``tensorwise_pow2``, ``rowwise``), the
    elementwise operations before a cast, such as an activation or the end of a norm, and their gradients, become part
    of the cast's kernels, so that their result is never written to memory in 16 bits. Values are then rounded where
    Inductor rounds them within a kernel of its own. With scales of blocks (``blockwise``) that holds for matrices side
    by side, such as the gradients of gate and up. Everything else is compiled as ever; sizes that are dynamic, or no
    multiples of the cast's tiles (64 rows, 64 columns; with blocks 128), are left alone.

    Forward keeps an FP8 copy of every operand for backward. With scales that are stored or foreseen (``delayed``,
    ``static``, ``tensorwise_pow2``), ``recompute`` lets backward make such copies itself, from what is kept for other
    reasons: the same codes of what is cast, for less memory. A sum that is kept for it is read in forward too as it was
    rounded to be kept.

    Args:
        model: a module or a function; without one, a decorator for it is returned, as ``torch.compile`` does.
        mode: as ``torch.compile`` takes it.
        fullgraph: as ``torch.compile`` takes it.
        dynamic: as ``torch.compile`` takes it.
        options: Inductor's, on top of those of ``mode``.
        recompute: ``"none"`` keeps every copy. ``"cheap"`` casts in backward what takes reading no more than the
            matrix itself: weights, outputs of norms and of attention. ``"all"`` casts whatever saves memory, the
            products of gated layers too.
        unknown: none; for an error that says what to do about ``backend``.

    Returns:
        What ``torch.compile`` returns.

    Raises:
        TypeError: an argument is unknown, such as ``backend``.
        ValueError: ``options`` hold a pass of their own where one of these goes, or ``recompute`` is none of the
            three.
    """
    if unknown:
        raise TypeError(
            f"lightning_fp8.compile takes no {', '.join(unknown)}: it always compiles by Inductor, with mode, "
            "fullgraph, dynamic, options and recompute. Leave it out, or use torch.compile."
        )
    chosen = compile_options(mode, options, recompute)
    return torch.compile(model, fullgraph=fullgraph, dynamic=dynamic, options=chosen)


def compile_options(
    mode: str | None = None, options: Mapping[str, Any] | None = None, recompute: Recompute = "none"
) -> dict[str, Any]:
    """The ``options`` that make ``torch.compile`` and ``module.compile`` do what :func:`compile` does.

    They take the place of a ``mode``, which torch does not allow beside options.

    Args:
        mode: the mode whose options these shall include.
        options: Inductor's, on top of those.
        recompute: as in :func:`compile`.

    Raises:
        ValueError: as in :func:`compile`.
    """
    if recompute not in get_args(Recompute):
        raise ValueError(f"recompute={recompute!r} is none of {', '.join(map(repr, get_args(Recompute)))}.")
    passes: dict[str, Any] = {_FOLD: _fold_into_casts()}
    if recompute != "none":
        passes[_RECOMPUTE] = _recompute_transposed(recompute == "cheap")
    merged = {**(torch._inductor.list_mode_options(mode) if mode else {}), **(options or {})}
    for name in passes:
        if merged.get(name) not in (None, passes[name]):
            raise ValueError(
                f"options[{name!r}] is where a pass of lightning_fp8 goes: make yours {_INSTEAD[name]}, or compile "
                "with torch.compile."
            )
    return {**merged, **passes}


def module_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """``nn.Module.compile``'s arguments from these and ``recompute``, with passes where they choose Inductor."""
    if arguments.get("backend", "inductor") != "inductor":
        return dict(arguments)
    own = {name: arguments[name] for name in ("mode", "options", "recompute") if name in arguments}
    others = {name: value for name, value in arguments.items() if name not in own}
    return {**others, "options": compile_options(**own)}


@functools.cache
def _fold_into_casts() -> FoldIntoCasts:
    """The one pass: the compiler would take another object for other options, and compile again."""
    # Inductor takes long to import.
    from lightning_fp8.kernels.folding import FoldIntoCasts

    return FoldIntoCasts()


@functools.cache
def _recompute_transposed(cheap: bool) -> RecomputeTransposed:
    from lightning_fp8.kernels.recomputing import RecomputeTransposed

    return RecomputeTransposed(cheap)
