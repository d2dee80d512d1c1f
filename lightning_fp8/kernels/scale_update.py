"""The delayed-scaling update of all layers in one Triton kernel, and the end of the window."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_fp8 import formats
from lightning_fp8.kernels.triton_common import LARGEST, MAX_SCALE, compute_scale_of, round_down_to_power_of_two
from lightning_fp8.recipes import ROLES, DelayedScaling
from lightning_fp8.statistics import AMAX, LAST_AMAX, NOT_SEEN, SCALE, SCALE_TRANSPOSED, SLOT_SIZE

_AMAX = tl.constexpr(AMAX)
_LAST_AMAX = tl.constexpr(LAST_AMAX)
_SCALE = tl.constexpr(SCALE)
_SCALE_TRANSPOSED = tl.constexpr(SCALE_TRANSPOSED)
_SLOT_SIZE = tl.constexpr(SLOT_SIZE)
_NOT_SEEN = tl.constexpr(NOT_SEEN)
_ROLES = tl.constexpr(len(ROLES))


def step_scales(
    table: Tensor, history: Tensor, position: Tensor, format_maxima: Tensor, recipe: DelayedScaling
) -> None:
    """Enter the window's amaxes into the history, move the scales, and begin a new window, in place.

    The same bits as ``lightning_fp8.amax_history.update_scales`` followed by ``StatisticsTable.finish_step``.

    Args:
        table: fp32 ``[layers, 3, 4]`` on a GPU, contiguous as all others: the statistics.
        history: fp32 ``[layers, 3, length]``.
        position: int64 ``[layers, 3]``.
        format_maxima: fp32 ``[2, 3]``: the largest value of each role's format, straight and transposed.
        recipe: the settings.
    """
    slots, length = position.numel(), history.shape[-1]
    if not slots:
        return
    block = triton.next_power_of_2(length)
    _step_scales[(slots,)](
        table, history, position, format_maxima, length,
        recipe.amax_compute_algo == "max", 2.0**-recipe.margin, recipe.smoothing, recipe.max_scale or formats.MAX_SCALE,
        recipe.power_of_two, block, num_warps=min(max(block // 256, 1), 8),
        enable_fp_fusion=False,  # Smoothing rounds both products, as torch does.
    )  # fmt: skip


@triton.jit
def _next_scale(
    slot, column, basis, maximum, movable,
    HEADROOM: tl.constexpr, SMOOTHING: tl.constexpr, LIMIT: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    old = tl.load(slot + column)
    new = compute_scale_of(basis, maximum, HEADROOM, MAX_SCALE)
    if SMOOTHING > 0.0:
        new = tl.where(old > 0.0, SMOOTHING * old + (1.0 - SMOOTHING) * new, new)
    new = tl.minimum(new, LIMIT)
    if POWER_OF_TWO:
        new = round_down_to_power_of_two(new)
    tl.store(slot + column, tl.where(movable, new, old))


@triton.jit
def _step_scales(
    table, history, position, maxima, length,
    WHOLE_HISTORY: tl.constexpr, HEADROOM: tl.constexpr, SMOOTHING: tl.constexpr, LIMIT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a slot."""
    index = tl.program_id(0)
    role = index % _ROLES
    slot = table + index * _SLOT_SIZE
    amax = tl.load(slot + _AMAX)
    seen = (amax >= 0.0) & (amax <= LARGEST)
    place = tl.load(position + index)
    history += index.to(tl.int64) * length
    basis = amax
    if WHOLE_HISTORY:
        entry = tl.arange(0, BLOCK)
        past = tl.load(history + entry, mask=entry < length, other=0.0)
        basis = tl.max(tl.where(entry == place, tl.where(seen, amax, past), past), axis=0)
    tl.store(history + place, amax, mask=seen)
    tl.store(position + index, (place + seen.to(tl.int64)) % length)
    movable = seen & (basis > 0.0)
    _next_scale(slot, _SCALE, basis, tl.load(maxima + role), movable, HEADROOM, SMOOTHING, LIMIT, POWER_OF_TWO)
    maximum = tl.load(maxima + _ROLES + role)
    _next_scale(slot, _SCALE_TRANSPOSED, basis, maximum, movable, HEADROOM, SMOOTHING, LIMIT, POWER_OF_TWO)
    # NaN compares false: it counts as seen.
    tl.store(slot + _LAST_AMAX, tl.where(amax < 0.0, tl.load(slot + _LAST_AMAX), amax))
    tl.store(slot + _AMAX, _NOT_SEEN)
