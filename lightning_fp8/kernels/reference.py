"""The casts and GEMMs in plain torch: what the fast kernels are tested against, and what runs where they cannot.

Operands are matrices. A cast gives the *straight* operand, contracted over its last dimension, and the *transposed*
one, contracted over its first and laid out row-major like the other. Every GEMM then has the form ``a @ b^T``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8.casts import BLOCK_SIZES, Cast
from lightning_fp8.formats import code_values, quantize, tells_scale
from lightning_fp8.statistics import AMAX, SCALE, SCALE_TRANSPOSED


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``size``."""
    return (size + multiple - 1) // multiple * multiple


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """``x``, a matrix, with rows of zeros added until their number is a multiple of ``multiple``."""
    padding = round_up(x.shape[0], multiple) - x.shape[0]
    return F.pad(x, (0, 0, 0, padding)) if padding else x


def row_multiple(straight: Cast | None, transposed: Cast | None) -> int:
    """What the number of rows is padded to, so that the hardware takes the transposed operand."""
    if straight is None:
        return 1 if transposed is None else transposed.multiple
    return straight.multiple if transposed is None else max(straight.multiple, transposed.multiple)


def decode_scale_shape(rows: int, columns: int, cast: Cast) -> tuple[int, int]:
    """Shape of the decode scales of an operand of ``rows x columns`` codes."""
    height, width = BLOCK_SIZES[cast.granularity]
    return rows // height if height else 1, columns // width if width else 1


