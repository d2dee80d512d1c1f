"""Recovery where the module steps by hand: several steps, or several optimizers, a batch."""

from __future__ import annotations

import math

import lightning.pytorch as pl
import pytest
import torch
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
from torch import nn

from lightning_fp8 import FP8Precision, LayerSelection, RecoveryExhausted
from lightning_fp8.callbacks.fault_injector import Fault, FaultInjector
from lightning_fp8.callbacks.health_monitor import FP8HealthMonitor
from lightning_fp8.callbacks.recovery import SkipBatchRecovery


class StepsByHand(Net):
    """Five steps a batch in the first, two from then on."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for _ in range(5 if self.trainer.global_step == 0 else 2):
            self.optimizers().zero_grad()
            self.manual_backward(self.loss(batch))
            self.optimizers().step()


def test_snapshots_where_a_batch_takes_several_steps(tmp_path):
    """Steps 5, 7, 9, ...: never a multiple of ten, but for 10, 20 and so on they pass by."""
    callback = recovery(snapshot_every=10, skips=0, fallbacks=0)
    _, trainer = fit(
        tmp_path, [FaultInjector([Fault("weight", 35, "net.0")]), callback], model=StepsByHand(), max_steps=45
    )
    (rewind,) = (event for event in callback.events.recent if event["event"] == "rewind")
    assert rewind["good_step"] == 31 and trainer.global_step >= 45


def test_faults_where_a_batch_takes_several_steps(tmp_path):
    """A batch begins at 0, 5, 7 and 9: what cannot be planted within one waits for the next."""
    faults = [Fault("loss", 3, factor=1e9), Fault("batch", 6), Fault("batch", 7), Fault("weight", 8, "net.0")]
    callback = recovery(skips=9, warmup=2)
    fit(tmp_path, [FaultInjector(faults), callback], model=StepsByHand(), max_steps=11)
    assert [event["step"] for event in rejected(callback)] == [3, 7, 8, 9, 10]


class Manual(Net):
    """Two optimizers, stepped by hand; the second one's loss is bad when the batch says so."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for optimizer, factor in ((first, 1.0), (second, NAN if batch_idx == 5 else 1.0)):
            optimizer.zero_grad()
            loss = self.loss(batch) * factor
            self.manual_backward(loss)
            optimizer.step()
        self.recovered.append(next(c for c in self.trainer.callbacks if isinstance(c, SkipBatchRecovery)).accepted)
        self.log("train_loss", loss, on_step=True, on_epoch=True)

    def configure_optimizers(self):
        self.recovered = []
        fused = self.optimizer == "adamw-fused"
        return [torch.optim.AdamW(layer.parameters(), 1e-2, fused=fused) for layer in (self.net[0], self.net[4])]


@pytest.mark.parametrize("mode", MODES)
def test_manual_optimization_with_two_optimizers(tmp_path, mode):
    callback = recovery(spike=None)
    model, trainer = fit(tmp_path, [callback], model=Manual(MODES[mode]), max_steps=40)
    assert len(rejected(callback)) == 1 and rejected(callback)[0]["step"] == 11
    assert math.isfinite(test_loss(model)) and trainer.callback_metrics["train_loss"].isfinite()
    if mode == "exact":
        assert [i for i, accepted in enumerate(model.recovered) if not accepted] == [5]


class Adversaries(Manual):
    """From batch 10 on one optimizer's loss is bad, the first's, the second's or both."""

    def __init__(self, bad, optimizer):
        super().__init__(optimizer)
        self.bad = bad

    def training_step(self, batch, batch_idx):
        for place, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch) * (NAN if batch_idx >= 10 and place in self.bad else 1.0))
            optimizer.step()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [(0,), (1,), (0, 1)])
