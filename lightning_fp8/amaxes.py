"""Amaxes of layers that multiply in high precision, taken in eager and compiled code alike, and of any tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from lightning_fp8.statistics import AMAX


@torch.library.custom_op("lightning_fp8::record_amax", mutates_args={"slot"})
def _record_amax_op(x: Tensor, slot: Tensor) -> None:
    _record_amax(x, slot)


@_record_amax_op.register_fake
def _(x: Tensor, slot: Tensor) -> None:
    return None


def record_amax(x: Tensor, slot: Tensor) -> None:
    """Let the amax of ``x`` join the window of ``slot``, as a cast of ``x`` would. NaN and Inf propagate.

    Without values, as of an expert that got no tokens, there is nothing to see: the window stays as it is.

    Args:
        x: any shape, fp32, bf16 or fp16; of a DTensor this rank's shard counts.
        slot: the statistics of a layer and role, fp32 ``[4]``, changed in place.
    """
    x = x.detach()
    if torch.compiler.is_compiling():
        _record_amax_op(x, slot)
    else:
        _record_amax(x, slot)


def _record_amax(x: Tensor, slot: Tensor) -> None:
    amax = amax_of(x)
    if amax is None:
        return
    slot = slot.data
    # The slot may be on another device, where a model is spread over several.
    slot[AMAX].copy_(torch.maximum(slot[AMAX], amax.to(slot)))


def amax_of(x: Tensor) -> Tensor | None:
    """The largest magnitude in ``x``. NaN and Inf propagate; the host does not wait.

    Args:
        x: any shape, floating point (FP8 too), dense, nested or sparse; of a DTensor this rank's shard counts, of a
            sparse tensor what it stores, values at the same place one by one.

    Returns:
        ``[]`` on the device of ``x``, in its type (of FP8 in bf16); ``None`` where there are no values.
    """
    parts = [with_norms(part) for part in _dense_parts(x) if part.numel()]
    if not parts:
        return None
    # One pass and no temporary, unlike x.abs().amax().
    if len(parts) == 1:
        return torch.linalg.vector_norm(parts[0], torch.inf)
    return torch.stack(torch._foreach_norm(parts, torch.inf)).amax()


def with_norms(x: Tensor) -> Tensor:
    """``x`` in a type that torch takes norms of: FP8 has no kernels, and bf16 holds each value of its formats."""
    return x.bfloat16() if x.dtype.itemsize == 1 else x


def _dense_parts(x: Tensor) -> Sequence[Tensor]:
    """Plain tensors that together hold the values of ``x``, without a copy."""
    if isinstance(x, DTensor):
        x = x.to_local()
    if x.is_nested and x.layout == torch.strided:
        return x.unbind()
    if x.layout == torch.sparse_coo:
        # values() is refused until those at the same place are added up, for which the host would wait.
        return [x._values()]
    return [x] if x.layout == torch.strided else [x.values()]


class _RecordGradient(torch.autograd.Function):
    """The identity; notes the amax of the gradient that passes."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, slot: Tensor) -> Tensor:
        ctx.slot = slot
        # A view could not be changed in place afterwards. The compiler drops the copy.
        return y.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        record_amax(gradient, ctx.slot)
        return gradient, None


def record_gradient(y: Tensor, slot: Tensor) -> Tensor:
    """Note the amax of the gradient of ``y`` in backward.

    Args:
        y: any shape.
        slot: the statistics of a layer's grad_output, fp32 ``[4]``, changed in place.

    Returns:
        ``y``, or what stands for it in a compiled graph.
    """
    if not y.requires_grad:
        return y
    if torch.compiler.is_compiling():
        return _RecordGradient.apply(y, slot)
    # In eager code a copy would cost something; a hook stays with the value, also where y is changed in place.
    y.register_hook(lambda gradient: record_amax(gradient, slot))
    return y


def watched_linear(x: Tensor, weight: Tensor, bias: Tensor | None, slots: tuple[Tensor, ...]) -> Tensor:
    """``F.linear`` in high precision that notes its amaxes like :func:`~.ops.scaled_linear`; same values and gradients.

    Args:
        x: ``[..., in_features]``.
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]`` or ``None``.
        slots: the statistics of input, weight and grad_output, changed in place.

    Returns:
        ``[..., out_features]``.
    """
    record_amax(x, slots[0])
    record_amax(weight, slots[1])
    return record_gradient(F.linear(x, weight, bias), slots[2])
