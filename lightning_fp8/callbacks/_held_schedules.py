"""Learning-rate schedules that stand still in skipped steps."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl

from lightning_fp8.recovery.snapshot import Settings, same_groups, set_settings, settings_of


class HeldSchedules:
    """Schedules as they were before a step that is skipped.

    Lightning steps them after every batch, whatever became of it. So their state is kept, and put back once they were
    stepped: after the batch, and those that follow a metric after the validation that may come next.
    """

    def __init__(self) -> None:
        self._held: list[tuple[Any, dict[str, Any], Settings]] = []

    def hold(self, trainer: pl.Trainer) -> None:
        """Keep the schedules that are stepped each batch; in manual optimization the user steps them."""
        if not trainer.lightning_module.automatic_optimization:
            return
        self._held = [
            (config, copy.deepcopy(config.scheduler.state_dict()), settings_of(config.scheduler.optimizer))
            for config in trainer.lr_scheduler_configs
            if config.interval == "step"
        ]

    def after_batch(self) -> None:
        """Put back those that Lightning has stepped by now."""
        self._put_back(plateau=False)

    def after_validation(self) -> None:
        """Put back the others, and let go: the next batch begins, or the epoch ends."""
        self._put_back(plateau=True)
        self.drop()

    def drop(self) -> None:
        """Let go: the schedules were set to something else."""
        self._held = []

    def _put_back(self, *, plateau: bool) -> None:
        for config, state, settings in self._held:
            # Of groups that have joined since neither knows.
            if config.reduce_on_plateau == plateau and same_groups(config.scheduler.optimizer, settings):
                config.scheduler.load_state_dict(state)
                set_settings(config.scheduler.optimizer, settings)
