from __future__ import annotations

import functools

import pytest
import torch
from ddp_checks import CHECKS
from rank_checks import run_checks


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
