"""When a finite step counts as bad: its loss or gradients lie far above those of the steps accepted before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.checks import check_number, keep_as_floats
from lightning_fp8.host_copy import on_cpu

#: A normal distribution's sigma in units of its median absolute deviation.
MAD_TO_SIGMA = 1.4826
#: What the statistics follow: the largest loss over the ranks, and the largest norm of the gradients.
SIGNALS = ("loss", "grad_norm")


@dataclass(frozen=True)
class Thresholds:
    """When a finite step counts as bad.

    Attributes:
        spike: loss or gradient norm this many robust sigmas above the median of accepted steps; None: never.
        window: number of accepted steps the median is taken over.
        warmup: accepted steps before the first spike can be called.
        floor: sigma is at least this fraction of the median, so that a flat curve doesn't make noise a spike.
        amax_jump: an operand's amax this many times its last one; None: never. Far above what the window of delayed
            scaling can follow. The first accepted steps call none, two more than there are layers, at most ``warmup``.

    Raises:
        TypeError: where a setting is no number.
        ValueError: where one makes no sense.
    """

    spike: float | None = 10.0
    window: int = 128
    warmup: int = 32
    floor: float = 0.1
    amax_jump: float | None = 1000.0

    def __post_init__(self) -> None:
        check_number(none=True, spike=self.spike, amax_jump=self.amax_jump)
        check_number(whole=True, window=self.window, warmup=self.warmup)
        check_number(floor=self.floor)
        if self.spike is not None and not 1 <= self.spike < math.inf:
            raise ValueError(f"spike is {self.spike}: give at least 1 (sigmas above the median), or None for no check.")
        if self.amax_jump is not None and not 1 < self.amax_jump < math.inf:
            raise ValueError(f"amax_jump is {self.amax_jump}: give a factor above 1, or None for no check.")
        if self.window < 4:
            raise ValueError(f"window is {self.window}: a median wants at least 4 steps.")
        if not 2 <= self.warmup <= self.window:
            raise ValueError(f"warmup is {self.warmup}: choose it from 2 to window ({self.window}).")
        if not 0 <= self.floor < math.inf:
            raise ValueError(f"floor is {self.floor}: give a fraction of the median, 0 or above.")
        keep_as_floats(self, "spike", "floor", "amax_jump")


class SpikeStatistics:
    """Median and median absolute deviation of each signal over the last accepted steps, in a ring on the device.

    Attributes:
        values: fp32 ``[signals, window]``; NaN where nothing was written yet.
        count: int64 ``[]``, accepted steps so far.
        parameters: how many have their gradients in the norm; of others the norm is another quantity.
    """

    def __init__(self, thresholds: Thresholds, device: torch.device | str = "cpu", parameters: int = 0) -> None:
        self.thresholds, self.parameters = thresholds, parameters
        self.values = torch.full((len(SIGNALS), thresholds.window), math.nan, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self._positions = torch.arange(thresholds.window, device=device)

    def score(self, signals: Tensor) -> Tensor:
        """How many robust sigmas each of ``signals`` (fp32 ``[signals]``) lies above its median; 0 in the warm-up."""
        filled = self.count.clamp(max=self.thresholds.window)
        middle = ((filled - 1).clamp(min=0) // 2).expand(len(SIGNALS), 1)
        # NaN sorts last, so the unwritten part of the ring is never reached.
        median = self.values.sort(dim=1).values.gather(1, middle)
        deviation = (self.values - median).abs().sort(dim=1).values.gather(1, middle)
        sigma = torch.maximum(MAD_TO_SIGMA * deviation, self.thresholds.floor * median.abs())
        score = (signals - median[:, 0]) / sigma[:, 0].clamp(min=torch.finfo(torch.float32).tiny)
        return torch.where(self.count >= self.thresholds.warmup, score, 0.0)

    def update(self, signals: Tensor, accepted: Tensor) -> None:
        """Let ``signals`` in where ``accepted`` (bool ``[]``)."""
        here = (self._positions == self.count % self.thresholds.window) & accepted
        torch.where(here, signals[:, None], self.values, out=self.values)
        self.count += accepted

    def reset(self) -> None:
        """Begin anew, warm-up included."""
        self.values.fill_(math.nan)
        self.count.zero_()

    def live_state(self) -> dict[str, Any]:
        """What :meth:`state_dict` copies to the CPU, where it is."""
        return {"values": self.values, "count": self.count, "parameters": self.parameters}

    def state_dict(self) -> dict[str, Any]:
        """Plain values, and tensors on the CPU."""
        return on_cpu(self.live_state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was; begin anew with another window or other parameters than it had."""
        same = state["values"].shape == self.values.shape and state["parameters"] == self.parameters
        if not same:
            return self.reset()
        self.values.copy_(state["values"])
        self.count.copy_(state["count"])
