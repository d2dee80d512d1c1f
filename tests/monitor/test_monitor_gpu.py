"""On a GPU: nothing waits for the device, and the other backend that needs one is seen too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from monitor_models import WIDTH, Fault, Net, Plant, make_trainer, precision
from torch import Tensor

from lightning_fp8.callbacks.amax_monitor import AmaxMonitor
from lightning_fp8.callbacks.health_monitor import FP8HealthMonitor
from lightning_fp8.callbacks.report import FP8Report
from lightning_fp8.recipes import ROLES

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


class OnDevice:
    """Batches that are on the device already: copying them would be a wait that is not the monitors'."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.batch = torch.randn(32, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(1))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        return (self.batch.clone() for _ in range(self.count))


class NoWaiting(pl.Callback):
    """Synchronisation is an error from the fourth step to the last."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, index: int) -> None:
        if index == 3:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if trainer.global_step == trainer.max_steps - 1:
            torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("plugin", ["delayed", "rowwise", None])
def test_no_step_waits_for_the_device(plugin: str | None, tmp_path: Path) -> None:
    callbacks = [
        NoWaiting(),
        FP8HealthMonitor("log"),
        AmaxMonitor(1, statistics_every_n_steps=2),
        FP8Report(tmp_path / "page.html", every_n_steps=1),
    ]
    trainer = make_trainer(
        callbacks, 12, precision(plugin) if plugin else None, accelerator="gpu", logger=TensorBoardLogger(tmp_path)
    )
    trainer.fit(Net(), OnDevice(12))
    assert (tmp_path / "page.html").exists()


BACKENDS = [("native", "delayed"), ("torchao", "rowwise"), ("transformer_engine", "delayed")]


def need(backend: str) -> None:
    if backend != "native":
        pytest.importorskip({"torchao": "torchao", "transformer_engine": "transformer_engine.pytorch"}[backend])


@pytest.mark.parametrize(("backend", "recipe"), BACKENDS)
def test_a_slow_drift_reports_nothing(backend: str, recipe: str) -> None:
    need(backend)

    class Drift(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Tensor, index: int) -> None:
            batch.mul_(1.03**index)

    monitor = FP8HealthMonitor("raise")
    make_trainer([Drift(), monitor], 40, precision(recipe, backend=backend), accelerator="gpu").fit(
        Net(lr=0.0), OnDevice(40)
    )
    assert monitor.events == []


@pytest.mark.parametrize(("backend", "recipe"), BACKENDS)
def test_planted_faults_are_named(backend: str, recipe: str) -> None:
    need(backend)
    faults = [Fault(2 + 2 * n, "late", role, math.nan) for n, role in enumerate(ROLES)]
    faults.append(Fault(22, "late", "input", factor=4.0))
    monitor = FP8HealthMonitor("log")
    plugin = precision(recipe, backend=backend)
    make_trainer([monitor, Plant(*faults)], 25, plugin, accelerator="gpu").fit(Net(), OnDevice(25))
    assert [(e.step, e.layer, e.role) for e in monitor.events] == [(f.step, f.layer, f.role) for f in faults]
    assert [e.kind for e in monitor.events] == ["nonfinite"] * 3 + ["spike"]
