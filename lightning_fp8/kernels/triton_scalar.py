"""Triton kernels for tensorwise and rowwise scales, in any mixture of the two.

Stored scales are known before the data: one pass reads the values once and writes both operands and the amax. Scales
from the data take a pass for the amaxes first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_fp8.kernels.triton_common import (
    LARGEST,
    MIN_SCALE,
    amax_bits,
    apart,
    as_bits,
    bits_of,
    cast_tile,
    compute_scale,
    encode,
    float_of,
    larger,
    load_tile,
    magnitude,
    magnitudes,
    reciprocal,
    tile_position,
)

#: Fields of a slot, see ``lightning_fp8.statistics``.
_SCALE = tl.constexpr(1)
_SCALE_TRANSPOSED = tl.constexpr(2)

#: What a direction's scales cover.
ABSENT = 0
TENSOR = 1
ROWS = 2
_TENSOR = tl.constexpr(TENSOR)
_ROWS = tl.constexpr(ROWS)
#: What `cast_stored` may make of the transposed operand, beside codes and nothing: no codes, but it settles the scale
#: and keeps it, in the place of the decode scale, for `cast_later`.
LATER = 2
_LATER = tl.constexpr(LATER)
#: Words of scratch memory before the amaxes of the rows: one for the tensor's amax, the rest for alignment.
SCRATCH_HEAD = 4
_HEAD = tl.constexpr(SCRATCH_HEAD)


@triton.jit
def load_matrix(inputs, row, column, rows, columns, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr):
    """The tile of a matrix in memory: ``inputs`` are its pointer and the stride of its rows."""
    return load_tile(inputs[0], inputs[1], row, column, rows, columns, R, C, EVEN)


@triton.jit(do_not_specialize=["rows", "group"])
def cast_stored(
    x, codes, codes_t, decode, decode_t, slot, rows, columns, stride, padded, group,
    STRAIGHT: tl.constexpr, RULE: tl.constexpr,
    TRANSPOSED: tl.constexpr, RULE_T: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Tensorwise scales from the slot; one program a tile. ``TRANSPOSED`` may be ``LATER``."""
    cast_stored_tile(
        load_matrix, (x, stride), codes, codes_t, decode, decode_t, slot, rows, columns, padded, group,
        STRAIGHT, RULE, TRANSPOSED, RULE_T, 1, R, C, EVEN,
    )  # fmt: skip


