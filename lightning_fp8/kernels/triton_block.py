"""Triton kernels for scales that blocks share: 1x128 and 128x128 (fp32 scales), 1x32 (powers of two).

One program casts a tile of 128 x 128 values in one pass: every block lies in one tile, in both directions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_fp8.kernels.triton_common import (
    EXPONENT_BITS,
    amax_bits,
    apart,
    as_bits,
    bits_of,
    cast_tile,
    compute_e8m0_decode_scale,
    compute_scale,
    float_of,
    load_matrix,
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
#: Parts of a row whose amaxes are taken before those of the row: 16 values, which lie in one lane, or two.
_PARTS = tl.constexpr(8)


@triton.jit
def _magnitude_bits(values):
    """Magnitudes as integers of the values' width, which are ordered like them; 16 bits are compared in pairs."""
    if values.dtype.primitive_bitwidth == 16:
        return values.to(tl.int16, bitcast=True) & 0x7FFF
    else:
        return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _value_of(bits, DTYPE: tl.constexpr):
    """fp32 numbers from bits of ``DTYPE``."""
    return bits.to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _maximum(a, b):
    """What ``tl.max`` takes the largest by; ``tl.max`` itself would widen to 32 bits first."""
    return tl.maximum(a, b)


@triton.jit
def _largest_of_halves(bits, N: tl.constexpr):
    """``[32, _PARTS, N]``: the larger of the values that lie ``N / 2`` apart."""
    one, other = tl.split(tl.permute(tl.reshape(bits, (32, _PARTS, 2, N // 2)), (0, 1, 3, 2)))
    return tl.maximum(one, other)


@triton.jit
def _row_parts(bits):
    """``[32, 128]``: the largest of each of the equal parts of a row, ``[32, _PARTS]``."""
    N: tl.constexpr = 128 // _PARTS
    bits = _largest_of_halves(tl.reshape(bits, (32, _PARTS, N)), N)
    bits = _largest_of_halves(bits, N // 2)
    return tl.reduce(bits, 2, _maximum)


@triton.jit
def _amaxes_of_parts(parts, index, N: tl.constexpr):
    """The largest of every 128 of ``N`` values; ``index`` has, where they lie.

    ``index[256 * i + 2 * j + k]`` is of the ``j``-th. This is a reduction by way of shared memory that leaves each
    result in two lanes. The compiler's own would leave it in all lanes that need it, and have them all divide.
    """
    values = tl.reshape(tl.gather(parts, index, 0), (N // 256, 128, 2))
    return tl.reduce(tl.reduce(values, 0, _maximum), 1, _maximum)


@triton.jit
def _row_amaxes(a, b, c, d):
    """Of the 128 rows, from the bits of magnitudes."""
    N: tl.constexpr = 128 * _PARTS
    ac = tl.join(_row_parts(a), _row_parts(c))
    bd = tl.join(_row_parts(b), _row_parts(d))
    n = tl.arange(0, N)
    row = n // 2 % 128
    part = n // 256 * 2 + n % 2
    return _amaxes_of_parts(tl.reshape(tl.join(ac, bd), (N,)), row // 4 * (4 * _PARTS) + part * 4 + row % 4, N)


@triton.jit
def _column_amaxes(bits):
    """Of the 128 columns of ``[32, 128]``."""
    n = tl.arange(0, 32 * 128)
    return _amaxes_of_parts(tl.reshape(bits, (32 * 128,)), (n // 256 * 2 + n % 2) * 128 + n // 2 % 128, 32 * 128)


@triton.jit
def _shared(scales):
    """The same; the compiler moves them to the lanes that need them, and does not compute them there once more.

    It follows computations back past a change of lanes, but not past a reduction.
    """
    return float_of(tl.max(bits_of(tl.join(scales, scales)), axis=1))


@triton.jit
def _deal_rows(scales):
    """``[128]`` as the column vectors of the four matrices."""
    even, odd = tl.split(tl.reshape(scales, (32, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a[:, None], b[:, None], c[:, None], d[:, None]


@triton.jit
def _encode(values, scale, FP8: tl.constexpr):
    """Codes of ``values * scale``, in fp32 what the conversion makes them of; no value is Inf."""
    return (values.to(tl.float32) * scale).to(FP8)


@triton.jit
def _nan_for_inf(a, b, c, d, bits):
    """Values whose amax has these bits, with NaN for all that are not finite: the conversion saturates an Inf."""
    if bits >= EXPONENT_BITS:
        a, b, c, d = a + a * 0.0, b + b * 0.0, c + c * 0.0, d + d * 0.0
    return a, b, c, d


@triton.jit
def _cast_straight(codes, a, b, c, d, scales, row, column, columns):
    """Codes of a tile into ``[rows, columns]``."""
    FP8: tl.constexpr = codes.dtype.element_ty
    r = row + 4 * tl.arange(0, 32)
    k = column + tl.arange(0, 128)
    pointers = codes + (r.to(tl.int64) * columns)[:, None] + k[None, :]
    tl.store(pointers, _encode(a, scales[0], FP8))
    tl.store(pointers + columns, _encode(b, scales[1], FP8))
    tl.store(pointers + 2 * columns, _encode(c, scales[2], FP8))
    tl.store(pointers + 3 * columns, _encode(d, scales[3], FP8))


@triton.jit
def _cast_transposed(codes, a, b, c, d, scale, row, column, rows):
    """Codes of a tile into ``[columns, rows]``: what lies below each other is converted, and moved, together."""
    FP8: tl.constexpr = codes.dtype.element_ty
    ac = tl.join(_encode(a, scale, tl.float32), _encode(c, scale, tl.float32))
    bd = tl.join(_encode(b, scale, tl.float32), _encode(d, scale, tl.float32))
    encoded = tl.reshape(tl.permute(tl.join(ac, bd).to(FP8), (1, 0, 2, 3)), (128, 128))
    r = row + tl.arange(0, 128)
    k = column + tl.arange(0, 128)
    tl.store(codes + (k.to(tl.int64) * rows)[:, None] + r[None, :], encoded)


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
    cast_blocks_128_tile(
        load_matrix, quarter_of, x.dtype.element_ty, (x, stride), codes, codes_t, decode, decode_t, slot,
        rows, columns, padded, STRAIGHT, RULE, TRANSPOSED, RULE_T, NOTE, 1, EVEN,
    )  # fmt: skip


@triton.jit
def cast_blocks_128_tile(
    LOAD: tl.constexpr, VALUES: tl.constexpr, DTYPE: tl.constexpr, inputs, codes, codes_t, decode, decode_t, slot,
    rows, columns, padded,
    STRAIGHT: tl.constexpr, RULE: tl.constexpr,
    TRANSPOSED: tl.constexpr, RULE_T: tl.constexpr,
    NOTE: tl.constexpr, PIECES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What a program of ``cast_blocks_128`` does, as ``triton_stored.cast_stored_tile`` for its kernel.

    It casts a tile of each piece, one after the other: they are made from the same memory, most of which is still in
    the cache then, and two tiles at once would take too many registers.
    """
    column_tiles = columns // (128 * PIECES)
    row_tile = tl.program_id(0) // column_tiles
    column_tile = tl.program_id(0) % column_tiles
    row, column = row_tile * 128, column_tile * 128
    for piece in tl.static_range(PIECES):
        loaded = LOAD(inputs, row, column, rows, columns, 128, 128, EVEN)
        a = VALUES(loaded, row, column, 0, 32, 128)[piece].to(DTYPE)
        b = VALUES(loaded, row, column, 1, 32, 128)[piece].to(DTYPE)
        c = VALUES(loaded, row, column, 2, 32, 128)[piece].to(DTYPE)
        d = VALUES(loaded, row, column, 3, 32, 128)[piece].to(DTYPE)
        _cast_blocks(
            a, b, c, d, codes, codes_t, decode, decode_t, slot, row_tile, column_tile + piece * column_tiles,
            columns, padded, STRAIGHT, RULE, TRANSPOSED, RULE_T, NOTE,
        )  # fmt: skip


@triton.jit
def _cast_blocks(
    a, b, c, d, codes, codes_t, decode, decode_t, slot, row_tile, column_tile, columns, padded,
    STRAIGHT: tl.constexpr, RULE: tl.constexpr,
    TRANSPOSED: tl.constexpr, RULE_T: tl.constexpr,
    NOTE: tl.constexpr,
):  # fmt: skip
    """Scales and codes of the tile whose every fourth rows are ``a``, ``b``, ``c`` and ``d``."""
    row = row_tile * 128
    column = column_tile * 128
    column_tiles = columns // 128
    i = tl.arange(0, 128)
    DTYPE: tl.constexpr = a.dtype
    bits_a, bits_b, bits_c, bits_d = _magnitude_bits(a), _magnitude_bits(b), _magnitude_bits(c), _magnitude_bits(d)
    largest = tl.maximum(tl.maximum(bits_a, bits_b), tl.maximum(bits_c, bits_d))
    scales = 1.0, 1.0, 1.0, 1.0
    scale_t = 1.0
    if STRAIGHT == _VECTOR:
        amaxes = _value_of(_row_amaxes(bits_a, bits_b, bits_c, bits_d), DTYPE)
        by_row = compute_scale(amaxes, RULE)
        tl.store(decode + column_tile.to(tl.int64) * padded + row + i, reciprocal(by_row))
        scales = _deal_rows(_shared(by_row))
    if TRANSPOSED == _VECTOR:
        amaxes = _value_of(_column_amaxes(largest), DTYPE)
        by_column = compute_scale(amaxes, RULE_T)
        tl.store(decode_t + row_tile.to(tl.int64) * columns + column + i, reciprocal(by_column))
        scale_t = _shared(by_column)[None, :]
    if (STRAIGHT == _VECTOR) | (TRANSPOSED == _VECTOR):
        bits = tl.max(bits_of(amaxes), axis=0)
    else:
        bits = bits_of(_value_of(tl.reduce(tl.reduce(largest, 1, _maximum), 0, _maximum), DTYPE))
    if NOTE:
        tl.atomic_max(as_bits(slot), bits, sem="relaxed")
    if STRAIGHT == _SQUARE:
        scale = compute_scale(float_of(bits), RULE)
        scales = scale, scale, scale, scale
        tl.store(decode + row_tile * column_tiles + column_tile, reciprocal(scale))
    if TRANSPOSED == _SQUARE:
        scale_t = apart(compute_scale(float_of(bits), RULE_T), padded)
        tl.store(decode_t + column_tile * (padded // 128) + row_tile, reciprocal(scale_t))
    a, b, c, d = _nan_for_inf(a, b, c, d, bits)
    if STRAIGHT:
        _cast_straight(codes, a, b, c, d, scales, row, column, columns)
    if TRANSPOSED:
        _cast_transposed(codes_t, a, b, c, d, scale_t, row, column, padded)


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
        quarter_of, x.dtype.element_ty, (a, b, c, d), codes, codes_t, (scale_a, scale_b, scale_c, scale_d), (scale_t,),
        row, column, padded, columns, STRAIGHT, TRANSPOSED, 1, R, C, EVEN,
    )  # fmt: skip
