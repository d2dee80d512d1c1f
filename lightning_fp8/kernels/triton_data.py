"""Triton kernels for scales of tensors and rows, in any mixture of the two, that come from the data.

A pass for the amaxes comes first, then one for the codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_fp8.kernels.triton_common import (
    amax_of_tiles,
    apart,
    appended,
    as_bits,
    bits_of,
    cast_tile,
    compute_scale,
    encode,
    first_of_tile,
    float_of,
    larger,
    load_matrix,
    magnitude,
    magnitudes,
    quarter_of,
    reciprocal,
    rounded_bits,
    row_numbers,
    times,
)

#: What a direction's scales cover.
ABSENT = 0
TENSOR = 1
ROWS = 2
_TENSOR = tl.constexpr(TENSOR)
_ROWS = tl.constexpr(ROWS)
#: Words of scratch memory before the amaxes of the rows: one for the tensor's amax, the rest for alignment.
SCRATCH_HEAD = 4
_HEAD = tl.constexpr(SCRATCH_HEAD)
#: Rows that a program finds amaxes of at most, and rows or columns at least, but for the last.
MOST_ROWS, FEWEST_ROWS = 512, 16
_MOST_ROWS = tl.constexpr(MOST_ROWS)


@triton.jit(do_not_specialize=["rows"])
def amax_partials(x, partials, rows, columns, stride, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr):
    """The amax's bits of every ``num_programs``-th tile, one word a program."""
    amax_partials_tile(load_matrix, quarter_of, tl.float32, (x, stride), partials, rows, columns, 1, R, C, EVEN)


