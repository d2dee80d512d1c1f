"""What a recovery leaves behind: after an exception nothing on the module, after a rejected step a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_fp8 import Fault, FaultInjector, SkipBatchException, SkipBatchRecovery
from lightning_fp8.recovery.faults import InjectedFault


class Failing(BoringModel):
    """Raises what it is told to at its second step, or loses its loss."""

    failure: Exception | None = None
    nan = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.failure is not None and batch_idx == 1:
            raise self.failure
        output: Any = super().training_step(batch, batch_idx)
        return {"loss": output["loss"] * float("nan")} if self.nan and batch_idx == 1 else output


def fit(model: Failing, callback: Callback, folder: Path) -> None:
    Trainer(
        accelerator="cpu",
        max_steps=3,
        limit_val_batches=0,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    ).fit(model)


def test_an_exception_releases_the_module(tmp_path: Path) -> None:
    model = Failing()
    before = set(vars(model))
    model.failure = ValueError("boom")
    first = SkipBatchRecovery(log=None)
    with pytest.raises(ValueError, match="boom"):
        fit(model, first, tmp_path)
    assert "training_step" not in vars(model)
    model.failure = SkipBatchException("not this one")
    second = SkipBatchRecovery(log=None)
    seen = len(first.events.recent)
    fit(model, second, tmp_path)
    assert len(first.events.recent) == seen and len(second.events.recent) > 0
    assert "training_step" not in vars(model) and before <= set(vars(model))


def test_a_planted_fault_goes_with_its_batch(tmp_path: Path) -> None:
    model = Failing()
    injector = FaultInjector([Fault("activation", 1, layer="layer"), Fault("exception", 1)])
    with pytest.raises(InjectedFault):
        fit(model, injector, tmp_path)
    assert not model.layer._forward_hooks


def test_a_rejected_step_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Failing()
    model.nan = True
    fit(model, SkipBatchRecovery(log=None), tmp_path)
    warned = [record.getMessage() for record in caplog.records if "was rejected" in record.getMessage()]
    assert warned == ["Step 1 was rejected: nonfinite in loss on rank 0. Action: skip."]
