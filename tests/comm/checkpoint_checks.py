"""Distributed checkpoints are plain, and move between numbers of ranks. Run by test_comm_sharding.py."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as dcp
from rank_checks import folder
from shard_models import assert_same_weights, batch, loss_of, make, sharded, train
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)


def settings() -> dict:
    return {"param": "fp8", "grad": "fp8", "recipe": "tensorwise"}


def saves_its_shards(rank: int, world: int) -> None:
    model = sharded(**settings())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        loss_of(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder() / "shards")


def loads_them_on_other_ranks(rank: int, world: int) -> None:
    model = sharded(**settings())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, batch(0, rank)).backward()
    optimizer.step()
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder() / "shards")
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    plain = make()
    whole = {"model": plain.state_dict()}
    dcp.load(whole, checkpoint_id=folder() / "shards")
    plain.load_state_dict(whole["model"])
    assert_same_weights(model, plain)
    assert float(optimizer.state[model.head.weight]["step"]) == 2
    optimizer.zero_grad()
    assert train(model, steps=2) == train(sharded(plain, **settings()), steps=2)


SAVING, LOADING = [saves_its_shards], [loads_them_on_other_ranks]
