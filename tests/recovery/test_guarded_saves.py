"""What is saved, and what a fit leaves behind, while weights are in doubt."""

from __future__ import annotations

import math

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from recovery_models import MODES, Net, fit, make_loader, make_trainer, recovery, rejected, test_loss

from lightning_fp8.callbacks.fault_injector import Fault, FaultInjector


def saved_after_each_step(tmp_path, model, callback, faults, **checkpoint):
    """The module after 30 steps, and what was saved after each."""
    every = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, **checkpoint)
    model, _ = fit(
        tmp_path, [FaultInjector(faults), callback, every], model=model, max_steps=30, enable_checkpointing=True
    )
    paths = list(tmp_path.glob("*step=*.ckpt"))
    assert len(paths) == 30 and math.isfinite(test_loss(model))
    states = [torch.load(path, weights_only=True) for path in paths]
    for path, state in zip(paths, states, strict=True):
        assert all(value.isfinite().all() for value in state["state_dict"].values()), path
    return model, states


@pytest.mark.parametrize("mode", MODES)
def test_no_checkpoint_ever_holds_bad_weights(tmp_path, mode):
    """A weight goes bad where no rewind may mend it; a checkpoint after every step; none may hold it."""
    faults = [Fault("weight", 15, "net.0"), Fault("weight", 22, "net.0"), Fault("batch", 26), Fault("batch", 27)]
    callback = recovery(skips=100, rewinds=1)
    _, states = saved_after_each_step(tmp_path, Net(MODES[mode]), callback, faults)
    for state in states:
        moments = [v for s in state["optimizer_states"][0]["state"].values() for v in s.values()]
        assert all(value.isfinite().all() for value in moments), state["global_step"]
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


def test_a_rewind_before_a_save_settles_the_steps_before_it(tmp_path):
    """The host learns of the last bad one after a fast step, and would then rewind once more."""
    save = ModelCheckpoint(tmp_path, every_n_train_steps=16)
    callback = recovery()
    faults = FaultInjector([Fault("batch", step) for step in range(12, 16)])
    fit(tmp_path, [faults, callback, save], model=Net(MODES["fast"]), max_steps=20, enable_checkpointing=True)
    assert [event["action"] for event in rejected(callback)] == [*["skip"] * 3, "rewind"]
    assert [event["step"] for event in callback.events.recent if event["event"] == "rewind"] == [16, 16]


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
    callback = recovery(skips=100, rewinds=1)
    model, states = saved_after_each_step(tmp_path, Noted(MODES[mode]), callback, faults, save_weights_only=True)
    for state in states:
        assert "optimizer_states" not in state and state["noted"] is True
    assert "before a save" in [e.get("reason") for e in callback.events.recent]
    assert "on_save_checkpoint" not in model.__dict__, "the module is left as it was"
