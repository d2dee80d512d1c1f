"""Triton kernels for stored scales of tensors: known before the data, so that one pass reads the values once.

It writes both operands and the amax.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_fp8.kernels.triton_common import (
    LARGEST,
    MIN_SCALE,
    amax_bits,
    amax_of_tiles,
    apart,
    as_bits,
    cast_tile,
    cast_tiles,
    compute_scale,
    first_of_tile,
    load_matrix,
    quarter_of,
    reciprocal,
    times,
)
from lightning_fp8.statistics import SCALE, SCALE_TRANSPOSED

_SCALE = tl.constexpr(SCALE)
_SCALE_TRANSPOSED = tl.constexpr(SCALE_TRANSPOSED)
#: What `cast_stored` and `triton_foreseen.cast_again` may make of the transposed operand, beside codes and nothing: no
#: codes, but they settle the scale and keep it, in the place of the decode scale, for `cast_later`.
LATER = 2
_LATER = tl.constexpr(LATER)


@triton.jit(do_not_specialize=["rows", "group"])
def cast_stored(
    x, codes, codes_t, decode, decode_t, slot, rows, columns, stride, padded, group,
    STRAIGHT: tl.constexpr, RULE: tl.constexpr,
    TRANSPOSED: tl.constexpr, RULE_T: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Tensorwise scales from the slot; one program a tile. ``TRANSPOSED`` may be ``LATER``."""
    cast_stored_tile(
        load_matrix, quarter_of, x.dtype.element_ty, (x, stride), codes, codes_t, decode, decode_t, slot,
        rows, columns, padded, group, STRAIGHT, RULE, TRANSPOSED, RULE_T, 1, R, C, EVEN,
    )  # fmt: skip


@triton.jit
def cast_stored_tile(
    LOAD: tl.constexpr, VALUES: tl.constexpr, DTYPE: tl.constexpr, inputs, codes, codes_t, decode, decode_t, slot,
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
    the tensor twice and writes it once; on an H200 the first reading took 15 ms for 64 Mi values that were computed),
    and happens once in the life of a slot: it saves every other call a second launch. While the scale is unset its word
    counts the programs that have finished: as a float, such a count lies below all scales.
    """
    CODES_T: tl.constexpr = TRANSPOSED == 1
    row, column = first_of_tile(tl.program_id(0), padded, columns, group, PIECES, R, C)
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
        VALUES, DTYPE, loaded, codes, codes_t, times(scale, 4), times(scale_t, PIECES), row, column, padded, columns,
        STRAIGHT, CODES_T, PIECES, R, C, EVEN,
    )  # fmt: skip
    tl.atomic_max(as_bits(slot), amax_bits(largest), sem="relaxed")
    if tl.program_id(0) == 0:
        if STRAIGHT:
            tl.store(decode, reciprocal(scale))
        if TRANSPOSED:
            tl.store(decode_t, left_of_scale(scale_t, TRANSPOSED))
    if unset | unset_t:
        counter = as_bits(slot) + tl.where(unset, _SCALE, _SCALE_TRANSPOSED)
        # The atomic is one thread's: all others must have stored before it.
        tl.debug_barrier()
        tiles = tl.cdiv(padded, R) * tl.cdiv(columns, C * PIECES)
        if tl.atomic_add(counter, 1) == tiles - 1:
            # Half of the values at once, lest this take registers from the way that all other calls go.
            NARROW: tl.constexpr = C // 2
            amax = amax_of_tiles(LOAD, VALUES, DTYPE, inputs, 0, 1, rows, columns, PIECES, R, NARROW, EVEN)
            telling = (amax > 0.0) & (amax <= LARGEST)
            if telling:
                if STRAIGHT:
                    scale = tl.where(unset, compute_scale(amax, RULE), scale)
                if TRANSPOSED:
                    scale_t = apart(tl.where(unset_t, compute_scale(amax, RULE_T), scale_t), padded)
                cast_tiles(
                    LOAD, VALUES, DTYPE, inputs, codes, codes_t, scale, scale_t, 0, 1, rows, columns, padded,
                    STRAIGHT, CODES_T, PIECES, R, NARROW, EVEN,
                )  # fmt: skip
            if STRAIGHT:
                tl.store(slot + _SCALE, tl.where(unset & (telling == 0), 0.0, scale))
                tl.store(decode, reciprocal(scale))
            if TRANSPOSED:
                tl.store(slot + _SCALE_TRANSPOSED, tl.where(unset_t & (telling == 0), 0.0, scale_t))
                tl.store(decode_t, left_of_scale(scale_t, TRANSPOSED))


@triton.jit
def left_of_scale(scale, TRANSPOSED: tl.constexpr):
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
        load_matrix, quarter_of, x.dtype.element_ty, (x, stride), codes_t, decode_t, kept,
        rows, columns, padded, group, 1, R, C, EVEN,
    )  # fmt: skip


@triton.jit
def cast_later_tile(
    LOAD: tl.constexpr, VALUES: tl.constexpr, DTYPE: tl.constexpr, inputs, codes_t, decode_t, kept,
    rows, columns, padded, group,
    PIECES: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What a program of ``cast_later`` does, as ``cast_stored_tile`` for ``cast_stored``."""
    row, column = first_of_tile(tl.program_id(0), padded, columns, group, PIECES, R, C)
    loaded = LOAD(inputs, row, column, rows, columns, R, C, EVEN)
    scale = tl.load(kept)
    cast_tile(
        VALUES, DTYPE, loaded, None, codes_t, times(1.0, 4), times(scale, PIECES), row, column, padded, columns,
        False, True, PIECES, R, C, EVEN,
    )  # fmt: skip
    if tl.program_id(0) == 0:
        tl.store(decode_t, reciprocal(scale))
