"""torchmetrics on what FP8 does to tensors; they stand alone, and reduce over ranks.

rate = UnderflowRate("e4m3/rowwise")
rate.update(activations)
print(rate.compute())
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_fp8.cast_statistics import CastSums, cast_sums, fits
from lightning_fp8.casts import Cast
from lightning_fp8.kernels.reference import amax_of
from lightning_fp8.statistics import SCALE, SLOT_SIZE


class _CastMetric(Metric):
    """Adds up what casts do.

    Args:
        cast: a :class:`~lightning_fp8.casts.Cast`, or its words: ``"e4m3/tensorwise"``, ``"e5m2/rowwise/pow2"``.
        kwargs: torchmetrics' own.

    Raises:
        ValueError: an unknown format or granularity.
        TypeError: ``cast`` is neither.
    """

    full_state_update = False
    underflows: Tensor
    overflows: Tensor
    values: Tensor
    signal: Tensor
    noise: Tensor

    def __init__(self, cast: Cast | str = "e4m3/tensorwise", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        parsed = Cast.parse(cast) if isinstance(cast, str) else cast
        if parsed is None:
            raise ValueError("Give a cast, such as 'e4m3/tensorwise'.")
        if not isinstance(parsed, Cast):
            raise TypeError(f"A cast is a Cast or its words, such as 'e4m3/tensorwise', got {cast!r}.")
        self.cast = parsed
        for name in CastSums._fields:
            self.add_state(name, default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, x: Tensor, scale: Tensor | float | None = None) -> None:
        """Cast a tensor and count.

        Args:
            x: ``[..., columns]`` or a scalar, fp32, bf16 or fp16.
            scale: of a tensorwise cast, fp32 scalar, as delayed scaling knows it before the data; ``None``: from ``x``.

        Raises:
            ValueError: the columns don't fit the cast's blocks, or a scale is given where each block has its own.
        """
        x = torch.atleast_1d(x)
        if not fits(x.shape[-1], self.cast):
            raise ValueError(f"{x.shape[-1]} columns are not a multiple of the blocks of {self.cast}.")
        slot = None
        if scale is not None:
            if self.cast.granularity != "tensorwise":
                raise ValueError(f"Under {self.cast.granularity} each block takes its scale from the data: give none.")
            slot = torch.zeros(SLOT_SIZE, dtype=torch.float32, device=x.device)
            slot[SCALE] = scale
        sums, _ = cast_sums(x, self.cast, slot)
        for name, value in sums._asdict().items():
            setattr(self, name, getattr(self, name) + value)


class UnderflowRate(_CastMetric):
    """Percentage of values that are not zero before the cast, and zero after it."""

    higher_is_better = False

    def compute(self) -> Tensor:
        """Percent, scalar."""
        return (100 * self.underflows / self.values).float()


class SaturationRate(_CastMetric):
    """Percentage of values that the cast clamped to the format's range."""

    higher_is_better = False

    def compute(self) -> Tensor:
        """Percent, scalar."""
        return (100 * self.overflows / self.values).float()


class SQNR(_CastMetric):
    """Signal to quantisation noise ratio: ``10 log10(sum x^2 / sum (x - cast(x))^2)``."""

    higher_is_better = True

    def compute(self) -> Tensor:
        """Decibels, scalar; Inf where nothing was lost."""
        return (10 * torch.log10(self.signal / self.noise)).float()


class Amax(Metric):
    """The largest magnitude; NaN and Inf propagate.

    Args:
        kwargs: torchmetrics' own.
    """

    full_state_update = False
    higher_is_better = None
    amax: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("amax", default=torch.zeros(()), dist_reduce_fx="max")

    def update(self, x: Tensor) -> None:
        """Look at a tensor of any shape."""
        self.amax = torch.maximum(self.amax, amax_of(x.detach()).to(self.amax))

    def compute(self) -> Tensor:
        """Scalar, in the values' units."""
        return self.amax
