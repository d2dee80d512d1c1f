"""Batches that users leave out."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner
from recovery_models import (
    MODES,
    NAN,
    Net,
    fit,
    make_loader,
    make_trainer,
    recovery,
    rejected,
    same_weights,
    test_loss,
)

from lightning_fp8 import FP8Precision, LayerSelection
from lightning_fp8.callbacks.fault_injector import Fault, FaultInjector
from lightning_fp8.callbacks.recovery import SkipBatchException, SkipBatchRecovery
from lightning_fp8.recovery.events import read_events


class GivesUp(Net):
    """Gives a batch up in one of the ways there are."""

    def __init__(self, way: str, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.way = way

    def configure_callbacks(self):
        self.recovery = next(c for c in self.trainer.callbacks if isinstance(c, SkipBatchRecovery))
        return []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 5:
            if self.way == "none":
                return None
            if self.way == "exception":
                raise SkipBatchException("bad data")
            return {"loss": self.recovery.reject(loss)}
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


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("way", ["none", "exception", "reject"])
def test_a_dynamic_loss_scale_stands_still_for_it(tmp_path, way, precision):
    callback, plugin = recovery(), FP8Precision(precision=precision, loss_scale="dynamic")
    fit(tmp_path, [callback], model=GivesUp(way), plugins=[plugin], max_steps=30)
    lowered = [event for event in rejected(callback) if event["action"] == "loss_scale_lowered"]
    scaler = plugin.settings.loss_scaler.state_dict()
    assert scaler["scale"] == 65536.0 / 2 ** len(lowered)
    assert lowered or scaler["_growth_tracker"] == 29


def test_batches_that_overflow_lower_it_though_they_are_left_out(tmp_path):
    callback, plugin = recovery(skip_batches=[(0, 2)]), FP8Precision(loss_scale="dynamic")
    faults = FaultInjector([Fault("gradient", 2, "net.4", value=float("inf"))])
    fit(tmp_path, [faults, callback], plugins=[plugin], max_steps=5)
    assert [event["action"] for event in rejected(callback)] == ["loss_scale_lowered"]
    assert plugin.settings.loss_scaler.state_dict()["scale"] == 65536.0 / 2


class InAFinder(GivesUp):
    """Of bad data, which it gives up."""

    def __init__(self, way: str) -> None:
        super().__init__(way)
        self.lr, self.batch_size = 1e-3, 2

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return super().training_step((inputs * (NAN if batch_idx == 5 else 1.0), targets), batch_idx)

    def train_dataloader(self):
        return make_loader(batch_size=self.batch_size)

    val_dataloader = train_dataloader

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.lr)


@pytest.mark.parametrize("way", ["none", "exception", "reject"])
@pytest.mark.parametrize("finder", ["lr", "batch size", "callback"])
def test_batches_are_left_out_in_finders_too(tmp_path, way, finder):
    callback, model = recovery(), InAFinder(way)
    finds = LearningRateFinder(num_training_steps=10)
    trainer = make_trainer(
        tmp_path, [callback, *([finds] if finder == "callback" else [])], max_steps=10, enable_checkpointing=True
    )
    if finder == "lr":
        finds.optimal_lr = Tuner(trainer).lr_find(model, num_training=10)
    elif finder == "batch size":
        Tuner(trainer).scale_batch_size(model, max_trials=1, steps_per_trial=7)
    assert not callback.events.recent
    trainer.fit(model)
    assert [event["batches"] for event in rejected(callback)] == [[5]] and math.isfinite(test_loss(model))
    if finder != "batch size":
        bad = [index for index, loss in enumerate(finds.optimal_lr.results["loss"]) if math.isnan(loss)]
        assert bad == [5], "and spoil nothing"


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
