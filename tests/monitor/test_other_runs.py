"""What belongs to one run does not show in another."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from monitor_models import Fault, Net, Plant, batches, make_trainer, precision

from lightning_fp8 import AmaxMonitor, FP8HealthMonitor, FP8Report
from lightning_fp8.callbacks.communication import FP8Communication
from lightning_fp8.callbacks.throughput import FP8Throughput
from lightning_fp8.tuning.flops import Flops

pytestmark = pytest.mark.filterwarnings("ignore")


class Watchers:
    """One callback of each kind that has a state."""

    def __init__(self, directory: Path) -> None:
        self.health = FP8HealthMonitor()
        self.amaxes = AmaxMonitor(every_n_steps=1, picture_every=None)
        self.report = FP8Report(directory / "page.html", every_n_steps=1)
        self.throughput = FP8Throughput()
        self.communication = FP8Communication(stochastic=True)

    @property
    def callbacks(self) -> list[pl.Callback]:
        return [self.health, self.amaxes, self.report, self.throughput, self.communication]

    def trainer(self, steps: int, *faults: Fault, **settings: Any) -> pl.Trainer:
        return make_trainer([*self.callbacks, Plant(*faults)], steps, precision(), **settings)

    def told(self) -> dict[str, Any]:
        """What these callbacks show after a fit."""
        return {
            "events": [event.step for event in self.health.events],
            "counts": dict(self.health.counts),
            "amaxes": self.amaxes.history.steps.tolist(),
            "report": self.report._layers.steps.tolist(),
            "curves": self.report._curves.steps.tolist(),
            "flops": self.throughput.state_dict()["high"],
            "place": self.communication.state_dict()["seed"],
        }


def fault(step: int) -> Fault:
    return Fault(step, "late", "input", math.nan)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of a run of five steps, with trouble in the third; what it counted is told by numbers that no other run has."""
    path = tmp_path / "other.ckpt"
    trainer = Watchers(tmp_path).trainer(5, fault(2))
    trainer.fit(Net(), batches(5))
    trainer.save_checkpoint(path)
    content = torch.load(path, weights_only=False)
    content["callbacks"]["FP8Throughput"]["high"] *= 7
    content["callbacks"]["FP8Communication"] = {"seed": 11}
    torch.save(content, path)
    return path


def test_an_evaluated_checkpoint_leaves_nothing_in_the_next_fit(checkpoint: Path, tmp_path: Path) -> None:
    plain, evaluated = Watchers(tmp_path), Watchers(tmp_path)
    plain.trainer(3, fault(1)).fit(Net(), batches(3))
    trainer = evaluated.trainer(3, fault(1))
    trainer.validate(Net(), batches(1), ckpt_path=checkpoint, verbose=False)
    trainer.fit(Net(), batches(3))
    assert evaluated.told() == plain.told()
    assert evaluated.told()["amaxes"] == [0, 1, 2]


def test_a_resumed_fit_goes_on_with_all_of_it(checkpoint: Path, tmp_path: Path) -> None:
    resumed = Watchers(tmp_path)
    trainer = resumed.trainer(7, fault(6))
    trainer.validate(Net(), batches(1), ckpt_path=checkpoint, verbose=False)
    trainer.fit(Net(), batches(7), ckpt_path=checkpoint)
    told = resumed.told()
    assert told["events"] == [2, 6] and told["counts"] == {"nonfinite": 2}
    assert told["amaxes"] == told["report"] == told["curves"] == list(range(7))
    assert told["flops"] == torch.load(checkpoint, weights_only=False)["callbacks"]["FP8Throughput"]["high"]
    assert told["place"] == 11


def test_a_second_run_with_the_same_callbacks_is_told_as_the_first_of_new_ones(tmp_path: Path) -> None:
    """Also the counts that loggers get, where a run before had events too."""
    new, used = Watchers(tmp_path), Watchers(tmp_path)
    used.trainer(5, fault(0), fault(2)).fit(Net(), batches(5))
    used.throughput._counted = (Flops(1.0, 1.0), 1)
    used.communication._keys.place = 11
    logged = {}
    for watchers, directory in ((new, tmp_path / "new"), (used, tmp_path / "used")):
        trainer = watchers.trainer(3, fault(1), logger=CSVLogger(directory))
        trainer.fit(Net(), batches(3))
        with Path(trainer.log_dir, "metrics.csv").open() as file:
            logged[watchers] = [row["fp8/health/nonfinite"] for row in csv.DictReader(file)]
    assert used.told() == new.told()
    assert [value for value in logged[used] if value] == ["1.0"] and logged[used] == logged[new]


def test_a_second_fit_of_the_same_trainer_goes_on(tmp_path: Path) -> None:
    watchers, model = Watchers(tmp_path), Net()
    trainer = watchers.trainer(-1, fault(1), fault(4), max_epochs=1)
    trainer.fit(model, batches(3))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, batches(3))
    told = watchers.told()
    assert told["events"] == [1, 4] and told["counts"] == {"nonfinite": 2}
    assert told["amaxes"] == told["report"] == told["curves"] == list(range(6))


def test_bytes_on_the_wire_are_those_of_the_run(tmp_path: Path) -> None:
    watchers = Watchers(tmp_path)
    watchers.communication.grad_traffic.record(sent=1, bf16=2)
    watchers.trainer(1).fit(Net(), batches(1))
    assert watchers.communication.grad_traffic.calls == 0
