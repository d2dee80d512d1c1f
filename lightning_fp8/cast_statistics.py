"""What a cast to FP8 does to a tensor: values lost to zero, values clamped, the error. Names as in Transformer Engine's
debug tools (its ``LogFp8TensorStats``): ``underflows%``, ``overflows%``, ``mse``, ``scale_inv_min``, ``scale_inv_max``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fp8 import kernels
from lightning_fp8.casts import BLOCK_SIZES, Cast
from lightning_fp8.formats import Format
from lightning_fp8.kernels.reference import dequantize_operand

#: In percent of all values, in squared units of the values, in decibels, and decode scales.
STATISTICS = ("underflows%", "overflows%", "mse", "sqnr", "scale_inv_min", "scale_inv_max")

#: Rows that stay together where a sample is taken: a multiple of the height of every block of a recipe.
_GROUP = 128


class CastSums(NamedTuple):
    """Sums over the values of a tensor, fp64 scalars; they add up over tensors and ranks.

    Attributes:
        underflows: values that are not zero, and whose code is.
        overflows: finite values beyond the format's range after scaling, which were clamped.
        values: how many there are.
        signal: sum of squares.
        noise: sum of squared errors.
    """

    underflows: Tensor
    overflows: Tensor
    values: Tensor
    signal: Tensor
    noise: Tensor


def fits(columns: int, cast: Cast) -> bool:
    """Whether an operand with this many columns can be cast so."""
    _, width = BLOCK_SIZES[cast.granularity]
    return width is None or columns % width == 0


@torch.no_grad()
def cast_sums(
    x: Tensor, cast: Cast, slot: Tensor | None = None, max_rows: int | None = None
) -> tuple[CastSums, Tensor]:
    """Cast a tensor and compare.

    Args:
        x: ``[..., columns]``, fp32, bf16 or fp16.
        cast: how.
        slot: a copy of the statistics that hold the scale, fp32 ``[4]``; it is changed. ``None``: scales from ``x``.
        max_rows: compare a sample of at most about this many rows; the scales come from all.

    Returns:
        The sums, and the decode scales.
    """
    matrix = x.detach().reshape(x.shape[:-1].numel(), x.shape[-1])
    rows = matrix.shape[0]
    codes, decode, _, _ = kernels.cast(matrix, cast, None, slot, slot is not None)
    codes = codes[:rows]
    tiles = cast.granularity == "128x128"
    if decode.shape[0] > 1 and not tiles:
        decode = decode[:rows]  # Without those of padded rows.
    used = decode
    if max_rows is not None and rows > max(max_rows, _GROUP):
        step, groups = math.ceil(rows / max_rows), rows // _GROUP
        matrix = _every(matrix, groups, _GROUP, step)
        codes = _every(codes.view(torch.uint8), groups, _GROUP, step).view(cast.format.dtype)
        if decode.shape[0] > 1:
            used = _every(decode, groups, 1 if tiles else _GROUP, step)
    elif tiles and rows % _GROUP:
        used = decode.repeat_interleave(_GROUP, 0)[:rows]  # The tensor ends within the last tile.
    return _compare(matrix, codes, used, cast.format), decode


def _every(x: Tensor, groups: int, height: int, step: int) -> Tensor:
    """Every ``step``-th group of ``height`` rows."""
    return x[: groups * height].view(groups, height, -1)[::step].reshape(-1, x.shape[1])


def _compare(x: Tensor, codes: Tensor, decode: Tensor, fmt: Format) -> CastSums:
    values = x.float()
    result = dequantize_operand(codes, decode)
    magnitudes = codes.view(torch.uint8).bitwise_and(0x7F)
    lost = (values != 0) & (magnitudes == 0)
    largest = int(torch.tensor(fmt.max).to(fmt.dtype).view(torch.uint8))
    # A decode scale is rounded: what lies on the edge of the range is not beyond it.
    clamped = (magnitudes == largest) & (values.abs() > result.abs() * (1 + 2**-20))
    return CastSums(
        lost.sum().double(),
        clamped.sum().double(),
        torch.full((), values.numel(), dtype=torch.float64, device=x.device),
        values.square().sum().double(),
        (values - result).square_().sum().double(),
    )


def cast_statistics(x: Tensor, cast: Cast, slot: Tensor | None = None, max_rows: int | None = None) -> Tensor:
    """All of :data:`STATISTICS`, fp32 ``[6]`` on the tensor's device; arguments as for :func:`cast_sums`.

    ``sqnr`` is ``10 log10(signal / noise)``: Inf where nothing was lost, NaN where there was nothing.
    """
    sums, decode = cast_sums(x, cast, slot, max_rows)
    share = 100 / sums.values
    smallest, largest = decode.aminmax() if decode.numel() else (decode.new_ones(()), decode.new_ones(()))
    columns = (
        sums.underflows * share,
        sums.overflows * share,
        sums.noise / sums.values,
        10 * torch.log10(sums.signal / sums.noise),
        smallest,
        largest,
    )
    return torch.stack([column.float() for column in columns])
