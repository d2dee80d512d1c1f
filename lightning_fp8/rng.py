"""Random number states as plain values that a checkpoint can hold, for every rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def collect_rng_state() -> dict[str, Any]:
    """The states of torch (CPU and the current CUDA device), numpy and Python."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng_state(state: dict[str, Any]) -> None:
    """Set what :func:`collect_rng_state` collected."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def gather_rng_states() -> list[dict[str, Any]]:
    """The states of all ranks, in order; every rank must call."""
    mine = collect_rng_state()
    if not (dist.is_available() and dist.is_initialized()):
        return [mine]
    states: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(states, mine)
    return states


def restore_own_rng_state(states: list[dict[str, Any]]) -> bool:
    """Set this rank's state; returns false where the number of ranks changed and nothing was set."""
    distributed = dist.is_available() and dist.is_initialized()
    world, rank = (dist.get_world_size(), dist.get_rank()) if distributed else (1, 0)
    if len(states) != world:
        return False
    restore_rng_state(states[rank])
    return True
