"""SkipBatchRecovery under the Trainer, one device."""

from __future__ import annotations

import ast
import math
import re
import warnings

import lightning.pytorch as pl
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from recovery_models import OPTIMIZERS, Net, fit, make_data, make_loader, make_trainer, same_weights, test_loss
from torch import nn
from torch.utils.data import DataLoader

from lightning_fp8 import FP8Precision, LayerSelection, RecoveryExhausted
from lightning_fp8.callbacks.fault_injector import Fault, FaultInjector
from lightning_fp8.callbacks.health_monitor import FP8HealthMonitor
from lightning_fp8.callbacks.recovery import SkipBatchException, SkipBatchRecovery
from lightning_fp8.recovery.events import read_events
from lightning_fp8.recovery.faults import InjectedFault

MODES = {"exact": "adamw", "fast": "adamw-fused"}
NAN = math.nan


def recovery(**settings) -> SkipBatchRecovery:
    return SkipBatchRecovery(**{"window": 32, "warmup": 8, "snapshot_every": 10, **settings})


def rejected(callback: SkipBatchRecovery) -> list[dict]:
    return [event for event in callback.events.recent if event["event"] == "rejected"]


@pytest.mark.parametrize("optimizer", MODES.values())
@pytest.mark.parametrize("fp8", [False, True])
def test_a_clean_run_is_bit_identical_with_it_on(tmp_path, optimizer, fp8):
    runs = []
    for callbacks in ([], [recovery()]):
        plugins = [FP8Precision()] if fp8 else []
        runs.append(fit(tmp_path, callbacks, model=Net(optimizer), plugins=plugins)[0])
    assert same_weights(*runs) and runs[0].losses == runs[1].losses
    assert not rejected(callbacks[0])


class FromZero(Net):
    """With a learning rate that begins at zero, three layers without BatchNorm, and small weights in the last."""

    def __init__(self, optimizer: str, std: float, steps: int) -> None:
        super().__init__(optimizer)
        self.net = nn.Sequential(
            nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16)
        )
        nn.init.normal_(self.net[6].weight, std=std)
        self.steps = steps

    def configure_optimizers(self):
        optimizer = OPTIMIZERS[self.optimizer](self.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / self.steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("std", [1e-8, 1e-6])
@pytest.mark.parametrize("steps", [1, 5])
def test_small_initial_weights_are_no_fault(tmp_path, mode, std, steps):
    """The first steps make them, and layer by layer the gradients behind them, larger by orders of magnitude."""
    runs = []
    for callbacks in ([], [recovery()]):
        model = FromZero(MODES[mode], std, steps)
        plugins = [FP8Precision()]
        runs.append(fit(tmp_path, callbacks, model=model, plugins=plugins, max_steps=20)[0])
    assert same_weights(*runs) and not rejected(callbacks[0])


@pytest.mark.parametrize("mode", MODES)
def test_a_skipped_step_leaves_no_trace(tmp_path, mode):
    """Dropout off: the run with the bad batch must equal, bit for bit, one whose data never held it."""
    data = make_data(512)
    without = torch.utils.data.Subset(data, [i for i in range(512) if not 80 <= i < 96])
    model, trainer = fit(
        tmp_path, model=Net(MODES[mode], schedule=mode == "exact", dropout=0.0), loader=DataLoader(without, 16),
        max_steps=25,
    )  # fmt: skip
    callback = recovery()
    injector = FaultInjector([Fault("batch", 5)])
    other, other_trainer = fit(
        tmp_path, [injector, callback], model=Net(MODES[mode], schedule=mode == "exact", dropout=0.0),
        loader=DataLoader(data, 16), max_steps=26,
    )  # fmt: skip
    assert callback.guard.fast == (mode == "fast")
    assert same_weights(model, other)
    events = rejected(callback)
    assert len(events) == 1 and events[0]["batches"] == [5] and events[0]["layer"] == "batch"
    assert events[0]["samples"] == {"0": list(range(80, 96))}
    mine, theirs = (t.optimizers[0].state_dict() for t in (trainer, other_trainer))
    for state, other_state in zip(mine["state"].values(), theirs["state"].values(), strict=True):
        assert all(torch.equal(state[key], other_state[key]) for key in state)
    assert mine["param_groups"][0]["lr"] == theirs["param_groups"][0]["lr"], "the schedule was held"


def test_the_schedule_goes_on_where_asked_to(tmp_path):
    rates = []
    for hold in (None, False):
        callback = recovery(hold_schedule=hold)
        _, trainer = fit(tmp_path, [FaultInjector([Fault("batch", 3)]), callback], max_steps=10)
        rates.append(trainer.optimizers[0].param_groups[0]["lr"])
    assert rates == pytest.approx([1e-2 * 0.999**9, 1e-2 * 0.999**10])


class Plateau(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "monitor": "train_loss_step"},
        }


def test_a_plateau_schedule_is_held_too(tmp_path):
    _, trainer = fit(tmp_path, [FaultInjector([Fault("batch", 3)]), recovery()], model=Plateau(), max_steps=10)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 9


