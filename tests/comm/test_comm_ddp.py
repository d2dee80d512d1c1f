from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ddp_checks import CHECKS
from rank_checks import run_checks
from torch import nn

from lightning_fp8 import FP8Communication, FP8Precision
from lightning_fp8.comm.ddp import FP8GradientState


@functools.cache
def run_once(world_size: int, backend: str = "gloo") -> dict[str, list[str]]:
    return run_checks(CHECKS, world_size, backend=backend, tensors_there=True)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ddp_hook(world_size: int, check) -> None:
    failures = run_once(world_size)[check.__name__]
    assert not failures, "\n".join(failures)


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("world_size", [2, 4])
def test_ddp_hook_over_nccl(world_size: int, check) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    failures = run_once(world_size, "nccl")[check.__name__]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("loss_scale", [None, 8.0, "dynamic"])
def test_error_feedback_is_dropped_under_another_loss_scale(loss_scale: Any) -> None:
    """It is in the units of the scaled gradients."""
    model = nn.Linear(4, 4)
    kept = {}
    for saved in (1.0, 8.0, 65536.0):
        communication = FP8Communication(error_feedback=True)
        state = communication._gradients = FP8GradientState(error_feedback=True)
        residuals = {"weight": torch.ones(16)}
        communication.load_state_dict(
            {"residuals": residuals, "seed": state.collectives.keys.place, "loss_factor": saved}
        )
        trainer: Any = SimpleNamespace(precision_plugin=FP8Precision(loss_scale=loss_scale), optimizers=[])
        communication.on_train_start(trainer, model)  # type: ignore[arg-type]
        kept[saved] = bool(state._residuals)
    factor = {None: 1.0, "dynamic": 65536.0}.get(loss_scale, loss_scale)
    assert kept == {saved: saved == factor for saved in kept}
