"""Learning-rate schedules where steps are skipped."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from recovery_models import Net, fit, make_loader, recovery

from lightning_fp8.callbacks.fault_injector import Fault, FaultInjector


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


def test_a_checkpoint_after_a_skipped_last_batch_holds_it_too(tmp_path):
    callbacks = [FaultInjector([Fault("batch", 7)]), recovery(), ModelCheckpoint(tmp_path, "last")]
    fit(tmp_path, callbacks, model=Plateau(), loader=make_loader(128), max_epochs=1, enable_checkpointing=True)
    (schedule,) = torch.load(tmp_path / "last.ckpt", weights_only=True)["lr_schedulers"]
    assert schedule["last_epoch"] == 7


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