@pytest.mark.parametrize("mode", MODES)
def test_metrics_monitors_and_early_stopping_do_not_see_it(tmp_path, mode):
    best = ModelCheckpoint(tmp_path, monitor="train_loss_epoch", save_top_k=1, mode="min")
    stopping = EarlyStopping("train_loss", patience=100, check_on_train_epoch_end=True)
    faults = [Fault("batch", step) for step in (0, 5, 31)]
    callback = recovery()
    model, trainer = fit(
        tmp_path, [FaultInjector(faults), callback, stopping, best], model=Net(MODES[mode]), enable_checkpointing=True
    )
    assert len(rejected(callback)) == 3
    assert trainer.global_step == 60 and stopping.stopped_epoch == 0
    logged = trainer.callback_metrics
    good = [loss for loss in model.losses[32:] if math.isfinite(loss)]
    assert logged["train_loss_epoch"].item() == pytest.approx(sum(good) / len(good), rel=1e-5)
    assert logged["train_loss_step"].isfinite() and math.isfinite(best.best_model_score)


def test_the_epoch_mean_is_over_accepted_steps(tmp_path):
    model, trainer = fit(tmp_path, [FaultInjector([Fault("batch", 7)]), recovery()], max_steps=32)
    good = [loss for step, loss in enumerate(model.losses) if step != 7]
    assert trainer.callback_metrics["train_loss_epoch"].item() == pytest.approx(sum(good) / 31, rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_accumulation_spoils_its_window_only(tmp_path, mode):
    callback = recovery()
    injector = FaultInjector([Fault("batch", 4)])
    model, trainer = fit(
        tmp_path, [injector, callback], model=Net(MODES[mode]), accumulate_grad_batches=4, max_steps=14
    )
    assert [event["batches"] for event in rejected(callback)] == [[16, 17, 18, 19]]
    assert trainer.global_step == 14 and math.isfinite(test_loss(model))


def test_clipping_by_norm_does_not_spread_a_nan(tmp_path):
    callback = recovery()
    model, _ = fit(tmp_path, [FaultInjector([Fault("gradient", 4, "net.4")]), callback], gradient_clip_val=1.0)
    assert len(rejected(callback)) == 1 and rejected(callback)[0]["layer"] == "net.4.weight"
    assert math.isfinite(test_loss(model))


class BackboneLast(Net):
    """Its first layer joins the optimizer in the second epoch, at step 8."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.backbone, self.net = self.net[:2], self.net[2:]

    def loss(self, batch):
        return nn.functional.mse_loss(self.net(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer]([p for p in self.parameters() if p.requires_grad])


class Unfreeze(BackboneFinetuning):
    def __init__(self) -> None:
        super().__init__(unfreeze_backbone_at_epoch=1)


@pytest.mark.parametrize("mode", MODES)
def test_layers_that_are_unfrozen_in_mid_run_are_judged(tmp_path, mode):
    callback = recovery()
    faults = [Fault("gradient", step, "backbone.0") for step in (8, 12)]
    model, _ = fit(
        tmp_path, [Unfreeze(), FaultInjector(faults), callback], model=BackboneLast(MODES[mode]),
        loader=make_loader(128), max_steps=20,
    )  # fmt: skip
    events = [(event["step"], event["layer"], event["action"]) for event in callback.events.recent]
    assert events == [(step, "backbone.0.weight", "skip") for step in (8, 12)]
    assert callback.guard.fast == (mode == "fast") and math.isfinite(test_loss(model))


@pytest.mark.parametrize("mode", MODES)
def test_a_rewind_to_before_layers_were_unfrozen(tmp_path, mode):
    """They stay unfrozen; the statistics of the fewer parameters' gradients are not those of all."""
    callback = recovery(snapshot_every=4, skips=0, fallbacks=0)
    model, trainer = fit(
        tmp_path, [Unfreeze(), FaultInjector([Fault("weight", 9, "net.4")]), callback],
        model=BackboneLast(MODES[mode]), loader=make_loader(128), max_steps=24,
    )  # fmt: skip
    (rewind,) = (event for event in callback.events.recent if event["event"] == "rewind")
    assert rewind["good_step"] <= 8 and math.isfinite(test_loss(model)) and trainer.global_step == 24
    assert len(trainer.optimizers[0].param_groups) == 2
    assert callback.guard.judges[0].statistics.count < 24 - 9


class GroupsJoinWhileHeld(Plateau):
    """The skipped step is the epoch's last: its schedule is put back when the group has joined."""

    def configure_optimizers(self):
        configured = super().configure_optimizers()
        del configured["optimizer"].param_groups[0]["params"][2:]
        return configured

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": list(self.net[4].parameters())})


def test_a_group_joins_while_a_schedule_is_held(tmp_path):
    callback = recovery()
    _, trainer = fit(
        tmp_path, [FaultInjector([Fault("batch", 7)]), callback], model=GroupsJoinWhileHeld(),
        loader=make_loader(128), max_steps=12,
    )  # fmt: skip
    assert trainer.global_step == 12 and [event["step"] for event in callback.events.recent] == [7]


class Lazy(Net):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.net[4] = nn.LazyLinear(16)


class NaNInWeight(pl.Callback):
    """Spoils the last layer's weight, whatever it is called by then."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            with torch.no_grad():
                next(p for name, p in pl_module.named_parameters() if "net.4" in name and p.ndim == 2)[0, 0] = NAN


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fp8", [False, True])
def test_a_rewind_to_before_weights_were_pruned(tmp_path, mode, fp8):
    model = Net(MODES[mode])
    start = {name: value.clone() for name, value in model.named_parameters()}

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if callback.events.counts["rewind"] and not hasattr(self, "seen"):
                self.seen = {n.replace("_orig", ""): value.clone() for n, value in pl_module.named_parameters()}

    callback, looks = recovery(snapshot_every=50), Looks()
    pruning = ModelPruning("l1_unstructured", parameters_to_prune=[(model.net[4], "weight")], amount=0.3)
    plugins = [FP8Precision(layers=LayerSelection())] if fp8 else []
    callbacks = [NaNInWeight(12), callback, pruning, looks]
    fit(tmp_path, callbacks, model=model, loader=make_loader(128), plugins=plugins, max_steps=24)
    events = [(event["event"], event.get("layer")) for event in callback.events.recent]
    assert events[:2] == [("rejected", "net.4.weight"), ("rewind", None)] and callback.events.counts["rewind"] == 1
    assert all(torch.equal(looks.seen[name], value) for name, value in start.items())
    assert math.isfinite(test_loss(model))


@pytest.mark.parametrize("mode", MODES)
def test_a_good_state_that_lacks_new_parameters_is_none(tmp_path, mode, caplog):
    class NormsWeight(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 5:
                nn.utils.parametrizations.weight_norm(pl_module.net[4])
                trainer.optimizers[0].add_param_group({"params": list(pl_module.net[4].parametrizations.parameters())})

    callback = recovery(snapshot_every=50)
    faults = [FaultInjector([Fault("batch", 8)]), NaNInWeight(20)]
    model = Net(MODES[mode], schedule=False)
    fit(tmp_path, [*faults, NormsWeight(), callback], model=model, max_steps=30)
    dropped, _, _, rewind = callback.events.recent[:4]
    assert (dropped["event"], rewind["event"]) == ("good_state_dropped", "rewind")
    assert callback.events.counts["rewind"] == callback.events.counts["good_state_dropped"] == 1
    assert dropped["layers"] == [f"net.4.parametrizations.weight.original{index}" for index in range(2)]
    assert dropped["good_step"] == 0 and 8 < rewind["good_step"] < 12, "the next good step gives a state again"
    assert "no state to go back to" in caplog.text and math.isfinite(test_loss(model))


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_the_first_batch_makes(tmp_path, mode):
    """What is gone back to has all of them."""
    callback = recovery(skips=0, fallbacks=0, snapshot_every=100)
    model, trainer = fit(
        tmp_path, [FaultInjector([Fault("weight", 6, "net.0")]), callback], model=Lazy(MODES[mode]), max_steps=12
    )
    (rewind,) = (event for event in callback.events.recent if event["event"] == "rewind")
    assert rewind["good_step"] == 1 and math.isfinite(test_loss(model)) and trainer.global_step == 12


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_statistics_that_a_bad_first_batch_makes(tmp_path, mode, affine):
    """And a layer that no batch makes is in nobody's way."""
    model = Net(MODES[mode])
    model.net[1], model.unused = nn.LazyBatchNorm1d(affine=affine), nn.LazyLinear(3)
    callback = recovery(skips=1, fallbacks=0, snapshot_every=2)
    faults = FaultInjector([Fault("batch", 0), Fault("weight", 6, "net.0")])
    fit(tmp_path, [faults, callback], model=model, max_steps=9)
    rewind = next(event for event in callback.events.recent if event["event"] == "rewind")
    assert model.net[1].num_batches_tracked == rewind["good_step"] - 1 + 9 - rewind["step"]
    assert rewind["good_step"] >= 2 and math.isfinite(test_loss(model))


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


@pytest.mark.parametrize("every", [None, 1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_every_rejected_step_is_logged_and_counted_once_whoever_saves(tmp_path, mode, every):
    """All data is bad from some batch on. A save may rewind while the host does not know yet what became of a step."""
    saves = [ModelCheckpoint(tmp_path, every_n_train_steps=every)] if every else []
    callback = recovery(skips=2, log="auto")
    faults = [Fault("batch", step) for step in range(12, 32)]
    with pytest.raises(RecoveryExhausted):
        fit(
            tmp_path, [FaultInjector(faults), callback, *saves], model=Net(MODES[mode]), max_steps=32,
            enable_checkpointing=bool(saves),
        )  # fmt: skip
    steps = [event["step"] for event in rejected(callback)]
    # Nine climb the ladder; of fast ones three more are over when it is known what to do: two rewinds, and the stop.
    assert steps == list(range(12, 12 + len(steps))) and len(steps) in ((9,) if mode == "exact" else (9, 12))
    assert SkipBatchRecovery(skip_batches=tmp_path / "recovery.jsonl").skip_batches == {(0, step) for step in steps}
    assert [event["action"] for event in rejected(callback) if event["action"] != "skip"] == ["rewind"] * 2 + ["stop"]


@pytest.mark.parametrize("mode", MODES)
def test_the_last_rejected_steps_of_a_run_that_fails_are_logged_and_counted(tmp_path, mode):
    callback, save = recovery(skips=5), OnExceptionCheckpoint(tmp_path, "last")
    faults = [Fault("batch", 11), Fault("batch", 12), Fault("exception", 13)]
    with pytest.raises(InjectedFault):
        fit(tmp_path, [FaultInjector(faults), callback, save], model=Net(MODES[mode]), enable_checkpointing=True)
    events = [
        (event["event"], event["step"], event.get("reason")) for event in read_events(tmp_path / "recovery.jsonl")
    ]
    told = [("rejected", 11, None), ("rejected", 12, None), ("exception", 13, None)]
    assert events == [*told, ("rewind", 13, "before a save")], "two in a row: the weights to save are in doubt"
    resumed = recovery(log=None)
    fit(tmp_path, [resumed], model=Net(MODES[mode]), ckpt_path=str(tmp_path / "last.ckpt"), max_steps=20)
    assert resumed.events.counts["rejected"] == 2


@pytest.mark.parametrize("mode", MODES)
def test_a_flipped_bit_is_found_and_undone(tmp_path, mode):
    callback = recovery()
    model, trainer = fit(tmp_path, [FaultInjector([Fault("bit_flip", 25, "net.4")]), callback], model=Net(MODES[mode]))
    kinds = [event["event"] for event in callback.events.recent]
    assert kinds.count("rewind") == 1
    first = rejected(callback)[0]
    assert (first["layer"], first["role"], first["step"]) == ("net.4.weight", "weight", 25)
    rewind = next(event for event in callback.events.recent if event["event"] == "rewind")
    assert rewind["good_step"] == 20 and trainer.global_step == 60
    assert math.isfinite(test_loss(model))


def test_the_ladder_stops_with_the_last_good_state_saved(tmp_path):
    faults = [Fault("batch", step) for step in range(20, 60)]
    callback = recovery(skips=1, rewinds=1, log="auto")
    with pytest.raises(RecoveryExhausted, match=r"4 bad steps in a row.*rewound 1 time.*nonfinite in batch"):
        fit(tmp_path, [FaultInjector(faults), callback])
    path = tmp_path / "last-good.ckpt"
    state = torch.load(path, weights_only=True)
    assert all(value.isfinite().all() for value in state["state_dict"].values())
    events = read_events(tmp_path / "recovery.jsonl")
    assert [event["event"] for event in events[:6]] == [
        "rejected",
        "rejected",
        "rewind",
        "rejected",
        "rejected",
        "rewind",
    ]
    assert "stop" in [event["event"] for event in events]
    model, trainer = fit(tmp_path, [recovery(log=None)], ckpt_path=str(path), max_steps=80)
    assert trainer.global_step == 80 and math.isfinite(test_loss(model))


def test_a_lasting_change_of_the_loss_is_relearnt(tmp_path):
    faults = [Fault("loss", step, factor=50.0) for step in range(20, 60)]
    callback = recovery(skips=2, rewinds=1, fallbacks=0)
    _, trainer = fit(tmp_path, [FaultInjector(faults), callback])
    actions = [event["action"] for event in rejected(callback)]
    assert actions == ["skip", "skip", "rewind", "skip", "skip", "relearn"] and trainer.global_step == 60


@pytest.mark.parametrize("mode", MODES)
def test_no_checkpoint_ever_holds_bad_weights(tmp_path, mode):
    """A weight goes bad where no rewind may mend it; a checkpoint after every step; none may hold it."""
    settings = {"skips": 100, "rewinds": 1}
    faults = [Fault("weight", 15, "net.0"), Fault("weight", 22, "net.0"), Fault("batch", 26), Fault("batch", 27)]
    every = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    callback = recovery(**settings)
    model, _ = fit(
        tmp_path, [FaultInjector(faults), callback, every], model=Net(MODES[mode]), max_steps=30,
        enable_checkpointing=True,
    )  # fmt: skip
    paths = list(tmp_path.glob("*step=*.ckpt"))
    assert len(paths) == 30 and math.isfinite(test_loss(model))
    for path in paths:
        state = torch.load(path, weights_only=True)
        assert all(value.isfinite().all() for value in state["state_dict"].values()), path
        moments = [v for s in state["optimizer_states"][0]["state"].values() for v in s.values()]
        assert all(value.isfinite().all() for value in moments), path
    reasons = [(e["step"], e.get("reason")) for e in callback.events.recent if e["event"] == "rewind"]
    assert (28, "before a save") in reasons and len(reasons) == 3


@pytest.mark.parametrize(("save_every", "snapshot_every"), [(1, 100), (2, 3), (None, 1)])
@pytest.mark.parametrize("mode", MODES)
def test_snapshots_become_good_however_often_they_are_taken(tmp_path, mode, save_every, snapshot_every):
    saves = [ModelCheckpoint(tmp_path, every_n_train_steps=save_every)] if save_every else []
    callback = recovery(snapshot_every=snapshot_every)
    fit(
        tmp_path, [FaultInjector([Fault("weight", 20, "net.0")]), callback, *saves], model=Net(MODES[mode]),
        max_steps=24, enable_checkpointing=bool(saves),
    )  # fmt: skip
    rewinds = [event for event in callback.events.recent if event["event"] == "rewind"]
    assert rewinds and all(event["good_step"] in (18, 19) for event in rewinds)


@pytest.mark.parametrize("step", [22, 29])
@pytest.mark.parametrize("mode", MODES)
def test_a_fit_without_saves_leaves_no_bad_weights_behind(tmp_path, mode, step):
    """A weight goes bad where no rewind may mend it, or in the very last step."""
    faults = [Fault("weight", 15, "net.0"), Fault("weight", step, "net.0")]
    callback = recovery(skips=100, rewinds=1)
    model, trainer = fit(tmp_path, [FaultInjector(faults), callback], model=Net(MODES[mode]), max_steps=30)
    rewinds = [e for e in callback.events.recent if e["event"] == "rewind"]
    assert (rewinds[-1]["step"], rewinds[-1]["reason"]) == (30, "at the end of the fit")
    assert math.isfinite(test_loss(model)) and trainer.global_step == 30


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ending", ["the end", "an exception"])
@pytest.mark.parametrize("weights_only", [False, True])
def test_after_the_fit_the_weights_are_the_users(tmp_path, mode, ending, weights_only):
    class Raises(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if ending == "an exception" and trainer.global_step == 20:
                raise ValueError("the user's")

    callback, model = recovery(), Net(MODES[mode])
    faults = FaultInjector([Fault("batch", 18), Fault("batch", 19)])
    trainer = make_trainer(tmp_path, [faults, callback, Raises()], max_steps=20)
    if ending == "the end":
        trainer.fit(model, make_loader())
    else:
        with pytest.raises(ValueError, match="the user's"):
            trainer.fit(model, make_loader())
    known = len(callback.events.recent)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    trainer.save_checkpoint(tmp_path / "own.ckpt", weights_only=weights_only)
    saved = torch.load(tmp_path / "own.ckpt", weights_only=True)["state_dict"]
    for state in (saved, model.state_dict()):
        assert all((state[name] == 0.5).all() for name, _ in model.named_parameters())
    assert len(callback.events.recent) == known


@pytest.mark.parametrize("mode", MODES)
def test_saves_of_weights_only_are_guarded_too(tmp_path, mode):
    class Noted(Net):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["noted"] = checkpoint["state_dict"]["net.0.weight"].isfinite().all().item()

    faults = [Fault("weight", 15, "net.0"), Fault("weight", 22, "net.0")]
    every = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, save_weights_only=True)
    callback = recovery(skips=100, rewinds=1)
    model, _ = fit(
        tmp_path, [FaultInjector(faults), callback, every], model=Noted(MODES[mode]), max_steps=30,
        enable_checkpointing=True,
    )  # fmt: skip
    paths = list(tmp_path.glob("*step=*.ckpt"))
    assert len(paths) == 30 and math.isfinite(test_loss(model))
    for path in paths:
        state = torch.load(path, weights_only=True)
        assert "optimizer_states" not in state and state["noted"] is True
        assert all(value.isfinite().all() for value in state["state_dict"].values()), path
    assert "before a save" in [e.get("reason") for e in callback.events.recent]
    assert "on_save_checkpoint" not in model.__dict__, "the module is left as it was"


@pytest.mark.parametrize("name", ["directory", "file/log"])
def test_a_log_that_cannot_be_written_is_refused(tmp_path, name):
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    model = Net()
    with pytest.raises(MisconfigurationException, match=r"director.*Choose another path for the event log"):
        fit(tmp_path, [recovery(log=tmp_path / name)], model=model)
    assert not model.losses and "training_step" not in model.__dict__


def test_a_log_is_made_before_training(tmp_path, monkeypatch):
    """Empty after a clean run, and what keeps it from being made is told beforehand."""
    path = tmp_path / "logs" / "log.jsonl"
    fit(tmp_path, [recovery(log=path)], max_steps=2)
    assert read_events(path) == [] and SkipBatchRecovery(skip_batches=path).skip_batches == set()

    def deny(self, *args, **kwargs):
        raise RuntimeError("no rights")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", deny)
    model = Net()
    with pytest.raises(MisconfigurationException, match=r"RuntimeError: no rights.*Choose another path"):
        fit(tmp_path, [recovery(log="memory://bucket/log.jsonl")], model=model)
    assert not model.losses
    for directory in ("logs/", "memory://"):
        with pytest.raises(ValueError, match="names a directory"):
            SkipBatchRecovery(log=directory)


def test_a_log_that_can_no_longer_be_written_is_warned_of_once(tmp_path, caplog):
    class InTheWay(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 5:
                path.rename(tmp_path / "before.jsonl")
                path.mkdir()

    path = tmp_path / "log.jsonl"
    callback = recovery(log=path)
    faults = FaultInjector([Fault("batch", step) for step in (3, 8, 12)])
    _, trainer = fit(tmp_path, [InTheWay(), faults, callback], max_steps=20)
    assert trainer.global_step == 20 and len(rejected(callback)) == 3 and callback.events.path is None
    assert caplog.text.count("cannot be written") == 1 and len(read_events(tmp_path / "before.jsonl")) == 1


def test_counters_go_to_the_logger(tmp_path):
    logger = CSVLogger(tmp_path, version="x")
    fit(tmp_path, [FaultInjector([Fault("batch", 5)]), recovery()], logger=logger, log_every_n_steps=1)
    text = (tmp_path / "lightning_logs" / "x" / "metrics.csv").read_text()
    assert "recovery/rejected" in text.splitlines()[0]
    assert (tmp_path / "lightning_logs" / "x" / "recovery.jsonl").exists()


class TwoBlocks(Net):
    """All linear layers but the head can be FP8."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))


class Overflowing(TwoBlocks):
    """From step 20 on, the second layer's output is NaN whenever it runs in FP8."""

    def training_step(self, batch, batch_idx):
        layer = self.net[2]
        if self.trainer.global_step == 20 and not layer._forward_hooks:
            layer.register_forward_hook(
                lambda m, args, output: output * NAN if m.training and m.fp8.enabled else output
            )
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("mode", MODES)
def test_guilty_layers_fall_back_and_come_again_with_backoff(tmp_path, mode):
    callback = recovery(skips=1, fallbacks=5, fallback_steps=5, fallback_backoff=2.0, rewinds=0, snapshot_every=None)
    model, trainer = fit(tmp_path, [callback], model=Overflowing(MODES[mode]), plugins=[FP8Precision()], max_steps=60)
    falls = [event for event in callback.events.recent if event["event"] == "fall_back"]
    again = [event for event in callback.events.recent if event["event"] == "fp8_again"]
    assert falls[0]["layers"] == ["net.0", "net.2"] and [f["steps"]["net.2"] for f in falls[:3]] == [5, 10, 20]
    assert len(again) >= 2 and trainer.global_step == 60 and math.isfinite(test_loss(model))


class Summaries(pl.Callback):
    """What the summary says of the second layer in each step."""

    def on_fit_start(self, trainer, pl_module):
        self.said = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        line = next(line for line in trainer.precision_plugin.summary().splitlines() if line.startswith("net.2"))
        assert line.split()[1] == ("FP8" if pl_module.net[2].fp8.enabled else "high")
        self.said.append(line.split()[1] == "FP8")


def test_fallbacks_end_with_their_fit_and_go_on_in_a_resumed_one(tmp_path):
    callback, summaries = recovery(skips=0, fallback_steps=15, log=None), Summaries()

    def run(model, *callbacks, **settings):
        fit(tmp_path, [*callbacks, callback, summaries], model=model, plugins=[FP8Precision()], **settings)
        return summaries.said

    model, saver = TwoBlocks(), ModelCheckpoint(tmp_path, save_last=True)
    injector = FaultInjector([Fault("activation", 3, "net.0")])
    assert run(model, injector, saver, max_steps=10, enable_checkpointing=True) == [True] * 4 + [False] * 6
    assert model.net[2].fp8.enabled, "a later fit without recovery trains it in FP8"
    assert run(TwoBlocks(), max_steps=5) == [True] * 5, "the next fit starts clean"
    # Nine more accepted steps of fifteen: as if the first fit had gone on.
    assert run(TwoBlocks(), max_steps=25, ckpt_path=saver.last_model_path) == [False] * 9 + [True] * 6


@pytest.mark.parametrize("retry", [False, True])
def test_fallbacks_end_with_an_exception_too(tmp_path, retry):
    class Raises(TwoBlocks):
        def training_step(self, batch, batch_idx):
            if not self.net[2].fp8.enabled:
                raise ValueError("a bug that only high precision meets")
            return super().training_step(batch, batch_idx)

    model, callback = Raises(), recovery(skips=0, retry=retry, log=None)
    with pytest.raises(ValueError, match="a bug"):
        fit(
            tmp_path, [FaultInjector([Fault("activation", 3, "net.0")]), callback], model=model,
            plugins=[FP8Precision()], max_steps=10,
        )  # fmt: skip
    assert model.net[2].fp8.enabled


def last_words(tmp_path, fault, **settings) -> str:
    """What a run says that stops at its third bad step."""
    faults = [Fault(fault, step, "net.0" if fault == "activation" else None) for step in range(20, 40)]
    callback = recovery(skips=2, fallbacks=0, rewinds=0, **settings)
    with pytest.raises(RecoveryExhausted) as stopped:
        fit(
            tmp_path,
            [FaultInjector(faults), callback],
            model=TwoBlocks(),
            plugins=[FP8Precision()],
            logger=CSVLogger(tmp_path),
        )
    return str(stopped.value)


@pytest.mark.parametrize(
    ("log", "where"),
    [("auto", "lightning_logs/version_0/recovery.jsonl"), ("ladder.jsonl", "ladder.jsonl"), (None, None)],
)
@pytest.mark.parametrize("snapshots", [None, 10])
def test_a_stop_says_how_to_leave_out_the_bad_batches(tmp_path, monkeypatch, log, where, snapshots):
    """Taken at its word, from another folder."""
    monkeypatch.chdir(tmp_path)
    message = last_words(tmp_path, "batch", log=log, snapshot_every=snapshots)
    monkeypatch.chdir("/")
    advice = ast.literal_eval(re.search(r"skip_batches=('[^']*'|\[.*?\])", message)[1])
    assert SkipBatchRecovery(skip_batches=advice).skip_batches == {(0, 20), (0, 21), (0, 22)}
    assert advice == (str(tmp_path / where) if where else [(0, 20), (0, 21), (0, 22)])
    assert message.endswith(", or a lower learning rate."), "no layer was at fault"


def test_a_stop_names_the_layers_at_fault(tmp_path):
    message = last_words(tmp_path, "activation")
    assert message.endswith(", a lower learning rate, or net.2 left in bf16 (LayerSelection's exclude).")


RETRIED = {"plain": {}, "constant": {"loss_scale": 1024.0}, "dynamic": {"precision": "16-mixed"}}


@pytest.mark.parametrize("scaling", RETRIED)
def test_retry_takes_the_batch_with_the_guilty_layer_in_bf16(tmp_path, scaling):
    class Once(TwoBlocks):
        def training_step(self, batch, batch_idx):
            if batch_idx == 17 and not self.net[2]._forward_hooks:
                self.net[2].register_forward_hook(
                    lambda m, args, out: out * NAN if m.training and m.fp8.enabled and self.now == 17 else out
                )
            self.now = batch_idx
            return super().training_step(batch, batch_idx)

    callback = recovery(retry=True)
    plugin = FP8Precision(**RETRIED[scaling])
    model, trainer = fit(tmp_path, [callback], model=Once(), plugins=[plugin], max_steps=20, gradient_clip_val=1.0)
    assert [event["action"] for event in rejected(callback)] == ["retry"]
    assert callback.guard.judges[0].statistics.count == 20, "no step was lost"
    assert all(layer.fp8.enabled for layer in (model.net[0], model.net[2]))
    assert trainer.callback_metrics["train_loss_step"].isfinite() and math.isfinite(test_loss(model))


def fp16(**settings) -> pl.plugins.MixedPrecision:
    return pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **settings))


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "fp8-16", "fp8-scaled"])
def test_under_loss_scaling(tmp_path, precision):
    plugins = {
        "16-mixed": lambda: fp16(init_scale=256.0),
        "bf16-mixed": lambda: pl.plugins.MixedPrecision("bf16-mixed", "cpu"),
        "fp8-16": lambda: FP8Precision(precision="16-mixed"),
        "fp8-scaled": lambda: FP8Precision(loss_scale=1024.0),
    }
    callback = recovery()
    # A larger factor would overflow in fp16 when scaled: that the scaler answers for.
    faults = [Fault("batch", 20), Fault("loss", 30, factor=8.0)]
    model, _ = fit(
        tmp_path, [FaultInjector(faults), callback], model=Net("adamw-fused"), plugins=[plugins[precision]()]
    )
    steps = [event["step"] for event in rejected(callback) if event["action"] == "skip"]
    assert steps == [20, 30]
    assert callback.guard.fast == (precision in ("bf16-mixed", "fp8-scaled"))
    assert math.isfinite(test_loss(model))
    assert rejected(callback)[-1]["loss"] == pytest.approx(model.losses[30] * 8, rel=0.02)


