"""A run that an exception ends leaves nothing on the model, and the next one is watched like the first."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from monitor_models import Fault, Net, Plant, batches, make_trainer, precision
from torch import Tensor

from lightning_fp8 import AmaxMonitor, FP8HealthMonitor, FP8Report, SkipBatchRecovery
from lightning_fp8.statistics import LAST_AMAX


class Stops(Net):
    def __init__(self) -> None:
        super().__init__()
        self.stop = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.stop and batch_idx == 2:
            raise RuntimeError("stopped")
        return super().training_step(batch, batch_idx)


def monitors(path: Path) -> list[pl.Callback]:
    return [
        FP8HealthMonitor(),
        AmaxMonitor(every_n_steps=1, statistics_every_n_steps=2),
        FP8Report(path / "page.html", every_n_steps=1),
    ]


def left_behind(model: Net) -> list[Any]:
    hooks = [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    return [*hooks, *(key for key in vars(model) if "telemetry" in key)]


@pytest.mark.parametrize("again", ["same callbacks", "new callbacks"])
def test_the_next_run_may_have_another_recipe(again: str, tmp_path: Path) -> None:
    model, callbacks = Stops(), monitors(tmp_path)
    with pytest.raises(RuntimeError, match="stopped"):
        make_trainer(callbacks, 4, precision()).fit(model, batches(4))
    assert "Stopped at step 2" in (tmp_path / "page.html").read_text()
    assert not left_behind(model)
    model.stop = False
    if again == "new callbacks":
        callbacks = monitors(tmp_path)
    trainer = make_trainer(callbacks, 4, precision("tensorwise"))
    trainer.fit(model, batches(4))
    assert not left_behind(model)
    # What was read is the table of the run that ran.
    (conversion,) = trainer.precision_plugin.conversions
    conversion.step()
    history = callbacks[1].history.values[-1, : len(conversion.converted), :, 0]
    assert torch.equal(history, conversion.runtime.table.data[..., LAST_AMAX].log2())


class NoSpaceAtTheEnd(CSVLogger):
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if step == 1 and "fp8/late/input/amax" in metrics:
            raise OSError("no space")


def test_the_exception_that_ends_a_run_is_the_one_that_is_seen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever else fails then is told, and keeps no other callback from its work."""
    page, log, health = tmp_path / "page.html", tmp_path / "recovery.jsonl", FP8HealthMonitor("raise")

    class InTheWay(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 2:
                log.unlink()
                log.mkdir()
                page.mkdir()

    callbacks = [
        FP8Report(page, every_n_steps=1), AmaxMonitor(every_n_steps=1), SkipBatchRecovery(log=log), health,
        Plant(Fault(1, "late", "input", math.inf)), InTheWay(),
    ]  # fmt: skip
    model = Stops()
    with pytest.raises(RuntimeError, match="stopped"):
        make_trainer(callbacks, 4, precision(), logger=NoSpaceAtTheEnd(tmp_path)).fit(model, batches(4))
    messages = [record.getMessage() for record in caplog.records]
    told = [message for message in messages if "while another exception ends the run" in message]
    assert [message.split(",")[0] for message in told] == ["AmaxMonitor", "FP8HealthMonitor", "FP8Report"]
    assert caplog.text.count(f"event log {log} ends here") == 1
    assert "no space" in told[0] and "Inf first seen in the input of 'late'" in told[1]
    assert [event.layer for event in health.events] == ["late"]
    assert not left_behind(model) and not list(tmp_path.glob(".*"))
