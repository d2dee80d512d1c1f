"""The casts and products of a scaled linear layer as custom operators, and its autograd.

Eager code calls the kernels directly, for an operator's dispatch costs as much as a small kernel. A compiler sees
Triton kernels and torch's own product where it can use them, and the operators ``lightning_fp8::cast`` and
``lightning_fp8::scaled_mm`` elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fp8 import kernels
from lightning_fp8.casts import Cast, OperandCasts
from lightning_fp8.kernels import fbgemm
from lightning_fp8.kernels.reference import round_up, row_multiple
from lightning_fp8.recipes import Recipe
from lightning_fp8.statistics import SCALE, SLOT_SIZE

#: What multiplies quantised operands; ``"fbgemm"`` those that FBGEMM's kernels take, torch the others.
GemmLibrary = Literal["torch", "fbgemm"]


@dataclass(frozen=True)
class LinearCasts:
    """A recipe as the operators take it.

    Attributes:
        input, weight, grad_output: the casts of each role.
        stored: tensorwise scales come from the layers' slots, not from the data.
        gemm: what multiplies.
        recompute_weight_cast: backward casts the weight again instead of keeping its transposed FP8 copy from forward.
        weight_scale_known: the weight's slot holds its scale, whatever ``stored`` says of the others.
    """

    input: OperandCasts
    weight: OperandCasts
    grad_output: OperandCasts
    stored: bool
    gemm: GemmLibrary = "torch"
    recompute_weight_cast: bool = False
    weight_scale_known: bool = False

    @staticmethod
    def of(
        recipe: Recipe, stored: bool, gemm: GemmLibrary = "torch", recompute_weight_cast: bool = False
    ) -> LinearCasts:
        """The casts of ``recipe``."""
        casts = (recipe.casts["input"], recipe.casts["weight"], recipe.casts["grad_output"])
        return LinearCasts(*casts, stored, gemm, recompute_weight_cast)

    @property
    def weight_stored(self) -> bool:
        """Whether the weight's tensorwise scale comes from its slot."""
        return self.stored or self.weight_scale_known