@triton.jit
def amax_partials_tile(
    LOAD: tl.constexpr, VALUES: tl.constexpr, DTYPE: tl.constexpr, inputs, partials, rows, columns,
    PIECES: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What a program of ``amax_partials`` does, as ``triton_stored.cast_stored_tile`` for its kernel.

    Amaxes are rounded to ``DTYPE``: fp32 for values that are rounded as they are.
    """
    amax = amax_of_tiles(
        LOAD, VALUES, DTYPE, inputs, tl.program_id(0), tl.num_programs(0), rows, columns, PIECES, R, C, EVEN
    )  # fmt: skip
    tl.store(partials + tl.program_id(0), bits_of(amax))


@triton.jit(do_not_specialize=["rows"])
def row_and_column_scales(
    x, scratch, decode, decode_t, slot, rows, columns, stride, padded, turns,
    ROW: tl.constexpr, RULE: tl.constexpr, COLUMN: tl.constexpr, RULE_T: tl.constexpr,
    TOTAL: tl.constexpr, NOTE: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The scale of every row and of every column in one read; ``turns`` tiles a program, one below the other.

    ``scratch`` holds words, zero at first: the tensor's amax, three unused, ``padded`` rows, ``columns`` columns, and
    one for each group of programs that share rows, and that share columns. Rows and columns get the bits of their
    amaxes first, and of their scales in the end.
    """
    row_and_column_scales_tile(
        load_matrix, quarter_of, tl.float32, (x, stride), scratch, decode, decode_t, slot,
        rows, columns, padded, turns, ROW, RULE, COLUMN, RULE_T, TOTAL, NOTE, 1, R, C, EVEN,
    )  # fmt: skip


@triton.jit
def row_and_column_scales_tile(
    LOAD: tl.constexpr, VALUES: tl.constexpr, DTYPE: tl.constexpr, inputs, scratch, decode, decode_t, slot,
    rows, columns, padded, turns,
    ROW: tl.constexpr, RULE: tl.constexpr, COLUMN: tl.constexpr, RULE_T: tl.constexpr,
    TOTAL: tl.constexpr, NOTE: tl.constexpr,
    PIECES: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What a program of ``row_and_column_scales`` does, as ``triton_stored.cast_stored_tile`` for its kernel.

    Rows lie within a warp, so that nobody waits for another warp before the end. The program that is the last of those
    that share rows, or columns, makes scales of their amaxes: in the cast every lane would divide, many by the same
    numbers, and a kernel between the two costs a launch.
    """
    Q: tl.constexpr = R // 4
    column_tiles = tl.cdiv(columns, C * PIECES)
    row_groups = tl.cdiv(rows, R * turns)
    group = tl.program_id(0) // column_tiles
    column_tile = tl.program_id(0) % column_tiles
    column = column_tile * C
    row_tile = group * turns
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
                amaxes = rounded_bits(tl.max(bits_of(magnitudes(values, PIECES)), axis=1), DTYPE)
                tl.atomic_max(scratch + _HEAD + r, amaxes, mask=r < rows, sem="relaxed")
        row_tile += 1
    amax = 0
    for piece in tl.static_range(PIECES):
        amaxes = rounded_bits(tl.max(bits_of(by_column[piece]), axis=0), DTYPE)
        if COLUMN:
            k = column + piece * (columns // PIECES) + tl.arange(0, C)
            tl.atomic_max(scratch + _HEAD + padded + k, amaxes, mask=k < columns, sem="relaxed")
        amax = tl.maximum(amax, tl.max(amaxes, axis=0))
    if TOTAL:
        tl.atomic_max(scratch, amax, sem="relaxed")
    if NOTE:
        tl.atomic_max(as_bits(slot), amax, sem="relaxed")
    # The atomics that count are one thread's: all others must have left their amaxes before them.
    tl.debug_barrier()
    finished = scratch + _HEAD + padded + columns
    if ROW:  # noqa: SIM102 (Triton evaluates both sides of "and")
        if tl.atomic_add(finished + group, 1) == column_tiles - 1:
            first = group * R * turns
            _scale_each(scratch + _HEAD, decode, first, tl.minimum(first + R * turns, padded), RULE, _MOST_ROWS)
    if COLUMN:  # noqa: SIM102
        if tl.atomic_add(finished + row_groups + column_tile, 1) == row_groups - 1:
            for piece in tl.static_range(PIECES):
                first = column + piece * (columns // PIECES)
                _scale_each(scratch + _HEAD + padded, decode_t, first, tl.minimum(first + C, columns), RULE_T, C)


@triton.jit
def _larger_each(largest, values, COUNT: tl.constexpr):
    """The larger of ``largest`` and the magnitude of ``values``, matrix by matrix."""
    found = ()
    for i in tl.static_range(COUNT):
        found = appended(found, larger(largest[i], magnitude(values[i])))
    return found


@triton.jit
def _scale_each(amaxes, decode, first, end, RULE: tl.constexpr, MOST: tl.constexpr):
    """Amaxes from ``first`` to ``end``, ``MOST`` at most, become scales in their place; writes their reciprocals."""
    i = first + tl.arange(0, MOST)
    # Other multiprocessors have written them: not from this one's own cache.
    amax = float_of(tl.load(amaxes + i, mask=i < end, other=0, cache_modifier=".cg"))
    scale = compute_scale(amax, RULE)
    tl.store(amaxes + i, bits_of(scale), mask=i < end)
    tl.store(decode + i, reciprocal(scale), mask=i < end)


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
        load_matrix, quarter_of, x.dtype.element_ty, (x, stride), codes, codes_t, decode, decode_t, slot, amaxes,
        rows, columns, padded, group, count, STRAIGHT, RULE, TRANSPOSED, RULE_T, NOTE, COUNT, 1, R, C, EVEN,
    )  # fmt: skip


@triton.jit
def cast_from_amaxes_tile(
    LOAD: tl.constexpr, VALUES: tl.constexpr, DTYPE: tl.constexpr, inputs, codes, codes_t, decode, decode_t, slot,
    amaxes, rows, columns, padded, group, count,
    STRAIGHT: tl.constexpr, RULE: tl.constexpr,
    TRANSPOSED: tl.constexpr, RULE_T: tl.constexpr,
    NOTE: tl.constexpr, COUNT: tl.constexpr,
    PIECES: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What a program of ``cast_from_amaxes`` does, as ``triton_stored.cast_stored_tile`` for its kernel."""
    # Backwards: what the first pass has read last is still in the cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row, column = first_of_tile(program, padded, columns, group, PIECES, R, C)
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
        VALUES, DTYPE, loaded, codes, codes_t, scales, scales_t, row, column, padded, columns,
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