def test_a_batch_counts_once_however_many_optimizers_step_on_it(tmp_path, mode, bad):
    callback = recovery(spike=None, skips=2, log=None)
    with pytest.raises(RecoveryExhausted, match="9 bad steps in a row"):
        fit(tmp_path, [callback], model=Adversaries(bad, MODES[mode]), max_steps=64)
    events = rejected(callback)
    assert [event["action"] for event in events if event["action"] != "skip"] == ["rewind"] * 2 + ["stop"]
    batches = [event["batches"] for event in events]
    assert batches == [[10 + i] for i in range(len(events) // len(bad)) for _ in bad], "each step has its line"


class Gan(pl.LightningModule):
    """A discriminator, which sees the data, and a generator, which does not; trained in the order asked for."""

    automatic_optimization = False

    def __init__(self, order, fused):
        super().__init__()
        torch.manual_seed(7)
        self.g = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.d = nn.Sequential(nn.Linear(16, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.order, self.fused, self.weights = order, fused, []

    def training_step(self, batch, batch_idx):
        optimizers = dict(zip("gd", self.optimizers(), strict=True))
        made = self.g(torch.randn(16, 16))
        for name in self.order:
            if name == "d":
                loss = nn.functional.softplus(self.d(made.detach()) - self.d(batch[0])).mean()
            else:
                loss = nn.functional.softplus(-self.d(made)).mean()
            optimizers[name].zero_grad()
            self.manual_backward(loss)
            optimizers[name].step()
        self.weights.append([part[0].weight.detach().clone() for part in (self.g, self.d)])

    def configure_optimizers(self):
        return [torch.optim.AdamW(part.parameters(), 1e-3, fused=self.fused) for part in (self.g, self.d)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("order", ["dg", "gd"])
@pytest.mark.parametrize("monitored", [False, True])
def test_of_two_optimizers_only_the_one_that_met_the_bad_data_is_rejected(tmp_path, order, fused, monitored):
    monitor = FP8HealthMonitor({"nonfinite": "recover"}, progress_bar=False)
    callback, model = recovery(spike=None, log=None), Gan(order, fused)
    callbacks = [FaultInjector([Fault("batch", 20)]), *([monitor] if monitored else []), callback]
    fit(tmp_path, callbacks, model=model, plugins=[FP8Precision()], max_steps=40)
    (event,) = rejected(callback)
    assert (event["step"], event["verdict"], event["layer"]) == (20 + order.index("d"), "nonfinite", "batch")
    before, after = model.weights[9:11]
    assert not torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    if monitored:
        assert [(e.step, e.kind, e.layer, e.role) for e in monitor.events] == [(20, "nonfinite", "d.0", "input")]


@pytest.mark.parametrize("fused", [False, True])
def test_a_batch_is_left_out_by_every_optimizer(tmp_path, fused):
    callback, model = recovery(skip_batches=[(0, 10)], log=None), Gan("dg", fused)
    fit(tmp_path, [callback], model=model, plugins=[FP8Precision()], max_steps=40)
    assert [(event["step"], event["verdict"]) for event in rejected(callback)] == [(20, "rejected"), (21, "rejected")]
    assert all(torch.equal(one, other) for one, other in zip(*model.weights[9:11], strict=True))


class StepsPastLightning(Net):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch) * (NAN if batch_idx == 30 else 1.0))
        optimizer.step()
        self.kept = len(self.recovery.guard._losses), len(self.recovery._batches)


@pytest.mark.parametrize("mode", MODES)
def test_steps_past_lightning_are_told_of_and_nothing_goes_back(tmp_path, mode):
    callback, model = recovery(log=None), StepsPastLightning(MODES[mode], schedule=False)
    model.recovery = callback
    pl.seed_everything(7, verbose=False)
    start = model.net[0].weight.detach().clone()
    with pytest.warns(UserWarning, match=r"has judged no step.*self\.optimizers\(\)") as warned:
        make_trainer(tmp_path, [callback], max_epochs=1, max_steps=-1).fit(model, make_loader(640))
    assert len([w for w in warned if "judged no step" in str(w.message)]) == 1
    assert not callback.events.recent and not torch.equal(model.net[0].weight, start)
    assert max(model.kept) <= 1


class AccumulatesLong(Net):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch) / 10)
        if batch_idx % 10 == 9:
            self.optimizers().step()
            self.optimizers().zero_grad()


def test_batches_that_are_accumulated_by_hand_are_no_steps_past_lightning(tmp_path, recwarn):
    callback = recovery(log=None)
    make_trainer(tmp_path, [FaultInjector([Fault("loss", 2, factor=NAN)]), callback], max_steps=4).fit(
        AccumulatesLong(schedule=False), make_loader(640)
    )
    assert not any("judged no step" in str(w.message) for w in recwarn)
    assert [event["step"] for event in rejected(callback)] == [2] and len(rejected(callback)[0]["batches"]) == 10


class StepsWithoutGradients(Net):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.loss(batch)
        if batch_idx % 2:
            self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fp8", [False, True])
def test_a_manual_step_without_gradients_is_the_users_own(tmp_path, mode, fp8):
    runs = []
    for callbacks in ([], [recovery()]):
        plugins = [FP8Precision(layers=LayerSelection())] if fp8 else []
        model = StepsWithoutGradients(MODES[mode], schedule=False)
        runs.append(fit(tmp_path, callbacks, model=model, plugins=plugins, max_steps=12)[0])
    assert same_weights(*runs) and not rejected(callbacks[0])
    assert runs[1].net[1].num_batches_tracked == 12, "what forward moved stays"
