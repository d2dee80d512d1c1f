"""What the loss of a Trainer's run is multiplied by."""

from __future__ import annotations

import lightning.pytorch as pl
from torch.amp import GradScaler

from lightning_fp8.loss_scaling import LossScaler
from lightning_fp8.settings import FP8Settings


def loss_scaler(trainer: pl.Trainer) -> GradScaler | LossScaler | None:
    """This package's precision plugin keeps it in its settings, Lightning's own as ``scaler``."""
    plugin = trainer.precision_plugin
    settings = getattr(plugin, "settings", None)
    return settings.loss_scaler if isinstance(settings, FP8Settings) else getattr(plugin, "scaler", None)


def loss_factor(trainer: pl.Trainer) -> float:
    """The factor on the next loss, under this package's precision plugin or Lightning's; read from the device."""
    scaler = loss_scaler(trainer)
    if scaler is None:
        return 1.0
    return scaler.factor if isinstance(scaler, LossScaler) else float(scaler.get_scale())
