"""Device functions that all casts share.

A program works on a tile of ``ROWS x COLUMNS`` values, held as four matrices: rows 0, 4, 8, ... of the tile, rows 1, 5,
9, ..., and so on. Four codes of one column that lie below each other then meet in one lane, where they are packed into
one 32-bit word; the transpose moves words instead of bytes, a quarter of the accesses to shared memory. Kernels have
the matrices from a function, ``VALUES``, because they may be computed as well as loaded: then they are fp32, yet to be
rounded to ``DTYPE``, that of the matrix which is not written any more. Amaxes are rounded when they are complete, which
comes to the same: rounding keeps order.

Amaxes travel as the bits of non-negative fp32 numbers: as integers these are ordered like the numbers, Inf lies above
all finite ones and NaN above Inf, so that an integer maximum propagates both.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_SCALE = tl.constexpr(2.0**126)
MIN_SCALE = tl.constexpr(2.0**-126)
EXPONENT_BITS = tl.constexpr(0x7F800000)
#: The largest finite value. (Infinity has no name in the sources that a compiler writes of these functions.)
LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def bits_of(value):
    """The bits of fp32 as int32."""
    return value.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """fp32 from its bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def as_bits(pointer):
    """A pointer to fp32 as a pointer to its bits."""
    return pointer.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def larger(a, b):
    """Elementwise maximum that propagates NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def magnitude(values):
    """Absolute values in fp32."""
    return tl.abs(values.to(tl.float32))


@triton.jit
def magnitudes(values, COUNT: tl.constexpr):
    """The largest magnitude among ``COUNT`` matrices, elementwise; NaN propagates."""
    largest = magnitude(values[0])
    for i in tl.static_range(1, COUNT):
        largest = larger(largest, magnitude(values[i]))
    return largest


@triton.jit
def amax_bits(magnitudes):
    """Bits of the largest of a matrix of magnitudes."""
    return tl.max(tl.max(bits_of(magnitudes), axis=1), axis=0)


@triton.jit
def rounded_bits(bits, DTYPE: tl.constexpr):
    """Bits of an fp32 number, rounded to ``DTYPE``."""
    return bits_of(float_of(bits).to(DTYPE).to(tl.float32))


@triton.jit
def round_down_to_power_of_two(value):
    """Clear the mantissa of positive normal fp32 values."""
    return float_of(bits_of(value) & EXPONENT_BITS)


@triton.jit
def compute_scale_of(amax, maximum, HEADROOM: tl.constexpr, LIMIT: tl.constexpr):
    """``formats.compute_scale`` but for its rounding; ``HEADROOM`` is ``2**-margin``, ``LIMIT`` is ``max_scale``."""
    scale = tl.div_rn(maximum, amax)
    if HEADROOM != 1.0:
        scale = scale * HEADROOM
    scale = tl.minimum(tl.maximum(scale, MIN_SCALE), LIMIT)
    return tl.where((amax > 0.0) & (amax <= LARGEST), scale, 1.0)


@triton.jit
def compute_scale(amax, RULE: tl.constexpr):
    """``formats.compute_scale``; ``RULE`` is ``(format's maximum, 2**-margin, max_scale, power_of_two)``."""
    scale = compute_scale_of(amax, RULE[0], RULE[1], RULE[2])
    if RULE[3]:
        # 1, for an amax that tells nothing, is a power of two.
        scale = round_down_to_power_of_two(scale)
    return scale


@triton.jit
def compute_e8m0_decode_scale(amax, FMAX: tl.constexpr):
    """``formats.compute_e8m0_decode_scale``: a power of two, rounded up."""
    ratio = tl.div_rn(amax, FMAX)
    ratio = tl.minimum(tl.maximum(ratio, MIN_SCALE), MAX_SCALE)
    floor = round_down_to_power_of_two(ratio)
    # Times zero: NaN, for an amax that is not finite.
    return tl.where(amax <= LARGEST, tl.where(floor < ratio, floor * 2.0, floor), amax * 0.0)


@triton.jit
def reciprocal(scale):
    """``1 / scale``, correctly rounded."""
    return tl.div_rn(1.0, scale)


@triton.jit
def apart(scale, padded):
    """``scale``, in a way that hides from the compiler that it is the same number; ``padded`` is positive.

    Where both operands have one scale, their codes are equal, and the compiler makes them once. What it made of that
    was wrong: seen with Triton 3.6 on Hopper, where parts of the transposed codes were zero.
    """
    return tl.where(padded > 0, scale, 0.0)


@triton.jit
def encode(values, scale, FP8: tl.constexpr):
    """Codes of ``values * scale``: finite values saturate, any other becomes NaN.

    The conversion saturates, which would make a finite number of an Inf. ``values * 0`` is NaN exactly where ``values``
    is not finite, and elsewhere adds nothing; it costs one multiply-add where a comparison and a selection cost more.
    """
    values = values.to(tl.float32)
    return (values * scale + values * 0.0).to(FP8)


@triton.jit
def reciprocal_from_one_on(value):
    """``1 / value`` for values from 1 to Inf, within 3 units in the last place; NaN stays NaN.

    Two instructions, where a division takes eight to treat divisors of all sizes right.
    """
    root = tl.rsqrt(value)
    return root * root


@triton.jit
def tanh(value):
    """Hyperbolic tangent in fp32: by its series where the difference of exponentials would lose digits."""
    square = value * value
    series = value * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0)))
    return tl.where(square < 0.01, series, 2.0 * tl.sigmoid(2.0 * value) - 1.0)