def test_overflow_of_the_loss_scale_is_the_scalers_affair(tmp_path):
    callback = recovery(skips=1, rewinds=0, snapshot_every=None)
    model, _ = fit(tmp_path, [callback], plugins=[fp16(init_scale=2.0**40)])
    actions = [event["action"] for event in rejected(callback)]
    assert len(actions) > 3 and set(actions) == {"loss_scale_lowered"} and math.isfinite(test_loss(model))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"spike": 0.9}, "spike"),
        ({"snapshot_every": None}, "no rewind without snapshots"),
        ({"snapshot_every": 0}, "snapshot_every"),
        ({"mode": "fast", "hold_schedule": True}, "mode='exact'"),
        ({"mode": "fast", "retry": True}, "mode='exact'"),
        ({"mode": "slow"}, "mode"),
        ({"skips": -1}, "skips"),
        ({"warmup": 500}, "warmup"),
        ({"skip_batches": [3]}, "pairs"),
        ({"skip_batches": ["12"]}, "skip_batches holds '12'"),
        ({"skip_batches": [(0, 1.5)]}, "skip_batches holds"),
        ({"skip_batches": 5}, r"skip_batches must be a list of pairs .* path, got 5"),
        ({"skip_batches": None}, "skip_batches must be a list of pairs"),
        ({"log": 5}, "log must be a path or None, got 5"),
        ({"window": 50.0}, r"window must be a whole number \(int\), got 50.0"),
        ({"skips": 10**30}, "skips must be a number that fits 64 bits"),
        ({"floor": 10**400}, "floor must be a number that fits a float"),
        ({"spike": "10"}, "spike must be a number"),
        ({"skips": 1.5}, "skips must be a whole number"),
        ({"snapshot_every": 2.5}, "snapshot_every must be a whole number"),
        ({"retry": "false"}, "retry must be true or false"),
        ({"hold_schedule": "false"}, "hold_schedule must be true or false"),
        ({"relearn": 1}, "relearn must be true or false"),
    ],
)
def test_bad_settings_are_refused_at_construction(settings, match):
    with pytest.raises((ValueError, TypeError), match=match):
        SkipBatchRecovery(**settings)


