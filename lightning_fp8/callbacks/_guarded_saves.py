"""Doubtful weights are never saved: before a save, the last good state comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_fp8.callbacks._surrounded import surround


def guard_saves_of_weights_only(module: pl.LightningModule, make_good: Callable[[], bool]) -> Callable[[], None]:
    """Ask before a checkpoint of weights only is written; Lightning asks no callback then, but the module.

    Args:
        module: whose ``on_save_checkpoint`` is surrounded.
        make_good: makes the weights good; tells whether it had to change them.

    Returns:
        To be called to leave the module as it was.
    """

    def around(own: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
        def on_save_checkpoint(checkpoint: dict[str, Any]) -> None:
            if "optimizer_states" not in checkpoint and make_good():
                checkpoint["state_dict"] = module.trainer.strategy.lightning_module_state_dict()
            own(checkpoint)

        return on_save_checkpoint

    return surround(module, "on_save_checkpoint", around)


def collect_again(trainer: pl.Trainer, callback: Callback, checkpoint: dict[str, Any]) -> None:
    """What Lightning had put into a full checkpoint before the good state came back.

    Args:
        trainer: holds the good state.
        callback: whose state changed with it.
        checkpoint: is changed in place.
    """
    # Where an averaging callback came first, its average is the state_dict.
    weights = "current_model_state" if "current_model_state" in checkpoint else "state_dict"
    checkpoint[weights] = trainer.strategy.lightning_module_state_dict()
    checkpoint["optimizer_states"] = [trainer.strategy.optimizer_state(o) for o in trainer.optimizers]
    checkpoint["lr_schedulers"] = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    checkpoint["callbacks"][callback.state_key] = callback.state_dict()
    trainer.precision_plugin.on_save_checkpoint(checkpoint)
