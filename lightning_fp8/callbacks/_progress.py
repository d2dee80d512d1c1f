"""What the progress bar shows of the layers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar


def show_worst_layer(
    trainer: pl.Trainer, pl_module: pl.LightningModule, name: str, measure: str, value: float, skipped: int | None
) -> None:
    """Show the worst of all layers and the number of skipped steps; from ``on_train_batch_end``.

    A progress bar takes numbers only; Lightning's own show the layer's name in their description.

    Args:
        trainer: its bar is changed.
        pl_module: through which the numbers go.
        name: of the layer and role.
        measure: what ``value`` is: ``fp8_headroom`` in powers of two, or ``amax_ratio`` to the mean of the last steps.
        value: of the worst layer.
        skipped: steps skipped so far; ``None``: nobody skips.
    """
    # Tensors on the CPU: a number would be copied to the device, and waited for.
    values = {measure: round(value, 2) + 0.0}  # no -0.0
    if skipped is not None:
        values["skipped"] = float(skipped)
    for key, number in values.items():
        pl_module.log(key, torch.tensor(number), prog_bar=True, logger=False, on_step=True, on_epoch=False)
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar) and bar.is_enabled:
        bar.train_progress_bar.set_description(f"Epoch {trainer.current_epoch} [{name}]", refresh=False)
    if isinstance(bar, RichProgressBar) and bar.progress is not None and bar.train_progress_bar_id is not None:
        # Rich takes square brackets for markup.
        bar.progress.update(bar.train_progress_bar_id, description=f"Epoch {trainer.current_epoch} ({name})")


def skipped_steps(trainer: pl.Trainer) -> int | None:
    """How many steps recovery has rejected so far; ``None`` without recovery."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        counts: Any = getattr(getattr(callback, "events", None), "counts", None)
        if counts is not None:
            return int(counts["rejected"])
    return None
