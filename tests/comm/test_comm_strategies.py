"""FP8Communication and the precision classes under Lightning's strategies, on gloo and NCCL."""

from __future__ import annotations

import functools
import tempfile

import lightning.pytorch as pl
import pytest
import strategy_checks
import torch
from rank_checks import run_checks
from strategy_checks import CHECKS, Module
from torch.utils.data import DataLoader

from lightning_fp8 import FP8Communication, FP8FSDPPrecision, FP8Precision

SHARED = tempfile.TemporaryDirectory()


@functools.cache
def run_once(world_size: int, backend: str = "gloo") -> dict[str, list[str]]:
    folder = tempfile.mkdtemp(dir=SHARED.name) if backend == "nccl" else SHARED.name
    return run_checks(CHECKS, world_size, timeout=60.0, backend=backend, folder=folder)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_strategies(check) -> None:
    failures = run_once(2)[check.__name__]
    assert not failures, "\n".join(failures)


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("world_size", [2, 4])
def test_strategies_over_nccl(world_size: int, check) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    failures = run_once(world_size, "nccl")[check.__name__]
    assert not failures, "\n".join(failures)


def test_checkpoints_move_to_one_rank() -> None:
    run_once(2)  # They have saved one.
    checks = [strategy_checks.sharded_models_save, strategy_checks.one_rank_loads_what_others_saved]
    for failures in run_checks(checks, 1, timeout=60.0, folder=SHARED.name).values():
        assert not failures, "\n".join(failures)


def test_settings_are_checked() -> None:
    for options, message in (
        ({"grad": "int8"}, "grad must be"),
        ({"param": "e4m3"}, "param must be"),
        ({"grad": "bf16", "param": "bf16"}, "nothing goes in FP8"),
        ({"min_numel": -1}, "negative"),
        ({"block": 100}, "power of two"),
        ({"format": "e3m4"}, "e3m4"),
        ({"grad": "bf16", "error_feedback": True}, "error_feedback"),
    ):
        with pytest.raises(ValueError, match=message):
            FP8Communication(**options)
    for options, message in (
        ({"min_numel": 1.5}, "min_numel must be a whole number"),
        ({"block": "128"}, "block must be a whole number"),
        ({"stochastic": "false"}, "stochastic must be true or false"),
        ({"error_feedback": 1}, "error_feedback must be true or false"),
    ):
        with pytest.raises(TypeError, match=message):
            FP8Communication(**options)
    with pytest.raises(RuntimeError, match="known once trainer"):
        FP8Communication().summary()
    for options, message in (
        ({"precision": "16-mixed"}, "bf16-mixed"),
        ({"loss_scale": "dynamic"}, "constant"),
        ({"backend": "transformer_engine"}, "Transformer Engine"),
    ):
        with pytest.raises(ValueError, match=message):
            FP8FSDPPrecision(**options)


def test_one_process_is_told_that_there_is_nothing_to_send() -> None:
    communication = FP8Communication()
    trainer = pl.Trainer(
        accelerator="cpu",
        plugins=[FP8Precision()],
        callbacks=[communication],
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        max_steps=1,
    )
    text = torch.randint(0, strategy_checks.VOCABULARY, (4, 16))
    with pytest.warns(UserWarning, match="nothing to do"):
        trainer.fit(Module(), DataLoader(text, 2))
    assert "one process" in communication.summary()
