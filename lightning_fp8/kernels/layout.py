"""How operands lie in memory: codes row-major, decode scales as cuBLASLt reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fp8.casts import Cast
from lightning_fp8.kernels.reference import decode_scale_shape

#: Codes and decode scales of the straight operand, then of the transposed one; what was left out is an empty tensor.
Operands = tuple[Tensor, Tensor, Tensor, Tensor]


def empty_operands(x: Tensor, padded: int, straight: Cast | None, transposed: Cast | None) -> Operands:
    """Uninitialised outputs of the casts of ``x`` with its rows ``padded`` to that many, on its device."""
    columns = x.shape[1]
    return (*_empty_operand(x, padded, columns, straight), *_empty_operand(x, columns, padded, transposed))


def _empty_operand(x: Tensor, rows: int, columns: int, cast: Cast | None) -> tuple[Tensor, Tensor]:
    if cast is None:
        return x.new_empty(0), x.new_empty(0)
    return x.new_empty((rows, columns), dtype=cast.format.dtype), empty_decode_scale(x, rows, columns, cast)


def empty_decode_scale(like: Tensor, rows: int, columns: int, cast: Cast) -> Tensor:
    """Uninitialised fp32 decode scales for an operand of ``rows x columns`` codes, on the device of ``like``.

    The shape is that of :func:`~lightning_fp8.kernels.reference.decode_scale_shape`. Scales of 1x128 blocks have
    strides ``(1, rows)``, the only ones that ``torch.nn.functional.scaled_mm`` takes; all others are contiguous. Each
    tensor is an allocation of its own, and so aligned to 16 bytes and more.
    """
    if cast.granularity == "tensorwise":
        return like.new_empty((1, 1), dtype=torch.float32)
    shape = decode_scale_shape(rows, columns, cast)
    if cast.granularity == "1x128":
        # Not of ``like``: the compiler keeps that as an operator that reads it.
        return torch.empty_strided(shape, (1, rows), dtype=torch.float32, device=like.device)
    return like.new_empty(shape, dtype=torch.float32)


def lay_out(decode: Tensor, cast: Cast | None) -> Tensor:
    """Contiguous decode scales in the layout of :func:`empty_decode_scale`."""
    return decode.t().contiguous().t() if cast is not None and cast.granularity == "1x128" else decode