class TakesItself(Net):
    def training_step(self, dataloader_iter):
        return self.loss(next(dataloader_iter)[0])


def test_a_step_that_takes_its_batch_itself(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"dataloader_iter.*retry=False"):
        fit(tmp_path, [recovery(retry=True)], model=TakesItself(), max_steps=1)
    callback = recovery()
    model, _ = fit(
        tmp_path, [FaultInjector([Fault("activation", 3, "net.0")]), callback], model=TakesItself(), max_steps=8
    )
    assert len(rejected(callback)) == 1 and math.isfinite(test_loss(model))


def test_wrong_places_are_refused(tmp_path):
    with pytest.raises(RuntimeError, match="inside Trainer"):
        SkipBatchRecovery().reject(torch.zeros(()))
    with pytest.raises(MisconfigurationException, match="retry"):
        fit(tmp_path, [SkipBatchRecovery(retry=True)], accumulate_grad_batches=2, max_steps=1)
    with pytest.raises(MisconfigurationException, match="retry"):
        fit(tmp_path, [SkipBatchRecovery(retry=True), GradientAccumulationScheduler({1: 2})], max_steps=1)
    with pytest.raises(MisconfigurationException, match="retry=False"):
        fit(tmp_path, [SkipBatchRecovery(retry=True)], plugins=[fp16()], max_steps=1)
    with pytest.raises(ValueError, match="LBFGS runs backward several times"):
        fit(tmp_path, [SkipBatchRecovery()], model=Net("lbfgs", schedule=False), max_steps=1)
    with pytest.raises(ValueError, match="fused=True"):
        fit(tmp_path, [SkipBatchRecovery(mode="fast")], max_steps=1)