@triton.jit
def tile_position(program, row_tiles, column_tiles, group):
    """A program's tile. Programs walk through ``group`` rows of tiles at a time, down each column of the group."""
    width = group * column_tiles
    first = program // width * group
    height = tl.minimum(row_tiles - first, group)
    within = program % width
    return first + within % height, within // height


@triton.jit
def row_numbers(row, J: tl.constexpr, R: tl.constexpr):
    """The rows of a tile's matrix ``J``, if ``row`` is the tile's first."""
    return row + 4 * tl.arange(0, R) + J


@triton.jit
def _load_rows(
    x, stride, row, column, rows, columns, J: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    r = row_numbers(row, J, R)
    c = column + tl.arange(0, C)
    pointers = x + (r.to(tl.int64) * stride)[:, None] + c[None, :]
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(r < rows)[:, None] & (c < columns)[None, :], other=0.0)


@triton.jit
def load_tile(x, stride, row, column, rows, columns, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr):
    """The tile at ``row``, ``column``: four matrices ``[R / 4, C]`` in the dtype of ``x``, zero outside of it.

    ``EVEN``: the tile lies inside.
    """
    a = _load_rows(x, stride, row, column, rows, columns, 0, R // 4, C, EVEN)
    b = _load_rows(x, stride, row, column, rows, columns, 1, R // 4, C, EVEN)
    c = _load_rows(x, stride, row, column, rows, columns, 2, R // 4, C, EVEN)
    d = _load_rows(x, stride, row, column, rows, columns, 3, R // 4, C, EVEN)
    return a, b, c, d


@triton.jit
def quarter_of(tile, row, column, J: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """``VALUES`` of a tile that has been loaded: one piece."""
    return (tile[J],)


@triton.jit
def tile_magnitudes(
    VALUES: tl.constexpr, tile, row, column, PIECES: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """The largest magnitude among all matrices of a tile, elementwise, not rounded: ``[R / 4, C]``."""
    a = magnitudes(VALUES(tile, row, column, 0, R // 4, C), PIECES)
    b = magnitudes(VALUES(tile, row, column, 1, R // 4, C), PIECES)
    c = magnitudes(VALUES(tile, row, column, 2, R // 4, C), PIECES)
    d = magnitudes(VALUES(tile, row, column, 3, R // 4, C), PIECES)
    return larger(larger(a, b), larger(c, d))


@triton.jit
def appended(items, value):
    """The tuple ``items`` with one more."""
    return items + (value,)  # noqa: RUF005  # Triton knows no stars.


@triton.jit
def times(value, COUNT: tl.constexpr):
    """A tuple that holds ``value`` ``COUNT`` times."""
    found = ()
    for _ in tl.static_range(COUNT):
        found = appended(found, value)
    return found


@triton.jit
def _store_rows(
    codes, values, scale, row, column, rows, columns, J: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """The straight codes of every fourth row."""
    r = row_numbers(row, J, R)
    c = column + tl.arange(0, C)
    pointers = codes + (r.to(tl.int64) * columns)[:, None] + c[None, :]
    encoded = encode(values, scale, codes.dtype.element_ty)
    if EVEN:
        tl.store(pointers, encoded)
    else:
        tl.store(pointers, encoded, mask=(r < rows)[:, None] & (c < columns)[None, :])


@triton.jit
def _widened(a, b, DTYPE: tl.constexpr):
    """Two matrices in fp32, rounded to ``DTYPE`` before where they are not of it."""
    a, b = a.to(DTYPE), b.to(DTYPE)
    if tl.bfloat16 == DTYPE:
        # Side by side in one word they are rounded by one instruction, and widened by one each.
        low = a.to(tl.uint16, bitcast=True).to(tl.uint32)
        high = b.to(tl.uint16, bitcast=True).to(tl.uint32)
        both = low | (high << 16)
        return (both << 16).to(tl.float32, bitcast=True), (both & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _half_words(a, b, scale, FP8: tl.constexpr):
    """Codes of two matrices, one beside the other in the lower halves of words: one instruction converts both."""
    both = tl.join(encode(a, scale, tl.float32), encode(b, scale, tl.float32))
    low, high = tl.split(both.to(FP8).to(tl.uint8, bitcast=True))
    return low.to(tl.uint32) | (high.to(tl.uint32) << 8)


@triton.jit
def _store_words(
    codes, words, row, column, rows, columns, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Words of four codes into ``[columns, rows]``; ``rows`` is a multiple of 4."""
    r = row // 4 + tl.arange(0, R)
    c = column + tl.arange(0, C)
    lead = rows // 4
    pointers = codes.to(tl.pointer_type(tl.uint32), bitcast=True) + (c.to(tl.int64) * lead)[:, None] + r[None, :]
    if EVEN:
        tl.store(pointers, tl.trans(words))
    else:
        tl.store(pointers, tl.trans(words), mask=(c < columns)[:, None] & (r < lead)[None, :])


@triton.jit
def cast_tile(
    VALUES: tl.constexpr, DTYPE: tl.constexpr, tile, codes, codes_t, scales, scales_t, row, column, rows, columns,
    STRAIGHT: tl.constexpr, TRANSPOSED: tl.constexpr,
    PIECES: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Codes of a tile into ``[rows, columns]`` and ``[columns, rows]``.

    A tile has one range of ``C`` columns in each of ``PIECES`` equal ranges of the matrix's columns, its pieces.
    ``VALUES(tile, row, column, J, R / 4, C)`` gives their rows ``J``, ``J + 4``, ...: a matrix a piece. Two of these
    are made before the next two, so that few values are live at once. There is a scale in ``scales`` for each ``J``,
    in ``scales_t`` for each piece, that broadcasts against the matrices. Returns the largest magnitude among all
    matrices, elementwise: ``[R / 4, C]``.
    """
    Q: tl.constexpr = R // 4
    largest = tl.zeros((Q, C), tl.float32)
    words = times(tl.zeros((Q, C), tl.uint32), PIECES)
    for J in tl.static_range(0, 4, 2):
        values = VALUES(tile, row, column, J, Q, C)
        values_below = VALUES(tile, row, column, J + 1, Q, C)
        completed = ()
        for piece in tl.static_range(PIECES):
            a, b = _widened(values[piece], values_below[piece], DTYPE)
            largest = larger(largest, larger(magnitude(a), magnitude(b)))
            if STRAIGHT:
                place = column + piece * (columns // PIECES)
                _store_rows(codes, a, scales[J], row, place, rows, columns, J, Q, C, EVEN)
                _store_rows(codes, b, scales[J + 1], row, place, rows, columns, J + 1, Q, C, EVEN)
            if TRANSPOSED:
                half = _half_words(a, b, scales_t[piece], codes_t.dtype.element_ty)
                completed = appended(completed, words[piece] | (half << (8 * J)))
        if TRANSPOSED:
            words = completed
    if TRANSPOSED:
        for piece in tl.static_range(PIECES):
            place = column + piece * (columns // PIECES)
            _store_words(codes_t, words[piece], row, place, rows, columns, Q, C, EVEN)
    return largest


@triton.jit
def load_matrix(inputs, row, column, rows, columns, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr):
    """The tile of a matrix in memory: ``inputs`` are its pointer and the stride of its rows."""
    return load_tile(inputs[0], inputs[1], row, column, rows, columns, R, C, EVEN)


@triton.jit
def as_they_are(inputs, row, column, rows, columns, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr):
    """Nothing is loaded beforehand: ``VALUES`` takes the inputs themselves."""
    return inputs


@triton.jit
def first_of_tile(
    program, rows, columns, group, PIECES: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """The first row and column of a program's tile, in the first of its pieces."""
    row_tile, column_tile = tile_position(program, tl.cdiv(rows, R), tl.cdiv(columns, C * PIECES), group)
    return row_tile * R, column_tile * C


@triton.jit
def first_in_order(tile, columns, PIECES: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """The same of the tile of this number, where one program goes through them along the rows."""
    column_tiles = tl.cdiv(columns, C * PIECES)
    return tile // column_tiles * R, tile % column_tiles * C


@triton.jit
def amax_of_tiles(
    LOAD: tl.constexpr, VALUES: tl.constexpr, DTYPE: tl.constexpr, inputs, first, step, rows, columns,
    PIECES: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The amax of the tiles ``first``, ``first + step``, ..."""
    tiles = tl.cdiv(rows, R) * tl.cdiv(columns, C * PIECES)
    seen = tl.zeros((R // 4, C), tl.float32)
    tile = first
    while tile < tiles:
        row, column = first_in_order(tile, columns, PIECES, R, C)
        loaded = LOAD(inputs, row, column, rows, columns, R, C, EVEN)
        seen = larger(seen, tile_magnitudes(VALUES, loaded, row, column, PIECES, R, C))
        tile += step
    return float_of(rounded_bits(amax_bits(seen), DTYPE))


@triton.jit
def cast_tiles(
    LOAD: tl.constexpr, VALUES: tl.constexpr, DTYPE: tl.constexpr, inputs, codes, codes_t, scale, scale_t,
    first, step, rows, columns, padded,
    STRAIGHT: tl.constexpr, TRANSPOSED: tl.constexpr,
    PIECES: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Codes of the tiles ``first``, ``first + step``, ..., with one scale each for the operands."""
    tiles = tl.cdiv(padded, R) * tl.cdiv(columns, C * PIECES)
    tile = first
    while tile < tiles:
        row, column = first_in_order(tile, columns, PIECES, R, C)
        loaded = LOAD(inputs, row, column, rows, columns, R, C, EVEN)
        cast_tile(
            VALUES, DTYPE, loaded, codes, codes_t, times(scale, 4), times(scale_t, PIECES),
            row, column, padded, columns, STRAIGHT, TRANSPOSED, PIECES, R, C, EVEN,
        )  # fmt: skip
        tile += step
