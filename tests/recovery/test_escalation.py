"""The rungs of the ladder under the Trainer: retry, fall back, rewind, relearn, stop."""

from __future__ import annotations

import ast
import math
import re

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from recovery_models import MODES, NAN, Net, TwoBlocks, fit, recovery, rejected, test_loss

from lightning_fp8 import FP8Precision, RecoveryExhausted
from lightning_fp8.callbacks.fault_injector import Fault, FaultInjector
from lightning_fp8.callbacks.recovery import SkipBatchRecovery
from lightning_fp8.recovery.events import read_events

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


def test_a_lasting_change_of_the_loss_is_relearnt(tmp_path):
    faults = [Fault("loss", step, factor=50.0) for step in range(20, 60)]
    callback = recovery(skips=2, rewinds=1, fallbacks=0)
    _, trainer = fit(tmp_path, [FaultInjector(faults), callback])
    actions = [event["action"] for event in rejected(callback)]
    assert actions == ["skip", "skip", "rewind", "skip", "skip", "relearn"] and trainer.global_step == 60


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


def test_a_stop_calls_nothing_good_that_was_saved_in_doubt(tmp_path):
    class LosesTheGoodState(pl.Callback):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            callback.snapshots.drop()

    callback = recovery(skips=1, rewinds=1, log=None)
    faults = FaultInjector([Fault("batch", step) for step in range(20, 60)])
    with pytest.raises(RecoveryExhausted, match=r"nonfinite in batch.*Resume from an earlier checkpoint"):
        fit(tmp_path, [faults, LosesTheGoodState(), callback])
    assert callback.events.counts["saved_in_doubt"] == 1


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