def test_the_injector_refuses_what_it_cannot_plant(tmp_path):
    with pytest.raises(ValueError, match=r"no layer 'nope'.*net\.0"):
        fit(tmp_path, [FaultInjector([Fault("weight", 0, "nope")])], max_steps=1)
    with pytest.raises(ValueError, match="ranks"):
        fit(tmp_path, [FaultInjector([Fault("batch", 0, rank=3)])], max_steps=1)
    with pytest.raises(ValueError, match="name it"):
        Fault("weight", 0)
    with pytest.raises(ValueError, match="no fault"):
        FaultInjector([{"kind": "fire", "step": 0}])
    with pytest.raises(ValueError, match="FP8"):
        fit(tmp_path, [FaultInjector([Fault("amax", 0, "net.0")])], max_steps=1)


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ([{"kind": "batch", "step": 1, "at": 2}], r"no field at: choose among kind, step"),
        ([{"kind": "batch"}], "lacks step"),
        (["batch"], "a mapping with its fields, got 'batch'"),
        ({"kind": "batch", "step": 1}, "a list of faults"),
        ([{"kind": "batch", "step": "1"}], r"step must be a whole number \(int\), got '1'"),
    ],
)
def test_the_injector_names_wrong_fields(faults, words):
    with pytest.raises((ValueError, TypeError), match=words):
        FaultInjector(faults)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "loss", "step": 1, "factor": "10"}, "factor must be a number"),
        ({"kind": "loss", "step": 1.0}, "step must be a whole number"),
        ({"kind": "loss", "step": -1}, "step must be at least 0"),
        ({"kind": "batch", "step": 1, "value": None}, "value must be a number, got None"),
        ({"kind": "batch", "step": 1, "rank": "0"}, "rank must be a whole number"),
        ({"kind": "bit_flip", "step": 1, "layer": "net.0", "bit": -1}, "bit must be at least 0"),
        ({"kind": "amax", "step": 1, "layer": "net.0", "role": "inputs"}, "no role 'inputs': choose among input"),
    ],
)
def test_a_fault_names_its_own_wrong_fields(fields, words):
    with pytest.raises((ValueError, TypeError), match=words):
        Fault(**fields)


