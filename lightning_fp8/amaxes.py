"""Amaxes of layers that multiply in high precision, taken in eager and compiled code alike."""

from __future__ import annotations

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
    if isinstance(x, DTensor):
        x = x.to_local()
    if x.is_nested:
        x = x.values() if x.layout == torch.jagged else torch.cat([part.flatten() for part in x.unbind()])
    if not x.numel():
        return
    # One pass and no temporary, unlike x.abs().amax().
    # The slot may be on another device, where a model is spread over several.
    amax = torch.linalg.vector_norm(x, torch.inf).to(slot)
    slot = slot.data
    slot[AMAX].copy_(torch.maximum(slot[AMAX], amax))


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
