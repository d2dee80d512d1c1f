"""``FP8Precision`` for the ``pytorch_lightning`` namespace, whose Trainer refuses classes of the ``lightning`` one."""

from __future__ import annotations

from pytorch_lightning.plugins.precision import Precision

from lightning_fp8.precision import TrainerPrecision


class FP8Precision(TrainerPrecision, Precision):  # type: ignore[misc]
    """The same as :class:`lightning_fp8.FP8Precision`, for ``pytorch_lightning.Trainer``."""

    _elsewhere = "for lightning's Trainer use lightning_fp8.FP8Precision"