def test_another_run_counts_anew(tmp_path):
    callback = recovery()
    fit(tmp_path, [FaultInjector([Fault("batch", step) for step in (3, 9)]), callback], max_steps=12)
    assert callback.events.counts == {"rejected": 2}
    _, trainer = fit(tmp_path, [FaultInjector([Fault("batch", step) for step in (5, 15)]), callback], max_steps=10)
    assert callback.events.counts == {"rejected": 1} and [event["step"] for event in callback.events.recent] == [5]
    trainer.save_checkpoint(tmp_path / "here.ckpt")
    trainer.fit_loop.epoch_loop.max_steps = 20
    trainer.fit(trainer.lightning_module, make_loader())
    assert callback.events.counts == {"rejected": 2}, "the same run goes on"
    other = recovery()
    fit(tmp_path, [FaultInjector([Fault("batch", 15)]), other], ckpt_path=tmp_path / "here.ckpt", max_steps=20)
    assert other.events.counts == {"rejected": 2}, "a resumed one too"


def test_validation_in_between_and_a_second_fit(tmp_path):
    callback = recovery()
    injector = FaultInjector([Fault("batch", 5)])
    model, trainer = Net(), make_trainer(tmp_path, [injector, callback], max_steps=20, val_check_interval=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, make_loader(), make_loader(64))
        assert len(rejected(callback)) == 1
        trainer.fit_loop.epoch_loop.max_steps = 40
        trainer.fit(model, make_loader(), make_loader(64))
    assert len(rejected(callback)) == 1 and trainer.global_step == 40 and math.isfinite(test_loss(model))


@pytest.mark.parametrize("mode", MODES)
def test_a_health_monitor_hands_its_events_over(tmp_path, mode):
    class Scaled(TwoBlocks):
        def loss(self, batch):
            factor = 6.0 if self.training and self.trainer.global_step == 30 else 1.0
            return super().loss([batch[0] * factor, batch[1] * factor])

    monitor = FP8HealthMonitor("recover", progress_bar=False)
    callback = recovery(spike=None, amax_jump=None)
    fit(tmp_path, [monitor, callback], model=Scaled(MODES[mode]), plugins=[FP8Precision()], max_steps=40)
    assert [(event["step"], event["verdict"]) for event in rejected(callback)] == [(30, "health")]
    assert monitor.events[0].step == 30
