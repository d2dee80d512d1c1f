"""Triton kernels for scales that blocks share: 1x128 and 128x128 (fp32 scales), 1x32 (powers of two).

One program casts a tile of 128 x 128 values in one pass: every block lies in one tile, in both directions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_fp8.kernels.triton_common import (
    amax_bits,
    apart,
    as_bits,
    bits_of,
    cast_tile,
    compute_e8m0_decode_scale,
    compute_scale,
    float_of,
    load_tile,
    magnitude,
    magnitudes,
    quarter_of,
    reciprocal,
)

#: What a direction's scales cover.
ABSENT = 0
VECTOR = 1  # 1x128
SQUARE = 2  # 128x128
_VECTOR = tl.constexpr(VECTOR)
_SQUARE = tl.constexpr(SQUARE)


@triton.jit
def _vector_scale(values, decode, row, rows, J: tl.constexpr, RULE: tl.constexpr):
    """Scales of every fourth row of a tile as a column vector; writes their reciprocals."""
    r = row + 4 * tl.arange(0, 32) + J
    scale = compute_scale(float_of(tl.max(bits_of(magnitude(values)), axis=1)), RULE)
    tl.store(decode + r, reciprocal(scale), mask=r < rows)
    return scale[:, None]


@triton.jit(do_not_specialize=["rows"])
def cast_blocks_128(
    x, codes, codes_t, decode, decode_t, slot, rows, columns, stride, padded,
    STRAIGHT: tl.constexpr, RULE: tl.constexpr,
    TRANSPOSED: tl.constexpr, RULE_T: tl.constexpr,
    NOTE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """``STRAIGHT`` and ``TRANSPOSED`` are ``ABSENT``, ``VECTOR`` or ``SQUARE``; both sizes are multiples of 128.

    Decode scales: 1x128 with the blocks of one column next to each other, 128x128 row-major.
    """
    column_tiles = columns // 128
    row_tile = tl.program_id(0) // column_tiles
    column_tile = tl.program_id(0) % column_tiles
    row = row_tile * 128
    column = column_tile * 128
    a, b, c, d = load_tile(x, stride, row, column, rows, columns, 128, 128, EVEN)
    column_bits = tl.max(bits_of(magnitudes((a, b, c, d), 4)), axis=0)
    bits = tl.max(column_bits, axis=0)
    if NOTE:
        tl.atomic_max(as_bits(slot), bits, sem="relaxed")
    scale_a, scale_b, scale_c, scale_d, scale_t = 1.0, 1.0, 1.0, 1.0, 1.0
    if STRAIGHT == _VECTOR:
        out = decode + column_tile.to(tl.int64) * padded
        scale_a = _vector_scale(a, out, row, padded, 0, RULE)
        scale_b = _vector_scale(b, out, row, padded, 1, RULE)
        scale_c = _vector_scale(c, out, row, padded, 2, RULE)
        scale_d = _vector_scale(d, out, row, padded, 3, RULE)
    if STRAIGHT == _SQUARE:
        scale = compute_scale(float_of(bits), RULE)
        scale_a, scale_b, scale_c, scale_d = scale, scale, scale, scale
        tl.store(decode + row_tile * column_tiles + column_tile, reciprocal(scale))
    if TRANSPOSED == _VECTOR:
        k = column + tl.arange(0, 128)
        by_column = compute_scale(float_of(column_bits), RULE_T)
        tl.store(decode_t + row_tile.to(tl.int64) * columns + k, reciprocal(by_column))
        scale_t = by_column[None, :]
    if TRANSPOSED == _SQUARE:
        scale_t = apart(compute_scale(float_of(bits), RULE_T), padded)
        tl.store(decode_t + column_tile * (padded // 128) + row_tile, reciprocal(scale_t))
    cast_tile(
        quarter_of, (a, b, c, d), codes, codes_t, (scale_a, scale_b, scale_c, scale_d), (scale_t,),
        row, column, padded, columns, STRAIGHT, TRANSPOSED, 1, 128, 128, True,
    )  # fmt: skip


@triton.jit
def _spread_rows(values, R: tl.constexpr, C: tl.constexpr):
    """``[R, C / 32]`` over the 32 columns that share each value: ``[R, C]``."""
    return tl.reshape(tl.broadcast_to(values[:, :, None], (R, C // 32, 32)), (R, C))


@triton.jit
def _mx_scale(
    values, decode, row, column, rows, columns, J: tl.constexpr, FMAX: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """Scales of the 1x32 blocks of every fourth row, spread over the values; writes the decode scales."""
    r = row + 4 * tl.arange(0, R) + J
    block = column // 32 + tl.arange(0, C // 32)
    amax = float_of(tl.max(tl.reshape(bits_of(magnitude(values)), (R, C // 32, 32)), axis=2))
    scale = compute_e8m0_decode_scale(amax, FMAX)
    pointers = decode + (r.to(tl.int64) * (columns // 32))[:, None] + block[None, :]
    tl.store(pointers, scale, mask=(r < rows)[:, None] & (block < columns // 32)[None, :])
    return _spread_rows(reciprocal(scale), R, C)


@triton.jit(do_not_specialize=["rows"])
def cast_blocks_32(
    x, codes, codes_t, decode, decode_t, slot, rows, columns, stride, padded,
    STRAIGHT: tl.constexpr, FMAX: tl.constexpr, TRANSPOSED: tl.constexpr, FMAX_T: tl.constexpr,
    NOTE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """1x32 blocks with power-of-two decode scales, rounded up; both sizes are multiples of 32."""
    column_tiles = tl.cdiv(columns, C)
    row = tl.program_id(0) // column_tiles * R
    column = tl.program_id(0) % column_tiles * C
    a, b, c, d = load_tile(x, stride, row, column, rows, columns, R, C, EVEN)
    largest = magnitudes((a, b, c, d), 4)
    if NOTE:
        tl.atomic_max(as_bits(slot), amax_bits(largest), sem="relaxed")
    scale_a, scale_b, scale_c, scale_d, scale_t = 1.0, 1.0, 1.0, 1.0, 1.0
    if STRAIGHT:
        scale_a = _mx_scale(a, decode, row, column, padded, columns, 0, FMAX, R // 4, C)
        scale_b = _mx_scale(b, decode, row, column, padded, columns, 1, FMAX, R // 4, C)
        scale_c = _mx_scale(c, decode, row, column, padded, columns, 2, FMAX, R // 4, C)
        scale_d = _mx_scale(d, decode, row, column, padded, columns, 3, FMAX, R // 4, C)
    if TRANSPOSED:
        # 32 rows are 8 rows of each of the four matrices.
        amax = float_of(tl.max(tl.reshape(bits_of(largest), (R // 32, 8, C)), axis=1))
        decode_scale = compute_e8m0_decode_scale(amax, FMAX_T)
        block = row // 32 + tl.arange(0, R // 32)
        k = column + tl.arange(0, C)
        pointers = decode_t + (k.to(tl.int64) * (padded // 32))[None, :] + block[:, None]
        tl.store(pointers, decode_scale, mask=(block < padded // 32)[:, None] & (k < columns)[None, :])
        scale_t = tl.reshape(tl.broadcast_to(reciprocal(decode_scale)[:, None, :], (R // 32, 8, C)), (R // 4, C))
    cast_tile(
        quarter_of, (a, b, c, d), codes, codes_t, (scale_a, scale_b, scale_c, scale_d), (scale_t,),
        row, column, padded, columns, STRAIGHT, TRANSPOSED, 1, R, C, EVEN,
    )  # fmt: skip
