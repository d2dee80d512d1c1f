"""Triton kernels for scales of tensors that come from the data, but are powers of two and so can be foreseen.

Such a scale is mostly what it was in the step before. So the values are cast at once, by ``triton_stored``, with what
the amax before tells, and the amax that this finds tells whether that was right. Where it was not, the values are read
and cast once more. Codes and scales are those of a pass for the amax followed by one for the codes, always; what was
foreseen decides how long they take.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_fp8.kernels.triton_common import (
    LARGEST,
    apart,
    as_bits,
    bits_of,
    cast_tiles,
    compute_scale,
    load_matrix,
    quarter_of,
    reciprocal,
)
from lightning_fp8.kernels.triton_stored import left_of_scale
from lightning_fp8.statistics import AMAX, LAST_AMAX, SCALE, SCALE_TRANSPOSED

_AMAX = tl.constexpr(AMAX)
_LAST_AMAX = tl.constexpr(LAST_AMAX)
_SCALE = tl.constexpr(SCALE)
_SCALE_TRANSPOSED = tl.constexpr(SCALE_TRANSPOSED)


@triton.jit
def foresee(slot, foreseen, RULE: tl.constexpr, RULE_T: tl.constexpr):
    """A slot for one cast: the scales that this step's amax so far tells, or else the last one's.

    Where neither tells one both scales are 1: a stored scale must not be unset.
    """
    amax = tl.load(slot + _AMAX)
    amax = tl.where((amax > 0.0) & (amax <= LARGEST), amax, tl.load(slot + _LAST_AMAX))
    tl.store(foreseen + _AMAX, 0.0)
    tl.store(foreseen + _SCALE, compute_scale(amax, RULE))
    tl.store(foreseen + _SCALE_TRANSPOSED, compute_scale(amax, RULE_T))


@triton.jit(do_not_specialize=["rows"])
def cast_again(
    x, codes, codes_t, decode, decode_t, slot, foreseen, rows, columns, stride, padded,
    STRAIGHT: tl.constexpr, RULE: tl.constexpr,
    TRANSPOSED: tl.constexpr, RULE_T: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Codes with the right scales, where those in ``foreseen`` are not what the amax there tells; notes the amax.

    ``TRANSPOSED`` may be ``triton_stored.LATER``.
    """
    cast_again_tile(
        load_matrix, quarter_of, x.dtype.element_ty, (x, stride), codes, codes_t, decode, decode_t, slot, foreseen,
        rows, columns, padded, STRAIGHT, RULE, TRANSPOSED, RULE_T, 1, R, C, EVEN,
    )  # fmt: skip


@triton.jit
def cast_again_tile(
    LOAD: tl.constexpr, VALUES: tl.constexpr, DTYPE: tl.constexpr, inputs, codes, codes_t, decode, decode_t, slot,
    foreseen, rows, columns, padded,
    STRAIGHT: tl.constexpr, RULE: tl.constexpr,
    TRANSPOSED: tl.constexpr, RULE_T: tl.constexpr,
    PIECES: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What a program of ``cast_again`` does, as ``triton_stored.cast_stored_tile`` for its kernel."""
    program = tl.program_id(0)
    amax = tl.load(foreseen + _AMAX)
    scale = compute_scale(amax, RULE)
    scale_t = compute_scale(amax, RULE_T)
    if program == 0:
        tl.atomic_max(as_bits(slot), bits_of(amax), sem="relaxed")
    if (scale != tl.load(foreseen + _SCALE)) | (scale_t != tl.load(foreseen + _SCALE_TRANSPOSED)):
        if program == 0:
            if STRAIGHT:
                tl.store(decode, reciprocal(scale))
            if TRANSPOSED:
                tl.store(decode_t, left_of_scale(scale_t, TRANSPOSED))
        cast_tiles(
            LOAD, VALUES, DTYPE, inputs, codes, codes_t, scale, apart(scale_t, padded),
            program, tl.num_programs(0), rows, columns, padded, STRAIGHT, TRANSPOSED == 1, PIECES, R, C, EVEN,
        )  # fmt: skip
