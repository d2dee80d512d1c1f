"""Triton kernel that writes out gathered weight codes in the dtype that FSDP computes in: one read, one write."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_fp8.formats import Format
from lightning_fp8.kernels.block_codec import TILE, WARPS, uncast
from lightning_fp8.kernels.capability import has_fast_casts
from lightning_fp8.kernels.launch import at_once
from lightning_fp8.statistics import SCALE


@triton.jit
def _decode_kernel(
    messages, out, slot, columns, message_stride, out_stride,
    SCALE: tl.constexpr, TILE: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = column < columns
    codes = tl.load(messages + row * message_stride + column, mask=inside, other=0)
    values = uncast(codes, MANTISSA_BITS, BIAS, NATIVE) * tl.div_rn(1.0, tl.load(slot + SCALE))
    values = tl.where((codes & 0x7F) == 0x7F, float("nan"), values)  # The one code for NaN, in both formats.
    tl.store(out + row * out_stride + column, values, mask=inside)


def decode(messages: Tensor, out: Tensor, slot: Tensor, fmt: Format, native: bool | None = None) -> None:
    """Write ``codes / scale`` into ``out``; the bits of :func:`lightning_fp8.formats.dequantize`.

    Args:
        messages: uint8 ``[ranks, at least values]``, codes first; rows may lie apart.
        out: ``[ranks, values]``, any floating dtype; rows may lie apart.
        slot: fp32 ``[4]``, with the scale that the codes were cast with.
        fmt: of the codes.
        native: use the GPU's FP8 conversion; by default where it has one.
    """
    if native is None:
        native = has_fast_casts(out.device)
    rows, columns = out.shape
    at_once(
        _decode_kernel,
        (-(-columns // TILE), rows),
        (messages, out, slot),
        (columns, messages.stride(0), out.stride(0)),
        (SCALE, TILE, fmt.mantissa_bits, fmt.bias, native),
        WARPS,
    )