@triton.jit
def cast_stored_tile(
    LOAD: tl.constexpr, inputs, codes, codes_t, decode, decode_t, slot, rows, columns, padded, group,
    STRAIGHT: tl.constexpr, RULE: tl.constexpr,
    TRANSPOSED: tl.constexpr, RULE_T: tl.constexpr,
    PIECES: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What a program of ``cast_stored`` does, wherever the values come from.

    ``LOAD(inputs, row, column, rows, columns, R, C, EVEN)`` gives them like ``load_tile``. Programs go through
    ``PIECES`` equal ranges of columns at once: pieces that are made from the same memory then find it in the cache.

    A scale that is unset must come from this tensor's own amax, which no program knows before all have finished. So all
    cast with scale 1, which is right for a tensor of zeros and for one that is not finite; the program that finishes
    last takes the amax and, if it tells a scale, casts the whole tensor anew. That is slow (one multiprocessor reads
    the tensor twice and writes it once: some 10 ms for 64 Mi values), and happens once in the life of a slot: it saves
    every other call a second launch. While the scale is unset its word counts the programs
    that have finished: as a float, such a count lies below all scales.
    """
    CODES_T: tl.constexpr = TRANSPOSED == 1
    row_tiles = tl.cdiv(padded, R)
    column_tiles = tl.cdiv(columns, C)
    row, column = _piece_position(row_tiles, column_tiles, group, PIECES, R, C)
    a, b, c, d = LOAD(inputs, row, column, rows, columns, R, C, EVEN)
    scale = 1.0
    scale_t = 1.0
    unset = False
    unset_t = False
    if STRAIGHT:
        scale = tl.load(slot + _SCALE)
        unset = scale < MIN_SCALE
        scale = tl.where(unset, 1.0, scale)
    if TRANSPOSED:
        scale_t = tl.load(slot + _SCALE_TRANSPOSED)
        unset_t = scale_t < MIN_SCALE
        scale_t = tl.where(unset_t, 1.0, scale_t)
    largest = cast_tile(
        codes, codes_t, a, b, c, d, scale, scale, scale, scale, scale_t, row, column, padded, columns,
        STRAIGHT, CODES_T, R, C, EVEN,
    )  # fmt: skip
    tl.atomic_max(as_bits(slot), amax_bits(largest), sem="relaxed")
    if tl.program_id(0) == 0:
        if STRAIGHT:
            tl.store(decode, reciprocal(scale))
        if TRANSPOSED:
            tl.store(decode_t, _left_of_scale(scale_t, TRANSPOSED))
    if unset | unset_t:
        counter = as_bits(slot) + tl.where(unset, _SCALE, _SCALE_TRANSPOSED)
        # The atomic is one thread's: all others must have stored before it.
        tl.debug_barrier()
        tiles = row_tiles * column_tiles
        if tl.atomic_add(counter, 1) == tiles - 1:
            bits = tl.zeros((), tl.int32)
            tile = tl.zeros((), tl.int32)
            while tile < tiles:
                row = tile // column_tiles * R
                column = tile % column_tiles * C
                a, b, c, d = LOAD(inputs, row, column, rows, columns, R, C, EVEN)
                bits = tl.maximum(bits, amax_bits(magnitudes(a, b, c, d)))
                tile += 1
            amax = float_of(bits)
            telling = (amax > 0.0) & (amax <= LARGEST)
            if telling:
                if STRAIGHT:
                    scale = tl.where(unset, compute_scale(amax, RULE), scale)
                if TRANSPOSED:
                    scale_t = apart(tl.where(unset_t, compute_scale(amax, RULE_T), scale_t), padded)
                tile = tl.zeros((), tl.int32)
                while tile < tiles:
                    row = tile // column_tiles * R
                    column = tile % column_tiles * C
                    a, b, c, d = LOAD(inputs, row, column, rows, columns, R, C, EVEN)
                    cast_tile(
                        codes, codes_t, a, b, c, d, scale, scale, scale, scale, scale_t, row, column, padded, columns,
                        STRAIGHT, CODES_T, R, C, EVEN,
                    )  # fmt: skip
                    tile += 1
            if STRAIGHT:
                tl.store(slot + _SCALE, tl.where(unset & (telling == 0), 0.0, scale))
                tl.store(decode, reciprocal(scale))
            if TRANSPOSED:
                tl.store(slot + _SCALE_TRANSPOSED, tl.where(unset_t & (telling == 0), 0.0, scale_t))
                tl.store(decode_t, _left_of_scale(scale_t, TRANSPOSED))


@triton.jit
def _piece_position(row_tiles, column_tiles, group, PIECES: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """The first row and column of a program's tile, where programs go through ``PIECES`` ranges of columns at once."""
    row_tile, column_tile = tile_position(tl.program_id(0), row_tiles, column_tiles, group)
    if PIECES > 1:
        column_tile = column_tile % PIECES * (column_tiles // PIECES) + column_tile // PIECES
    return row_tile * R, column_tile * C


@triton.jit
def _left_of_scale(scale, TRANSPOSED: tl.constexpr):
    """What a cast leaves behind of the transposed operand's scale."""
    if TRANSPOSED == _LATER:
        return scale
    else:
        return reciprocal(scale)


@triton.jit(do_not_specialize=["rows", "group"])
def cast_later(
    x, codes_t, decode_t, kept, rows, columns, stride, padded, group,
    R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The transposed operand that ``cast_stored`` has left for ``LATER``, with the scale that it has ``kept``."""
    cast_later_tile(
        load_matrix, (x, stride), codes_t, decode_t, kept, rows, columns, padded, group, 1, R, C, EVEN
    )  # fmt: skip


@triton.jit
def cast_later_tile(
    LOAD: tl.constexpr, inputs, codes_t, decode_t, kept, rows, columns, padded, group,
    PIECES: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What a program of ``cast_later`` does, as ``cast_stored_tile`` for ``cast_stored``."""
    row, column = _piece_position(tl.cdiv(padded, R), tl.cdiv(columns, C), group, PIECES, R, C)
    a, b, c, d = LOAD(inputs, row, column, rows, columns, R, C, EVEN)
    scale = tl.load(kept)
    cast_tile(
        None, codes_t, a, b, c, d, scale, scale, scale, scale, scale, row, column, padded, columns,
        False, True, R, C, EVEN,
    )  # fmt: skip
    if tl.program_id(0) == 0:
        tl.store(decode_t, reciprocal(scale))


@triton.jit(do_not_specialize=["rows"])
def amax_partials(x, partials, rows, columns, stride, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr):
    """The amax's bits of every ``num_programs``-th tile, one word a program."""
    column_tiles = tl.cdiv(columns, C)
    tiles = tl.cdiv(rows, R) * column_tiles
    seen = tl.zeros((R // 4, C), tl.float32)
    tile = tl.program_id(0)
    while tile < tiles:
        row = tile // column_tiles * R
        column = tile % column_tiles * C
        a, b, c, d = load_tile(x, stride, row, column, rows, columns, R, C, EVEN)
        seen = larger(seen, magnitudes(a, b, c, d))
        tile += tl.num_programs(0)
    tl.store(partials + tl.program_id(0), amax_bits(seen))


@triton.jit(do_not_specialize=["rows", "group"])
def amax_rows_and_columns(
    x, scratch, slot, rows, columns, stride, padded, group,
    ROW: tl.constexpr, COLUMN: tl.constexpr, TOTAL: tl.constexpr, NOTE: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The amax of every row and of every column in one read.

    ``scratch`` holds bits, zero at first: the tensor's amax, three unused words, ``padded`` rows, ``columns`` columns.
    """
    row_tile, column_tile = tile_position(tl.program_id(0), tl.cdiv(rows, R), tl.cdiv(columns, C), group)
    row = row_tile * R
    column = column_tile * C
    a, b, c, d = load_tile(x, stride, row, column, rows, columns, R, C, EVEN)
    largest = magnitudes(a, b, c, d)
    if ROW:
        r = row + 4 * tl.arange(0, R // 4)
        out = scratch + _HEAD + r
        tl.atomic_max(out, tl.max(bits_of(magnitude(a)), axis=1), mask=r < rows, sem="relaxed")
        tl.atomic_max(out + 1, tl.max(bits_of(magnitude(b)), axis=1), mask=r + 1 < rows, sem="relaxed")
        tl.atomic_max(out + 2, tl.max(bits_of(magnitude(c)), axis=1), mask=r + 2 < rows, sem="relaxed")
        tl.atomic_max(out + 3, tl.max(bits_of(magnitude(d)), axis=1), mask=r + 3 < rows, sem="relaxed")
    by_column = tl.max(bits_of(largest), axis=0)
    if COLUMN:
        k = column + tl.arange(0, C)
        tl.atomic_max(scratch + _HEAD + padded + k, by_column, mask=k < columns, sem="relaxed")
    if TOTAL or NOTE:
        amax = tl.max(by_column, axis=0)
        if TOTAL:
            tl.atomic_max(scratch, amax, sem="relaxed")
        if NOTE:
            tl.atomic_max(as_bits(slot), amax, sem="relaxed")


@triton.jit
def _row_scale(row_amax, decode, row, padded, column_tile, J: tl.constexpr, RULE: tl.constexpr, R: tl.constexpr):
    """Scales of every fourth row as a column vector; the first tile of a row writes their reciprocals."""
    r = row + 4 * tl.arange(0, R // 4) + J
    amax = float_of(tl.load(row_amax + r, mask=r < padded, other=0))
    scale = compute_scale(amax, RULE)
    tl.store(decode + r, reciprocal(scale), mask=(r < padded) & (column_tile == 0))
    return scale[:, None]


@triton.jit(do_not_specialize=["rows", "group", "count"])
def cast_from_amaxes(
    x, codes, codes_t, decode, decode_t, slot, amaxes, rows, columns, stride, padded, group, count,
    STRAIGHT: tl.constexpr, RULE: tl.constexpr,
    TRANSPOSED: tl.constexpr, RULE_T: tl.constexpr,
    NOTE: tl.constexpr, COUNT: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Scales from amaxes that a first pass has left.

    ``STRAIGHT`` and ``TRANSPOSED`` are ``ABSENT``, ``TENSOR`` or ``ROWS``. The tensor's amax is the largest of the
    first ``count`` words of ``amaxes``, ``COUNT`` at most; those of rows and columns lie where
    ``amax_rows_and_columns`` puts them.
    """
    # Backwards: what the first pass has read last is still in the cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row_tile, column_tile = tile_position(program, tl.cdiv(padded, R), tl.cdiv(columns, C), group)
    row = row_tile * R
    column = column_tile * C
    a, b, c, d = load_tile(x, stride, row, column, rows, columns, R, C, EVEN)
    first = tl.program_id(0) == 0
    if (STRAIGHT == _TENSOR) or (TRANSPOSED == _TENSOR):
        index = tl.arange(0, COUNT)
        bits = tl.max(tl.load(amaxes + index, mask=index < count, other=0), axis=0)
        amax = float_of(bits)
        if NOTE:
            tl.atomic_max(as_bits(slot), bits, mask=first, sem="relaxed")
    scale_a, scale_b, scale_c, scale_d, scale_t = 1.0, 1.0, 1.0, 1.0, 1.0
    if STRAIGHT == _TENSOR:
        scale = compute_scale(amax, RULE)
        scale_a, scale_b, scale_c, scale_d = scale, scale, scale, scale
        if first:
            tl.store(decode, reciprocal(scale))
    if STRAIGHT == _ROWS:
        row_amax = amaxes + _HEAD
        scale_a = _row_scale(row_amax, decode, row, padded, column_tile, 0, RULE, R)
        scale_b = _row_scale(row_amax, decode, row, padded, column_tile, 1, RULE, R)
        scale_c = _row_scale(row_amax, decode, row, padded, column_tile, 2, RULE, R)
        scale_d = _row_scale(row_amax, decode, row, padded, column_tile, 3, RULE, R)
    if TRANSPOSED == _TENSOR:
        scale_t = apart(compute_scale(amax, RULE_T), padded)
        if first:
            tl.store(decode_t, reciprocal(scale_t))
    if TRANSPOSED == _ROWS:
        k = column + tl.arange(0, C)
        column_amax = float_of(tl.load(amaxes + _HEAD + padded + k, mask=k < columns, other=0))
        by_column = compute_scale(column_amax, RULE_T)
        tl.store(decode_t + k, reciprocal(by_column), mask=(k < columns) & (row_tile == 0))
        scale_t = by_column[None, :]
    cast_tile(
        codes, codes_t, a, b, c, d, scale_a, scale_b, scale_c, scale_d, scale_t, row, column, padded, columns,
        STRAIGHT, TRANSPOSED, R, C, EVEN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def cast_rows(
    x, codes, decode, slot, rows, columns, stride, padded,
    RULE: tl.constexpr, NOTE: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Rowwise scales of the straight operand alone: ``R`` whole rows a program, ``C`` at least their length."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    k = tl.arange(0, C)
    inside = (k < columns)[None, :]
    pointers = x + (r.to(tl.int64) * stride)[:, None] + k[None, :]
    values = tl.load(pointers, mask=(r < rows)[:, None] & inside, other=0.0)
    bits = tl.max(bits_of(magnitude(values)), axis=1)
    if NOTE:
        tl.atomic_max(as_bits(slot), tl.max(bits, axis=0), sem="relaxed")
    scale = compute_scale(float_of(bits), RULE)
    tl.store(decode + r, reciprocal(scale), mask=r < padded)
    pointers = codes + (r.to(tl.int64) * columns)[:, None] + k[None, :]
    tl.store(pointers, encode(values, scale[:, None], codes.dtype.element_ty), mask=(r < padded)[:, None] & inside)