def cast(
    x: Tensor, straight: Cast | None, transposed: Cast | None, slot: Tensor | None, stored: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast a matrix for its two GEMMs, and note its amax.

    Args:
        x: ``[rows, columns]``, fp32, bf16 or fp16. ``columns`` is a multiple of what the casts need; rows are padded
            with zeros.
        straight: cast of the operand contracted over columns, or ``None`` to leave it out.
        transposed: cast of the operand contracted over rows, or ``None`` to leave it out.
        slot: the statistics of this layer and role, fp32 ``[4]``, changed in place: the amax joins the window's; with
            ``stored`` an unset scale is taken from the data. ``None`` notes nothing, and nor does a matrix without
            values: it counts as not seen.
        stored: take tensorwise scales from ``slot`` instead of the data.

    Returns:
        ``(codes, decode_scale, codes_transposed, decode_scale_transposed)``; codes are ``[padded_rows, columns]`` and
        ``[columns, padded_rows]``, decode scales fp32 in the shape that :func:`decode_scale_shape` gives. What was
        left out is an empty tensor.
    """
    amax = amax_of(x)
    if slot is not None:
        # .data: the statistics are no part of the autograd graph, whose version checks they would trip.
        slot = slot.data
        if x.numel():  # Else there is nothing to see: an amax of zero would tell of values that are zero.
            slot[AMAX].copy_(torch.maximum(slot[AMAX], amax))
    padded = pad_rows(x, row_multiple(straight, transposed))
    codes, decode = _cast_one(padded, straight, amax, slot, SCALE if stored else None)
    if _same_codes(straight, transposed, slot, stored):
        # A clone: contiguous() gives codes without rows back themselves, and an operator's outputs must not be views.
        codes_t = codes.view(torch.uint8).t().clone(memory_format=torch.contiguous_format).view(codes.dtype)
        return codes, decode, codes_t, decode.clone()
    codes_t, decode_t = _cast_one(padded.t(), transposed, amax, slot, SCALE_TRANSPOSED if stored else None)
    return codes, decode, codes_t, decode_t


def _same_codes(straight: Cast | None, transposed: Cast | None, slot: Tensor | None, stored: bool) -> bool:
    """Whether both operands hold the same codes, as far as the CPU can tell: a transpose is cheaper than a cast."""
    if straight is None or straight != transposed or straight.granularity != "tensorwise":
        return False
    return not stored or slot is None or (slot.device.type == "cpu" and bool(slot[SCALE] == slot[SCALE_TRANSPOSED]))


def amax_of(x: Tensor) -> Tensor:
    """The largest magnitude, fp32 scalar; NaN and Inf propagate; 0 for an empty tensor."""
    if not x.numel():
        return x.new_zeros((), dtype=torch.float32)
    smallest, largest = torch.aminmax(x)
    return torch.maximum(smallest.abs(), largest.abs()).float()


def _cast_one(
    x: Tensor, cast: Cast | None, amax: Tensor, slot: Tensor | None, stored: int | None
) -> tuple[Tensor, Tensor]:
    if cast is None:
        return x.new_empty(0), x.new_empty(0)
    rows, columns = x.shape
    values = x.contiguous().float()
    # Known without waiting on the CPU alone.
    finite = x.device.type == "cpu" and bool(amax.isfinite())
    if cast.granularity == "tensorwise":
        scale = cast.scale(amax)
        if slot is not None and stored is not None:
            scale = _stored_scale(slot, stored, amax, scale)
        scale = scale.view(1, 1)
        return quantize(values, scale, cast.format, finite), 1 / scale
    if not x.numel():
        # There is nothing to take an amax of. A row of no values has an amax of zero, and so scale 1.
        return values.to(cast.format.dtype), values.new_ones(decode_scale_shape(rows, columns, cast))
    blocks = _as_blocks(values, cast)
    block_amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
    scale = cast.scale(block_amax)
    decode = 1 / scale
    codes = quantize(blocks, scale, cast.format, finite).view(rows, columns)
    return codes, decode.view(decode_scale_shape(rows, columns, cast))


def _stored_scale(slot: Tensor, column: int, amax: Tensor, from_data: Tensor) -> Tensor:
    """The scale in the slot; if unset (0), the data's, which is kept if the data can tell one."""
    scale = torch.where(slot[column] == 0, from_data, slot[column])
    slot[column].copy_(torch.where(tells_scale(amax), scale, slot[column]))
    return scale


def _as_blocks(values: Tensor, cast: Cast) -> Tensor:
    """``[row blocks, block rows, column blocks, block columns]``: dimensions 1 and 3 share a scale."""
    rows, columns = values.shape
    height, width = BLOCK_SIZES[cast.granularity]
    height, width = height or rows, width or columns
    return values.view(rows // height, height, columns // width, width)


def dequantize_operand(codes: Tensor, decode_scale: Tensor) -> Tensor:
    """An operand's values in fp32: each decode scale spread over the codes that share it.

    Args:
        codes: ``[rows, columns]`` FP8.
        decode_scale: fp32, in the shape that :func:`decode_scale_shape` gives.
    """
    if not codes.numel():
        return code_values(codes)
    rows, columns = codes.shape
    height, width = rows // decode_scale.shape[0], columns // decode_scale.shape[1]
    spread = decode_scale.repeat_interleave(height, 0) if height > 1 and decode_scale.shape[0] > 1 else decode_scale
    if width > 1 and decode_scale.shape[1] > 1:
        spread = spread.repeat_interleave(width, 1)
    return code_values(codes) * spread


def scaled_mm(a: Tensor, b: Tensor, decode_a: Tensor, decode_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """``a @ b^T`` of two quantised operands, accumulated in fp32.

    Where each row has one scale (or the whole tensor has), the codes are multiplied and the product is scaled, as
    tensor cores do. On a GPU the codes go through bf16, which holds every FP8 value exactly.

    Args:
        a: FP8 ``[m, k]``.
        b: FP8 ``[n, k]``.
        decode_a: fp32 decode scales of ``a``.
        decode_b: fp32 decode scales of ``b``.
        out_dtype: dtype of the result.

    Returns:
        ``[m, n]``.
    """
    if not a.numel():
        return a.new_zeros(a.shape[0], b.shape[0], dtype=out_dtype)
    with torch.autocast(a.device.type, enabled=False):  # It would multiply in bf16.
        if not (_scales_rows(decode_a, a) and _scales_rows(decode_b, b)):
            return (dequantize_operand(a, decode_a) @ dequantize_operand(b, decode_b).t()).to(out_dtype)
        if a.is_cuda:
            product = torch.mm(a.bfloat16(), b.bfloat16().t(), out_dtype=torch.float32)
        else:
            product = code_values(a) @ code_values(b).t()
        return (product * decode_a * decode_b.t()).to(out_dtype)


def _scales_rows(decode_scale: Tensor, codes: Tensor) -> bool:
    """Whether all codes of a row share their scale (a single 128x128 column of tiles has fewer scales than rows)."""
    rows, columns = decode_scale.shape
    return columns == 1 and rows in (1, codes.shape[0])
