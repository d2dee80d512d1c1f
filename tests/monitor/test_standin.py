"""The health monitor on Transformer Engine's layers, run by a stand-in on the CPU."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import lightning.pytorch as pl
import pytest
from monitor_models import Fault, Net, Plant, batches, make_trainer, precision

from lightning_fp8.callbacks.health_monitor import FP8HealthMonitor
from lightning_fp8.health import HealthEvent
from lightning_fp8.recipes import ROLES
from tests.backends.conftest import library  # noqa: F401
from tests.backends.models import StandIn

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("library")]


def events(steps: int, recipe: str, *callbacks: pl.Callback, lr: float = 1e-4, **options: Any) -> list[HealthEvent]:
    monitor = FP8HealthMonitor("ignore")
    plugin = precision(recipe, backend=StandIn(**options))
    make_trainer([*callbacks, monitor], steps, plugin).fit(Net(lr), batches(steps))
    return monitor.events


@pytest.mark.parametrize(("recipe", "cache_weights"), [("delayed", False), ("delayed", True), ("tensorwise", False)])
def test_every_planted_fault_is_one_event_and_clean_steps_are_none(recipe: str, cache_weights: bool) -> None:
    cases = product((math.nan, math.inf), ROLES, ("blocks.0", "late", "head"))
    faults = [Fault(2 + 2 * n, layer, role, value) for n, (value, role, layer) in enumerate(cases)]
    told = events(faults[-1].step + 3, recipe, Plant(*faults), cache_weights=cache_weights)
    assert [(e.kind, e.step, e.layer, e.role) for e in told] == [("nonfinite", f.step, f.layer, f.role) for f in faults]


@pytest.mark.parametrize(("role", "layer"), [("input", "blocks.0"), ("weight", "late"), ("grad_output", "blocks.1")])
@pytest.mark.parametrize("amax", ["measured", "library"])
def test_a_jump_is_reported(role: str, layer: str, amax: str) -> None:
    (event,) = events(18, "delayed", Plant(Fault(15, layer, role, factor=4.0)), amax=amax)
    assert (event.kind, event.step, event.layer, event.role) == ("spike", 15, layer, role)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_a_slow_drift_is_not(recipe: str) -> None:
    class Drift(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
            batch.mul_(1.03**index)

    assert events(40, recipe, Drift(), lr=0.0) == []
