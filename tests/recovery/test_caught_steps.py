"""Batches that users leave out."""

from __future__ import annotations

import math

import pytest
from recovery_models import MODES, NAN, Net, fit, make_loader, recovery, rejected, same_weights, test_loss

from lightning_fp8 import FP8Precision, LayerSelection
from lightning_fp8.callbacks.fault_injector import Fault, FaultInjector
from lightning_fp8.callbacks.recovery import SkipBatchException, SkipBatchRecovery
from lightning_fp8.recovery.events import read_events


class GivesUp(Net):
    """Gives a batch up in one of the ways there are."""

    def __init__(self, way: str, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.way = way

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 5:
            if self.way == "none":
                return None
            if self.way == "exception":
                raise SkipBatchException("bad data")
            callback = next(c for c in self.trainer.callbacks if isinstance(c, SkipBatchRecovery))
            return {"loss": callback.reject(loss)}
        return loss


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["none", "exception", "reject"])
def test_users_can_leave_a_batch_out(tmp_path, way, mode):
    callback = recovery(skips=0, fallbacks=0, rewinds=0)
    model, trainer = fit(tmp_path, [callback], model=GivesUp(way, MODES[mode]), max_steps=30)
    events = rejected(callback)
    assert [(event["batches"], event["action"]) for event in events] == [([5], "skip")], "it never climbs the ladder"
    assert events[0]["verdict"] == ("no_loss" if way == "none" else "rejected")
    left_out = [event for event in callback.events.recent if event["event"] == "left_out"]
    assert len(left_out) == (way == "exception")
    for event in left_out:
        assert [event[key] for key in ("step", "epoch", "batch")] == [events[0]["step"], 0, 5]
    assert math.isfinite(test_loss(model)) and trainer.global_step == 30
    assert "training_step" not in model.__dict__, "the module is left as it was"


class GivesUpByHand(Net):
    """Leaves ``training_step`` at batch 5, before it has done anything or with gradients of bad data."""

    automatic_optimization = False

    def __init__(self, way: str, optimizer: str) -> None:
        super().__init__(optimizer, schedule=False, dropout=0.0)
        self.way = way

    def training_step(self, batch, batch_idx):
        if batch_idx == 5 and self.way == "return":
            return
        optimizer = self.optimizers()
        loss = self.loss(batch) * (NAN if batch_idx == 5 else 1.0)
        self.log("train_loss", loss, on_epoch=True)
        self.manual_backward(loss)
        if batch_idx == 5:
            raise SkipBatchException("bad data")
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_given_up_before_its_step_leaves_no_trace_on_the_next(tmp_path, mode, fp8):
    runs = []
    for way, callbacks in (("return", []), ("raise", [recovery()])):
        plugins = [FP8Precision(layers=LayerSelection())] if fp8 else None
        settings = {"model": GivesUpByHand(way, MODES[mode]), "loader": make_loader(192), "plugins": plugins}
        runs.append(fit(tmp_path, callbacks, max_steps=11, **settings))
    (model, trainer), (other, its_trainer) = runs
    events = [(event["event"], event["batch"]) for event in callbacks[0].events.recent]
    assert events == [("left_out", 5)] and trainer.global_step == its_trainer.global_step == 11
    assert same_weights(model, other)
    assert trainer.callback_metrics["train_loss_epoch"] == its_trainer.callback_metrics["train_loss_epoch"]


def test_left_out_batches_leave_no_trace(tmp_path):
    """``skip_batches`` of a run's own log repeats that run bit for bit without the faults."""
    log = tmp_path / "events.jsonl"
    faults = [Fault("batch", 5), Fault("batch", 35)]
    model, _ = fit(tmp_path, [FaultInjector(faults), recovery(log=log)], model=Net(dropout=0.0), max_steps=50)
    assert [(event["epoch"], event["batches"]) for event in read_events(log)] == [(0, [5]), (1, [3])]
    again = recovery(skip_batches=log, log=None)
    other, _ = fit(tmp_path, [again], model=Net(dropout=0.0), max_steps=50)
    assert same_weights(model, other) and len(rejected(again)) == 2
    assert SkipBatchRecovery(skip_batches=[(0, 5), (1, 3)]).skip_batches == again.skip_batches
