"""What the loss of a Trainer's run is multiplied by."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_fp8.settings import FP8Settings


def loss_factor(trainer: pl.Trainer) -> float:
    """The factor on the next loss, under this package's precision plugin or Lightning's; read from the device."""
    plugin = trainer.precision_plugin
    settings = getattr(plugin, "settings", None)
    if isinstance(settings, FP8Settings):
        return settings.loss_factor
    scaler = getattr(plugin, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None else 1.0
