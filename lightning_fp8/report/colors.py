"""Colours for heat maps: the same in TensorBoard's images and in the report."""

from __future__ import annotations

import torch
from torch import Tensor

#: Dark to light, with even steps of lightness, told apart by people who are colour-blind (points of matplotlib's
#: "cividis", Nuñez et al. 2018).
SCALE = ((0, 34, 78), (53, 69, 108), (102, 105, 112), (148, 142, 119), (200, 183, 102), (254, 232, 56))
#: Where there is no value.
MISSING = (255, 255, 255)
#: NaN and Inf, and what was clamped.
ALARM = (214, 39, 40)

#: Rows of a heat map are drawn several pixels high, at most so many, up to this height of the whole.
_MAX_ZOOM, _MAX_HEIGHT = 8, 512


def colorize(values: Tensor, low: float, high: float) -> Tensor:
    """Colours of values between ``low`` and ``high``, uint8 ``[..., 3]``; Inf is an alarm, NaN is missing.

    Args:
        values: fp32, any shape.
        low: gets the darkest colour; everything below too.
        high: gets the lightest colour; everything above too.
    """
    points = torch.tensor(SCALE, dtype=torch.float32)
    place = ((values - low) / max(high - low, 1e-12)).nan_to_num().clamp(0, 1) * (len(SCALE) - 1)
    left = place.floor().long().clamp(max=len(SCALE) - 2)
    share = (place - left).unsqueeze(-1)
    colors = points[left] * (1 - share) + points[left + 1] * share
    colors[values.isnan()] = torch.tensor(MISSING, dtype=torch.float32)
    colors[values.isinf()] = torch.tensor(ALARM, dtype=torch.float32)
    return colors.round().to(torch.uint8)


def heat_map(values: Tensor, low: float, high: float) -> Tensor:
    """A picture of values over steps, uint8 ``[height, width, 3]``.

    Args:
        values: fp32 ``[steps, rows]``; the first row is on top.
        low: as in :func:`colorize`.
        high: as in :func:`colorize`.
    """
    zoom = min(max(_MAX_HEIGHT // max(values.shape[1], 1), 1), _MAX_ZOOM)
    return colorize(values.t(), low, high).repeat_interleave(zoom, 0).repeat_interleave(zoom, 1)


def color_range(finite: Tensor, headroom: bool) -> tuple[float, float]:
    """Which values get the darkest and the lightest colour.

    Args:
        finite: what is shown, at least one value, none of them NaN or Inf; powers of two.
        headroom: begin at zero, where danger begins, and leave out of sight what is far from it.
    """
    low, high = float(finite.min()), float(finite.max())
    if headroom:
        low, high = min(0.0, low), min(high, 24.0)
    return low, max(high, low + 1)
