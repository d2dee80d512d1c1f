"""What a rejected step logged is taken out again."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from recovery_models import MODES, Net, fit, make_loader, recovery, rejected
from torchmetrics import MeanMetric

from lightning_fp8.callbacks.fault_injector import Fault, FaultInjector


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


class Metered(Net):
    """One metric is made as the fit begins, the other in its second epoch."""

    walks = 0

    def modules(self):
        self.walks += 1
        return super().modules()

    def on_train_start(self):
        self.mean = MeanMetric(nan_strategy="disable")

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.late_mean = MeanMetric(nan_strategy="disable")

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for metric in (self.mean, getattr(self, "late_mean", None)):
            if metric is not None:
                metric.update(loss.detach())
        return loss


@pytest.mark.parametrize("mode", MODES)
def test_torchmetrics_do_not_see_it(tmp_path, mode):
    faults = [Fault("batch", step) for step in (3, 11)]
    model, _ = fit(
        tmp_path, [FaultInjector(faults), recovery()], model=Metered(MODES[mode]), loader=make_loader(128), max_steps=16
    )
    good = torch.tensor(model.losses)
    good = good[good.isfinite()]
    assert len(good) == 14 and model.mean.compute() == pytest.approx(good.mean().item(), rel=1e-5)
    assert model.late_mean.compute() == pytest.approx(good[7:].mean().item(), rel=1e-5)


def test_modules_are_not_searched_in_each_step(tmp_path):
    walks = []
    for steps in (8, 16):
        model, _ = fit(tmp_path, [recovery(snapshot_every=None, rewinds=0)], model=Metered(), max_steps=steps)
        walks.append(model.walks)
    assert walks[0] == walks[1]
