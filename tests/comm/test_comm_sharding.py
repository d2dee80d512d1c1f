"""Sharded and tensor-parallel training with FP8 layers, on gloo and, where there are GPUs enough, on NCCL."""

from __future__ import annotations

import functools
from pathlib import Path

import checkpoint_checks
import fsdp_checks
import pytest
import shard_models
import tensor_checks
import torch
import torch.distributed.checkpoint as dcp
from rank_checks import run_checks

CHECKS = [*fsdp_checks.CHECKS, *tensor_checks.CHECKS]
# Four ranks make meshes of two dimensions; what does not depend on the number of ranks is left out there.
GRIDS = [
    fsdp_checks.weights_gathered_in_fp8_change_no_result,
    fsdp_checks.bytes_of_both_hooks_are_half,
    fsdp_checks.gradients_reduced_in_fp8_are_close,
    fsdp_checks.every_way_to_average_works,
    fsdp_checks.replicas_of_shards_work,
    fsdp_checks.fewer_ranks_share_weights_until_backward,
    *tensor_checks.CHECKS,
]
# On three ranks shards are uneven.
UNEVEN = [
    fsdp_checks.weights_gathered_in_fp8_change_no_result,
    fsdp_checks.bytes_of_both_hooks_are_half,
    fsdp_checks.gradients_reduced_in_fp8_are_close,
    tensor_checks.parts_make_the_whole,
    tensor_checks.sequences_are_gathered_in_fp8,
]


# One rank gathers nothing, which must not leave the scales waiting.
ALONE = [fsdp_checks.weights_gathered_in_fp8_change_no_result, fsdp_checks.evaluation_scales_from_the_data]
CASES = [(1, check) for check in ALONE] + [(3, check) for check in UNEVEN] + [(5, fsdp_checks.shards_may_be_empty)]
CASES += [(2, check) for check in CHECKS] + [(4, check) for check in GRIDS]


@functools.cache
def run_once(world_size: int, backend: str = "gloo") -> dict[str, list[str]]:
    checks = [check for world, check in CASES if world == world_size]
    return run_checks(checks, world_size, timeout=60.0, backend=backend)


@pytest.mark.parametrize(("world_size", "check"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_sharding(world_size: int, check) -> None:
    failures = run_once(world_size)[check.__name__]
    assert not failures, "\n".join(failures)


@pytest.mark.gpu
@pytest.mark.parametrize(("world_size", "check"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_sharding_over_nccl(world_size: int, check) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    failures = run_once(world_size, "nccl")[check.__name__]
    assert not failures, "\n".join(failures)


def test_checkpoints_move_between_numbers_of_ranks(tmp_path: Path) -> None:
    for checks, world_size in ((checkpoint_checks.SAVING, 2), (checkpoint_checks.LOADING, 3)):
        for failures in run_checks(checks, world_size, timeout=60.0, folder=str(tmp_path)).values():
            assert not failures, "\n".join(failures)
    # One process without any group or FP8.
    plain = shard_models.make()
    state = {"model": plain.state_dict()}
    before = state["model"]["head.weight"].clone()
    dcp.load(state, checkpoint_id=tmp_path / "shards", no_dist=True)
    assert not torch.equal(before, state["model"]["head.weight"])


@pytest.mark.gpu
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 1), (1, 2), (2, 4), (4, 1)])
def test_checkpoints_move_over_nccl(saved_by: int, loaded_by: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < max(saved_by, loaded_by):
        pytest.skip(f"needs {max(saved_by, loaded_by)} GPUs")
    for checks, world_size in ((checkpoint_checks.SAVING, saved_by), (checkpoint_checks.LOADING, loaded_by)):
        for failures in run_checks(checks, world_size, timeout=60.0, backend="nccl", folder=str(tmp_path)).values():
            assert not failures, "\n".join(failures)
