"""The event log of a run: what is in it, and where it cannot be written."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from recovery_models import MODES, Net, fit, recovery, rejected

from lightning_fp8 import RecoveryExhausted
from lightning_fp8.callbacks.fault_injector import Fault, FaultInjector
from lightning_fp8.callbacks.recovery import SkipBatchRecovery
from lightning_fp8.recovery.events import read_events
from lightning_fp8.recovery.faults import InjectedFault


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