# --- cast ------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("lightning_fp8::cast", mutates_args={"slot"})
def _cast_op(
    x: Tensor, straight: str, transposed: str, slot: Tensor | None, stored: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return kernels.cast(x, Cast.parse(straight), Cast.parse(transposed), slot, stored)


@_cast_op.register_fake
def _(x: Tensor, straight: str, transposed: str, slot: Tensor | None, stored: bool) -> tuple[Tensor, ...]:
    straight_cast, transposed_cast = Cast.parse(straight), Cast.parse(transposed)
    rows = round_up(x.shape[0], row_multiple(straight_cast, transposed_cast))
    return kernels.empty_operands(x, rows, straight_cast, transposed_cast)


def cast(
    x: Tensor, straight: Cast | None, transposed: Cast | None, slot: Tensor | None = None, stored: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast a matrix for its two GEMMs; see :func:`lightning_fp8.kernels.reference.cast`."""
    if torch.compiler.is_compiling():
        arguments = (x, str(straight or ""), str(transposed or ""), slot, stored)
        # Triton kernels that the compiler sees cost no operator's dispatch, and it plans their memory.
        if x.numel() and kernels.cast_in_graph(x.device, *arguments[1:3]):
            return torch.ops.lightning_fp8.triton_cast(*arguments)
        return _cast_op(*arguments)
    return kernels.cast(x, straight, transposed, slot, stored)


# --- scaled_mm -------------------------------------------------------------------------------------------------------


@torch.library.custom_op("lightning_fp8::scaled_mm", mutates_args=())
def _scaled_mm_op(
    a: Tensor,
    b: Tensor,
    decode_a: Tensor,
    decode_b: Tensor,
    cast_a: str,
    cast_b: str,
    out_dtype: torch.dtype,
    fast_accum: bool,
    gemm: str,
) -> Tensor:
    return _multiply(a, b, decode_a, decode_b, (_parse(cast_a), _parse(cast_b)), out_dtype, fast_accum, gemm)


@_scaled_mm_op.register_fake
def _(
    a: Tensor,
    b: Tensor,
    decode_a: Tensor,
    decode_b: Tensor,
    cast_a: str,
    cast_b: str,
    out_dtype: torch.dtype,
    fast_accum: bool,
    gemm: str,
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


def _multiply(
    a: Tensor,
    b: Tensor,
    decode_a: Tensor,
    decode_b: Tensor,
    casts: tuple[Cast, Cast],
    out_dtype: torch.dtype,
    fast_accum: bool,
    gemm: str,
) -> Tensor:
    if gemm == "fbgemm" and fbgemm.takes(a, casts, out_dtype):
        return fbgemm.scaled_mm(a, b, decode_a, decode_b, casts, fast_accum)
    return kernels.scaled_mm(a, b, decode_a, decode_b, casts, out_dtype, fast_accum)


def _parse(text: str) -> Cast:
    cast = Cast.parse(text)
    if cast is None:
        raise ValueError("scaled_mm needs the cast of both operands, got an empty one.")
    return cast


def scaled_mm(
    a: Tensor,
    b: Tensor,
    decode_a: Tensor,
    decode_b: Tensor,
    casts: tuple[Cast, Cast],
    out_dtype: torch.dtype,
    fast_accum: bool = False,
    gemm: GemmLibrary = "torch",
) -> Tensor:
    """``a @ b^T`` of two quantised operands.

    Args:
        a: FP8 ``[m, k]``.
        b: FP8 ``[n, k]``.
        decode_a: fp32 decode scales of ``a``.
        decode_b: fp32 decode scales of ``b``.
        casts: how ``a`` and ``b`` were cast.
        out_dtype: dtype of the result.
        fast_accum: let tensor cores accumulate with fewer bits (Hopper's fast accumulation).
        gemm: what multiplies.

    Returns:
        ``[m, n]``.
    """
    if torch.compiler.is_compiling():
        texts = str(casts[0]), str(casts[1])
        if gemm == "torch" and a.numel() and kernels.mode_in_graph(a.device, *texts):
            return torch._scaled_mm(a, b.t(), decode_a, decode_b.t(), out_dtype=out_dtype, use_fast_accum=fast_accum)
        return _scaled_mm_op(a, b, decode_a, decode_b, *texts, out_dtype, fast_accum, gemm)
    return _multiply(a, b, decode_a, decode_b, casts, out_dtype, fast_accum, gemm)


# --- the linear layer ------------------------------------------------------------------------------------------------


class ScaledLinear(torch.autograd.Function):
    """``x @ w^T`` with all three GEMMs in FP8. What is saved for backward is FP8, cast once in forward.

    Under ``recompute_weight_cast`` the weight itself is saved and cast again in backward, with the scale of its own
    forward: the same bits. What shards weights frees them in between, and gathers them anew for backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        slots: tuple[Tensor, Tensor, Tensor] | None,
        casts: LinearCasts,
        out_dtype: torch.dtype,
        grad_enabled: bool,
    ) -> Tensor:
        need_grad_input = grad_enabled and x.requires_grad
        need_grad_weight = grad_enabled and weight.requires_grad
        input_slot, weight_slot, grad_slot = slots or (None, None, None)
        x_casts, w_casts = casts.input, casts.weight
        xq, x_decode, xt, xt_decode = cast(
            x, x_casts.straight, x_casts.transposed if need_grad_weight else None, input_slot, casts.stored
        )
        keep_transposed = need_grad_input and not casts.recompute_weight_cast
        wq, w_decode, wt, wt_decode = cast(
            weight, w_casts.straight, w_casts.transposed if keep_transposed else None, weight_slot, casts.weight_stored
        )
        # Hopper's fast accumulation is for the forward GEMM alone, as in torchao and Transformer Engine.
        pair = _both(x_casts.straight, w_casts.straight)
        y = scaled_mm(xq, wq, x_decode, w_decode, pair, out_dtype, True, casts.gemm)
        if need_grad_weight and x_casts.transposed is None:
            xt = x.to(out_dtype)
        if need_grad_input and casts.recompute_weight_cast:
            wt, wt_decode = weight, weight.new_empty(0) if weight_slot is None else _kept_scales(weight_slot, casts)
        ctx.save_for_backward(xt, xt_decode, wt, wt_decode)
        # Not saved for backward: they are changed in place by every forward and backward in between.
        ctx.grad_slot = grad_slot
        ctx.casts = casts
        ctx.needs = (need_grad_input, need_grad_weight)
        ctx.dtypes = (x.dtype, weight.dtype, out_dtype)
        return y.narrow(0, 0, x.shape[0])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        # once_differentiable looks at grad_output alone: it would let the terms through x and weight vanish in silence.
        # (Compiled graphs refuse a second backward themselves.)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "FP8 linear layers are differentiable once, and this backward asks for more (create_graph=True, as for "
                "a gradient penalty). Keep these layers in high precision: LayerSelection(exclude=[...])."
            )
        xt, xt_decode, wt, wt_decode = ctx.saved_tensors
        casts: LinearCasts = ctx.casts
        if ctx.needs[0] and casts.recompute_weight_cast:
            slot = wt_decode.clone() if wt_decode.numel() else None
            _, _, wt, wt_decode = cast(wt, None, casts.weight.transposed, slot, casts.weight_stored)
        grad_input, grad_weight = linear_gradients(
            grad_output, xt, xt_decode, wt, wt_decode, casts, ctx.grad_slot, ctx.needs, ctx.dtypes
        )
        return grad_input, grad_weight, None, None, None, None


def linear_gradients(
    grad_output: Tensor,
    xt: Tensor,
    xt_decode: Tensor,
    wt: Tensor,
    wt_decode: Tensor,
    casts: LinearCasts,
    slot: Tensor | None,
    needs: tuple[bool, bool],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of input and weight from the transposed operands (where ``needs`` asks for them).

    ``dtypes`` are those of the input, of the weight and of the arithmetic.
    """
    input_dtype, weight_dtype, compute_dtype = dtypes
    need_grad_input, need_grad_weight = needs
    g_casts = casts.grad_output
    gq, g_decode, gt, gt_decode = cast(
        grad_output,
        g_casts.straight if need_grad_input else None,
        g_casts.transposed if need_grad_weight else None,
        slot,
        casts.stored,
    )
    grad_input = grad_weight = None
    if need_grad_input:
        pair = _both(g_casts.straight, casts.weight.transposed)
        grad_input = scaled_mm(gq, wt, g_decode, wt_decode, pair, compute_dtype, gemm=casts.gemm)
        grad_input = grad_input.narrow(0, 0, grad_output.shape[0]).to(input_dtype)
    if need_grad_weight and g_casts.transposed is None:
        grad_weight = (grad_output.to(compute_dtype).t() @ xt).to(weight_dtype)
    elif need_grad_weight:
        pair = _both(g_casts.transposed, casts.input.transposed)
        grad_weight = scaled_mm(gt, xt, gt_decode, xt_decode, pair, weight_dtype, gemm=casts.gemm)
    return grad_input, grad_weight


def _kept_scales(slot: Tensor, casts: LinearCasts) -> Tensor:
    """A slot for backward's cast of the weight, with the scales, or the amax, as this forward has left them."""
    if casts.weight_stored and casts.weight.straight == casts.weight.transposed:
        # Forward has set the straight scale, and not yet the other one before the first step.
        return slot.data[SCALE].expand(SLOT_SIZE).clone()
    return slot.data.clone()


def _both(left: Cast | None, right: Cast | None) -> tuple[Cast, Cast]:
    if left is None or right is None:
        raise ValueError("This GEMM runs in high precision under the recipe.")
    return left, right


def scaled_linear(
    x: Tensor,
    weight: Tensor,
    casts: LinearCasts,
    slots: tuple[Tensor, Tensor, Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``x @ weight^T`` with FP8 operands, differentiable once.

    Args:
        x: ``[tokens, in_features]``, fp32, bf16 or fp16; any number of tokens, none included.
        weight: ``[out_features, in_features]``; both sizes are multiples of the recipe's ``size_multiple``.
        casts: the recipe.
        slots: the statistics of input, weight and grad_output, changed in place; ``None`` notes nothing.
        out_dtype: dtype of the result and of the GEMMs' outputs; by default that of ``x``.

    Returns:
        ``[tokens, out_features]`` in ``out_dtype``. The gradients have the dtypes of ``x`` and ``weight``.
    """
    return ScaledLinear.apply(x, weight, slots, casts, out_dtype or x.dtype, torch.is_grad_enabled())
