"""SkipBatchRecovery under the Trainer, one device: its verdicts, and its settings."""

from __future__ import annotations

import math
import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from recovery_models import (
    MODES,
    OPTIMIZERS,
    Net,
    TwoBlocks,
    fit,
    fp16,
    make_data,
    make_loader,
    make_trainer,
    recovery,
    rejected,
    same_weights,
    test_loss,
)
from torch import nn
from torch.utils.data import DataLoader

from lightning_fp8 import FP8Precision
from lightning_fp8.callbacks.fault_injector import Fault, FaultInjector
from lightning_fp8.callbacks.health_monitor import FP8HealthMonitor
from lightning_fp8.callbacks.recovery import SkipBatchRecovery


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


@pytest.mark.parametrize("mode", MODES)
def test_accumulation_spoils_its_window_only(tmp_path, mode):
    callback = recovery()
    injector = FaultInjector([Fault("batch", 4)])
    model, trainer = fit(
        tmp_path, [injector, callback], model=Net(MODES[mode]), accumulate_grad_batches=4, max_steps=14
    )
    assert [event["batches"] for event in rejected(callback)] == [[16, 17, 18, 19]]
    assert trainer.global_step == 14 and math.isfinite(test_loss(model))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("fp8", [False, True])
def test_clipping_does_not_spread_a_nan(tmp_path, fp8, algorithm, mode):
    callback = recovery()
    model, _ = fit(
        tmp_path, [FaultInjector([Fault("gradient", 4, "net.4")]), callback], model=Net(MODES[mode]),
        plugins=[FP8Precision()] if fp8 else [], gradient_clip_val=1.0, gradient_clip_algorithm=algorithm,
    )  # fmt: skip
    assert len(rejected(callback)) == 1 and rejected(callback)[0]["layer"] == "net.4.weight"
    assert math.isfinite(test_loss(model))
    assert "configure_gradient_clipping" not in model.__dict__, "the module is left as it was"


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


class Graph(Net):
    """Multiplies with a sparse matrix from the batch, as a graph's adjacency."""

    def loss(self, batch):
        return nn.functional.mse_loss(self.net(torch.sparse.mm(batch[2], batch[0])), batch[1])


def collate_with_matrix(samples):
    inputs, targets = (torch.stack(part) for part in zip(*samples, strict=True))
    return inputs, targets, torch.eye(len(samples)).to_sparse_csr()


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("mode", MODES)
def test_sparse_batches(tmp_path, mode):
    class Spoils(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 5:
                batch[2].values()[0] = math.nan

    callback, loader = recovery(), DataLoader(make_data(256), 16, collate_fn=collate_with_matrix)
    model, _ = fit(tmp_path, [Spoils(), callback], model=Graph(MODES[mode]), loader=loader, max_steps=10)
    assert [(event["step"], event["layer"]) for event in rejected(callback)] == [(5, "batch")]
    assert all(parameter.isfinite().all() for parameter in model.parameters())


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
            factor = 6.0 if self.training and self.trainer.global_step in (20, 36) else 1.0
            return super().loss([batch[0] * factor, batch[1] * factor])

    monitor = FP8HealthMonitor("recover", progress_bar=False)
    callback = recovery(spike=None, amax_jump=None)
    fit(tmp_path, [monitor, callback], model=Scaled(MODES[mode]), plugins=[FP8Precision()], max_steps=40)
    # In its first steps a model may leap without being ill: that is told, and no step taken back for it.
    assert [event.step for event in monitor.events] == [20, 36]
    (event,) = rejected(callback)
    assert (event["step"], event["verdict"]) == (36, "health")
    assert not event.keys() & {"layer", "role", "value"}, "the monitor knows"
