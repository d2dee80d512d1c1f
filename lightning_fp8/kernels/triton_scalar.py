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
    appended,
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
    quarter_of,
    reciprocal,
    row_numbers,
    tile_magnitudes,
    tile_position,
    times,
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


@triton.jit
def as_they_are(inputs, row, column, rows, columns, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr):
    """Nothing is loaded beforehand: ``VALUES`` takes the inputs themselves."""
    return inputs


@triton.jit(do_not_specialize=["rows", "group"])
def cast_stored(
    x, codes, codes_t, decode, decode_t, slot, rows, columns, stride, padded, group,
    STRAIGHT: tl.constexpr, RULE: tl.constexpr,
    TRANSPOSED: tl.constexpr, RULE_T: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Tensorwise scales from the slot; one program a tile. ``TRANSPOSED`` may be ``LATER``."""
    cast_stored_tile(
        load_matrix, quarter_of, (x, stride), codes, codes_t, decode, decode_t, slot, rows, columns, padded, group,
        STRAIGHT, RULE, TRANSPOSED, RULE_T, 1, R, C, EVEN,
    )  # fmt: skip


@triton.jit
def _first_of_tile(
    program, rows, columns, group, PIECES: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """The first row and column of a program's tile, in the first of its pieces."""
    row_tile, column_tile = tile_position(program, tl.cdiv(rows, R), tl.cdiv(columns, C * PIECES), group)
    return row_tile * R, column_tile * C


@triton.jit
def _first_in_order(tile, columns, PIECES: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """The same of the tile of this number, where one program goes through them along the rows."""
    column_tiles = tl.cdiv(columns, C * PIECES)
    return tile // column_tiles * R, tile % column_tiles * C


@triton.jit
def _amax_of_tiles(
    LOAD: tl.constexpr, VALUES: tl.constexpr, inputs, first, step, rows, columns,
    PIECES: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The amax of the tiles ``first``, ``first + step``, ..."""
    tiles = tl.cdiv(rows, R) * tl.cdiv(columns, C * PIECES)
    seen = tl.zeros((R // 4, C), tl.float32)
    tile = first
    while tile < tiles:
        row, column = _first_in_order(tile, columns, PIECES, R, C)
        loaded = LOAD(inputs, row, column, rows, columns, R, C, EVEN)
        seen = larger(seen, tile_magnitudes(VALUES, loaded, row, column, PIECES, R, C))
        tile += step
    return float_of(amax_bits(seen))


@triton.jit
def _cast_all_tiles(
    LOAD: tl.constexpr, VALUES: tl.constexpr, inputs, codes, codes_t, scale, scale_t, rows, columns, padded,
    STRAIGHT: tl.constexpr, TRANSPOSED: tl.constexpr,
    PIECES: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Cast the whole matrix in one program."""
    tiles = tl.cdiv(padded, R) * tl.cdiv(columns, C * PIECES)
    tile = 0
    while tile < tiles:
        row, column = _first_in_order(tile, columns, PIECES, R, C)
        loaded = LOAD(inputs, row, column, rows, columns, R, C, EVEN)
        cast_tile(
            VALUES, loaded, codes, codes_t, times(scale, 4), times(scale_t, PIECES), row, column, padded, columns,
            STRAIGHT, TRANSPOSED, PIECES, R, C, EVEN,
        )  # fmt: skip
        tile += 1


@triton.jit
def cast_stored_tile(
    LOAD: tl.constexpr, VALUES: tl.constexpr, inputs, codes, codes_t, decode, decode_t, slot,
    rows, columns, padded, group,
    STRAIGHT: tl.constexpr, RULE: tl.constexpr,
    TRANSPOSED: tl.constexpr, RULE_T: tl.constexpr,
    PIECES: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What a program of ``cast_stored`` does, wherever the values come from.

    ``LOAD(inputs, row, column, rows, columns, R, C, EVEN)`` gives what ``VALUES`` takes, see ``cast_tile``.

    A scale that is unset must come from this tensor's own amax, which no program knows before all have finished. So all
    cast with scale 1, which is right for a tensor of zeros and for one that is not finite; the program that finishes
    last takes the amax and, if it tells a scale, casts the whole tensor anew. That is slow (one multiprocessor reads
    the tensor twice and writes it once: some 10 ms for 64 Mi values), and happens once in the life of a slot: it saves
    every other call a second launch. While the scale is unset its word counts the programs
    that have finished: as a float, such a count lies below all scales.
    """
    CODES_T: tl.constexpr = TRANSPOSED == 1
    row, column = _first_of_tile(tl.program_id(0), padded, columns, group, PIECES, R, C)
    loaded = LOAD(inputs, row, column, rows, columns, R, C, EVEN)
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
        VALUES, loaded, codes, codes_t, times(scale, 4), times(scale_t, PIECES), row, column, padded, columns,
        STRAIGHT, CODES_T, PIECES, R, C, EVEN,
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
        tiles = tl.cdiv(padded, R) * tl.cdiv(columns, C * PIECES)
        if tl.atomic_add(counter, 1) == tiles - 1:
            # Half of the values at once, lest this take registers from the way that all other calls go.
            NARROW: tl.constexpr = C // (2 * PIECES)
            amax = _amax_of_tiles(LOAD, VALUES, inputs, 0, 1, rows, columns, PIECES, R, NARROW, EVEN)
            telling = (amax > 0.0) & (amax <= LARGEST)
            if telling:
                if STRAIGHT:
                    scale = tl.where(unset, compute_scale(amax, RULE), scale)
                if TRANSPOSED:
                    scale_t = apart(tl.where(unset_t, compute_scale(amax, RULE_T), scale_t), padded)
                _cast_all_tiles(
                    LOAD, VALUES, inputs, codes, codes_t, scale, scale_t, rows, columns, padded,
                    STRAIGHT, CODES_T, PIECES, R, NARROW, EVEN,
                )  # fmt: skip
            if STRAIGHT:
                tl.store(slot + _SCALE, tl.where(unset & (telling == 0), 0.0, scale))
                tl.store(decode, reciprocal(scale))
            if TRANSPOSED:
                tl.store(slot + _SCALE_TRANSPOSED, tl.where(unset_t & (telling == 0), 0.0, scale_t))
                tl.store(decode_t, _left_of_scale(scale_t, TRANSPOSED))


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
        load_matrix, quarter_of, (x, stride), codes_t, decode_t, kept, rows, columns, padded, group, 1, R, C, EVEN
    )  # fmt: skip


@triton.jit
def cast_later_tile(
    LOAD: tl.constexpr, VALUES: tl.constexpr, inputs, codes_t, decode_t, kept, rows, columns, padded, group,
    PIECES: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What a program of ``cast_later`` does, as ``cast_stored_tile`` for ``cast_stored``."""
    row, column = _first_of_tile(tl.program_id(0), padded, columns, group, PIECES, R, C)
    loaded = LOAD(inputs, row, column, rows, columns, R, C, EVEN)
    scale = tl.load(kept)
    cast_tile(
        VALUES, loaded, None, codes_t, times(1.0, 4), times(scale, PIECES), row, column, padded, columns,
        False, True, PIECES, R, C, EVEN,
    )  # fmt: skip
    if tl.program_id(0) == 0:
        tl.store(decode_t, reciprocal(scale))


@triton.jit(do_not_specialize=["rows"])
def amax_partials(x, partials, rows, columns, stride, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr):
    """The amax's bits of every ``num_programs``-th tile, one word a program."""
    amax_partials_tile(load_matrix, quarter_of, (x, stride), partials, rows, columns, 1, R, C, EVEN)


@triton.jit
def amax_partials_tile(
    LOAD: tl.constexpr, VALUES: tl.constexpr, inputs, partials, rows, columns,
    PIECES: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What a program of ``amax_partials`` does, as ``cast_stored_tile`` for ``cast_stored``."""
    amax = _amax_of_tiles(
        LOAD, VALUES, inputs, tl.program_id(0), tl.num_programs(0), rows, columns, PIECES, R, C, EVEN
    )  # fmt: skip
    tl.store(partials + tl.program_id(0), bits_of(amax))


@triton.jit(do_not_specialize=["rows"])
def amax_rows_and_columns(
    x, scratch, slot, rows, columns, stride, padded, turns,
    ROW: tl.constexpr, COLUMN: tl.constexpr, TOTAL: tl.constexpr, NOTE: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The amax of every row and of every column in one read; ``turns`` tiles a program, one below the other.

    ``scratch`` holds bits, zero at first: the tensor's amax, three unused words, ``padded`` rows, ``columns`` columns.
    """
    amax_rows_and_columns_tile(
        load_matrix, quarter_of, (x, stride), scratch, slot, rows, columns, padded, turns,
        ROW, COLUMN, TOTAL, NOTE, 1, R, C, EVEN,
    )  # fmt: skip


@triton.jit
def amax_rows_and_columns_tile(
    LOAD: tl.constexpr, VALUES: tl.constexpr, inputs, scratch, slot, rows, columns, padded, turns,
    ROW: tl.constexpr, COLUMN: tl.constexpr, TOTAL: tl.constexpr, NOTE: tl.constexpr,
    PIECES: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What a program of ``amax_rows_and_columns`` does, as ``cast_stored_tile`` for ``cast_stored``.

    Rows lie within a warp, so that nobody waits for another warp before the end.
    """
    Q: tl.constexpr = R // 4
    column_tiles = tl.cdiv(columns, C * PIECES)
    row_tile = tl.program_id(0) // column_tiles * turns
    column = tl.program_id(0) % column_tiles * C
    end = tl.minimum(row_tile + turns, tl.cdiv(rows, R))
    by_column = times(tl.zeros((Q, C), tl.float32), PIECES)
    while row_tile < end:
        row = row_tile * R
        loaded = LOAD(inputs, row, column, rows, columns, R, C, EVEN)
        for J in tl.static_range(4):
            values = VALUES(loaded, row, column, J, Q, C)
            by_column = _larger_each(by_column, values, PIECES)
            if ROW:
                r = row_numbers(row, J, Q)
                amaxes = tl.max(bits_of(magnitudes(values, PIECES)), axis=1)
                tl.atomic_max(scratch + _HEAD + r, amaxes, mask=r < rows, sem="relaxed")
        row_tile += 1
    amax = 0
    for piece in tl.static_range(PIECES):
        amaxes = tl.max(bits_of(by_column[piece]), axis=0)
        if COLUMN:
            k = column + piece * (columns // PIECES) + tl.arange(0, C)
            tl.atomic_max(scratch + _HEAD + padded + k, amaxes, mask=k < columns, sem="relaxed")
        amax = tl.maximum(amax, tl.max(amaxes, axis=0))
    if TOTAL:
        tl.atomic_max(scratch, amax, sem="relaxed")
    if NOTE:
        tl.atomic_max(as_bits(slot), amax, sem="relaxed")


@triton.jit
def _larger_each(largest, values, COUNT: tl.constexpr):
    """The larger of ``largest`` and the magnitude of ``values``, matrix by matrix."""
    found = ()
    for i in tl.static_range(COUNT):
        found = appended(found, larger(largest[i], magnitude(values[i])))
    return found


@triton.jit
def _scale_each(amaxes, decode, first, count, RULE: tl.constexpr, BLOCK: tl.constexpr):
    """``BLOCK`` amaxes from ``first`` on become scales, in their place; writes their reciprocals."""
    i = first + tl.arange(0, BLOCK)
    scale = compute_scale(float_of(tl.load(amaxes + i, mask=i < count, other=0)), RULE)
    tl.store(amaxes + i, bits_of(scale), mask=i < count)
    tl.store(decode + i, reciprocal(scale), mask=i < count)


@triton.jit
def row_and_column_scales(
    amaxes, decode, decode_t, padded, columns,
    ROW: tl.constexpr, RULE: tl.constexpr, COLUMN: tl.constexpr, RULE_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scales in the place of the amaxes that ``amax_rows_and_columns`` has left, and decode scales.

    A kernel of its own: in the cast every lane would divide, many by the same numbers.
    """
    first = tl.program_id(0) * BLOCK
    if ROW:
        _scale_each(amaxes + _HEAD, decode, first, padded, RULE, BLOCK)
    if COLUMN:
        _scale_each(amaxes + _HEAD + padded, decode_t, first, columns, RULE_T, BLOCK)


@triton.jit
def _row_scales(scales, row, padded, R: tl.constexpr):
    """Those of every fourth row, as column vectors."""
    found = ()
    for J in tl.static_range(4):
        r = row_numbers(row, J, R // 4)
        found = appended(found, float_of(tl.load(scales + r, mask=r < padded, other=0))[:, None])
    return found


@triton.jit
def _column_scales(scales, column, columns, PIECES: tl.constexpr, C: tl.constexpr):
    """Those of the columns of each piece, as row vectors."""
    found = ()
    for piece in tl.static_range(PIECES):
        k = column + piece * (columns // PIECES) + tl.arange(0, C)
        found = appended(found, float_of(tl.load(scales + k, mask=k < columns, other=0))[None, :])
    return found


@triton.jit(do_not_specialize=["rows", "group", "count"])
def cast_from_amaxes(
    x, codes, codes_t, decode, decode_t, slot, amaxes, rows, columns, stride, padded, group, count,
    STRAIGHT: tl.constexpr, RULE: tl.constexpr,
    TRANSPOSED: tl.constexpr, RULE_T: tl.constexpr,
    NOTE: tl.constexpr, COUNT: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Scales from amaxes that a first pass has left.

    ``STRAIGHT`` and ``TRANSPOSED`` are ``ABSENT``, ``TENSOR`` or ``ROWS``. The tensor's amax is the largest of the
    first ``count`` words of ``amaxes``, ``COUNT`` at most; of rows and columns there are already scales, where
    ``row_and_column_scales`` puts them.
    """
    cast_from_amaxes_tile(
        load_matrix, quarter_of, (x, stride), codes, codes_t, decode, decode_t, slot, amaxes,
        rows, columns, padded, group, count, STRAIGHT, RULE, TRANSPOSED, RULE_T, NOTE, COUNT, 1, R, C, EVEN,
    )  # fmt: skip


@triton.jit
def cast_from_amaxes_tile(
    LOAD: tl.constexpr, VALUES: tl.constexpr, inputs, codes, codes_t, decode, decode_t, slot, amaxes,
    rows, columns, padded, group, count,
    STRAIGHT: tl.constexpr, RULE: tl.constexpr,
    TRANSPOSED: tl.constexpr, RULE_T: tl.constexpr,
    NOTE: tl.constexpr, COUNT: tl.constexpr,
    PIECES: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What a program of ``cast_from_amaxes`` does, as ``cast_stored_tile`` for ``cast_stored``."""
    # Backwards: what the first pass has read last is still in the cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row, column = _first_of_tile(program, padded, columns, group, PIECES, R, C)
    loaded = LOAD(inputs, row, column, rows, columns, R, C, EVEN)
    first = tl.program_id(0) == 0
    if (STRAIGHT == _TENSOR) or (TRANSPOSED == _TENSOR):
        index = tl.arange(0, COUNT)
        bits = tl.max(tl.load(amaxes + index, mask=index < count, other=0), axis=0)
        amax = float_of(bits)
        if NOTE:
            tl.atomic_max(as_bits(slot), bits, mask=first, sem="relaxed")
    scales = times(1.0, 4)
    scales_t = times(1.0, PIECES)
    if STRAIGHT == _TENSOR:
        scale = compute_scale(amax, RULE)
        scales = times(scale, 4)
        if first:
            tl.store(decode, reciprocal(scale))
    if STRAIGHT == _ROWS:
        scales = _row_scales(amaxes + _HEAD, row, padded, R)
    if TRANSPOSED == _TENSOR:
        scale_t = apart(compute_scale(amax, RULE_T), padded)
        scales_t = times(scale_t, PIECES)
        if first:
            tl.store(decode_t, reciprocal(scale_t))
    if TRANSPOSED == _ROWS:
        scales_t = _column_scales(amaxes + _HEAD + padded, column, columns, PIECES, C)
    cast_tile(
        VALUES, loaded, codes, codes_t, scales, scales_t, row, column, padded, columns,
        STRAIGHT, TRANSPOSED, PIECES, R, C, EVEN,
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
