"""``torch.ops.lightning_fp8.scaled_linear``: an FP8 linear product for modules of one's own.

It needs no converted layer and no Trainer, scales from the data at hand and keeps no state, and is one node to
``torch.compile`` and ``torch.export``. See ``docs/operators.md``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.casts import Cast, OperandCasts
from lightning_fp8.ops import LinearCasts, ScaledLinear, cast, linear_gradients
from lightning_fp8.recipes import RECIPE_NAMES, ROLES, Recipe, get_recipe


def casts_text(recipe: Recipe) -> str:
    """What the operator ``lightning_fp8::scaled_linear`` takes as ``recipe``, for a recipe with settings of its own.

    Args:
        recipe: one that scales from the data.

    Returns:
        Six casts (straight and transposed of input, weight and grad_output), joined by commas.

    Raises:
        ValueError: the recipe's scales are kept over steps, which an operator without state cannot do.
    """
    if recipe.source != "data":
        from_data = ", ".join(name for name in RECIPE_NAMES if get_recipe(name).source == "data")
        raise ValueError(
            f"The operator keeps no scales over steps, as the {recipe.name} recipe needs: use one that scales from the "
            f"data ({from_data})."
        )
    return ",".join(
        str(use or "") for role in ROLES for use in (recipe.casts[role].straight, recipe.casts[role].transposed)
    )


@functools.lru_cache(maxsize=64)
def _casts_from(text: str) -> LinearCasts:
    if "/" not in text:
        text = casts_text(get_recipe(text))
    uses = [Cast.parse(part) for part in text.split(",")]
    if len(uses) != 6:
        raise ValueError(f"recipe must be a recipe's name or six casts joined by commas, got {text!r}.")
    x, w, g = (OperandCasts(*uses[i : i + 2]) for i in (0, 2, 4))
    if not all((x.straight, w.straight, g.straight, w.transposed)) or bool(x.transposed) != bool(g.transposed):
        raise ValueError(
            "recipe must have all six casts, or leave out both operands of grad_weight (input and grad_output, "
            f"transposed), got {text!r}."
        )
    multiples = {use.multiple for use in (x.transposed, g.transposed, g.straight) if use and g.transposed}
    if len(multiples) > 1:
        raise ValueError(
            f"recipe pads the tokens of grad_weight's operands to multiples of {sorted(multiples)}: use casts of one "
            f"block size for input (transposed) and grad_output, got {text!r}."
        )
    return LinearCasts(x, w, g, stored=False)


@torch.library.custom_op("lightning_fp8::scaled_linear", mutates_args=())
def _scaled_linear_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: str = "tensorwise",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``x @ weight^T + bias`` in FP8, scaled from the data; a public operator, see ``docs/operators.md``."""
    casts = _casts_from(recipe)
    _check_operands(x, weight, bias, casts, out_dtype)
    y = ScaledLinear.apply(x.reshape(-1, x.shape[-1]), weight, None, casts, out_dtype or x.dtype, False)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.clone(memory_format=torch.contiguous_format).view(*x.shape[:-1], weight.shape[0])


@_scaled_linear_op.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: str = "tensorwise",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    _check_operands(x, weight, bias, _casts_from(recipe), out_dtype)
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=out_dtype or x.dtype)


def _check_operands(
    x: Tensor, weight: Tensor, bias: Tensor | None, casts: LinearCasts, out_dtype: torch.dtype | None
) -> None:
    known = {torch.float32, torch.bfloat16, torch.float16}
    if not {x.dtype, weight.dtype} <= known:
        raise ValueError(f"scaled_linear takes x and weight in fp32, bf16 or fp16, got {x.dtype} and {weight.dtype}.")
    if out_dtype is not None and out_dtype not in known:
        raise ValueError(f"out_dtype must be fp32, bf16 or fp16, got {out_dtype}.")
    if weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"scaled_linear takes x [..., in] and weight [out, in], got {tuple(x.shape)} and {tuple(weight.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [out] = [{weight.shape[0]}], got {list(bias.shape)}.")
    multiple = max(cast.multiple for role in (casts.input, casts.weight, casts.grad_output) for cast in role.uses)
    if weight.shape[0] % multiple or weight.shape[1] % multiple:
        raise ValueError(
            f"The sizes of weight, {tuple(weight.shape)}, must be multiples of {multiple} under this recipe."
        )


@torch.library.custom_op("lightning_fp8::scaled_linear_backward", mutates_args=())
def _scaled_linear_backward_op(
    grad_output: Tensor, x: Tensor, weight: Tensor, recipe: str, need_grad_input: bool, need_grad_weight: bool
) -> tuple[Tensor, Tensor]:
    casts = _casts_from(recipe)
    compute_dtype = grad_output.dtype
    gradient, rows = grad_output.reshape(-1, grad_output.shape[-1]), x.reshape(-1, x.shape[-1])
    xt, xt_decode = cast(rows, None, casts.input.transposed if need_grad_weight else None)[2:]
    wt, wt_decode = cast(weight, None, casts.weight.transposed if need_grad_input else None)[2:]
    if casts.input.transposed is None:
        xt = rows.to(compute_dtype)
    needs, dtypes = (need_grad_input, need_grad_weight), (x.dtype, weight.dtype, compute_dtype)
    grad_input, grad_weight = linear_gradients(gradient, xt, xt_decode, wt, wt_decode, casts, None, needs, dtypes)
    # What was not asked for is an empty tensor. Clones, for an operator must not return views of anything.
    return (
        x.new_empty(0) if grad_input is None else grad_input.clone().view(x.shape),
        weight.new_empty(0) if grad_weight is None else grad_weight,
    )


@_scaled_linear_backward_op.register_fake
def _(
    grad_output: Tensor, x: Tensor, weight: Tensor, recipe: str, need_grad_input: bool, need_grad_weight: bool
) -> tuple[Tensor, Tensor]:
    return (
        x.new_empty(x.shape) if need_grad_input else x.new_empty(0),
        weight.new_empty(weight.shape) if need_grad_weight else weight.new_empty(0),
    )


def _setup_scaled_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.recipe, _ = inputs
    # High precision is kept and cast again in backward, so that the operator's only result is its output.
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _scaled_linear_backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    # Arguments at the end that equal their defaults are not among these (torch 2.11, 2.13).
    need_input, need_weight, need_bias = (*ctx.needs_input_grad, False)[:3]
    grad_input, grad_weight = _scaled_linear_backward_op(grad_output, x, weight, ctx.recipe, need_input, need_weight)
    grad_bias = grad_output.reshape(-1, weight.shape[0]).sum(0).to(ctx.bias_dtype) if need_bias else None
    return grad_input if need_input else None, grad_weight if need_weight else None, grad_bias, None, None


_scaled_linear_op.register_autograd(_scaled_linear_backward, setup_context=_setup_scaled_linear)
