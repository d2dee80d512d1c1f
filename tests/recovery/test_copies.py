"""Modules that are copied or pickled while a fit goes on: the copies are as if there had been no callbacks."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from recovery_models import Net, fit, recovery, same_weights

from lightning_fp8 import AmaxMonitor, FP8HealthError, FP8HealthMonitor, FP8Precision, FP8Throughput
from lightning_fp8.health import HealthEvent


class Keep(pl.Callback):
    """Keeps a copy of the module from its last training batch."""

    def __init__(self, make_copy: Callable[[Any], Any]) -> None:
        self.make_copy = make_copy
        self.kept: Any = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        if index == 10:
            pl_module.trainer, trainer = None, pl_module.trainer  # type: ignore[assignment]
            self.kept = self.make_copy(pl_module)
            pl_module.trainer = trainer


def pickled(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, pickled])
def test_a_copy_trains_as_one_that_knew_no_callbacks(make_copy: Callable[[Any], Any], tmp_path: Path) -> None:
    kept = []
    callbacks = [recovery(), FP8HealthMonitor(), AmaxMonitor(every_n_steps=5), FP8Throughput(2)]
    for others in ([], callbacks):
        keep = Keep(make_copy)
        fit(tmp_path, [*others, keep], max_steps=20, plugins=[FP8Precision()])
        kept.append(keep.kept)
    plain, watched = kept
    assert same_weights(plain, watched)
    assert "training_step" not in vars(plain) and watched.training_step.__self__ is watched
    for model in (plain, watched):
        before = copy.deepcopy(model)
        fit(tmp_path, [FP8HealthMonitor(), recovery()], model=model, max_steps=10, plugins=[FP8Precision()])
        assert not same_weights(model, before)
    assert same_weights(plain, watched)


def test_nothing_is_left_of_hooks_in_a_copy(tmp_path: Path) -> None:
    keep = Keep(copy.deepcopy)
    fit(tmp_path, [FP8HealthMonitor(), keep], model=Net(), max_steps=12)
    layer = keep.kept.net[0]
    assert all(hook(layer, (), None) is None for hook in layer._forward_pre_hooks.values())
    assert all(hook(layer, (), {}, None) is None for hook in layer._forward_hooks.values())
    assert not any(hook.__self__ for hook in layer._forward_hooks.values() if hasattr(hook, "__self__"))


def test_errors_travel_between_processes() -> None:
    event = HealthEvent("nonfinite", 3, "net.0", "input", (0,), float("inf"), 1.0)
    error = pickle.loads(pickle.dumps(FP8HealthError(event)))
    assert (error.event, str(error)) == (event, str(FP8HealthError(event)))
