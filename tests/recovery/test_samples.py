"""Which samples a rejected step names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from recovery_models import fit, make_loader, recovery, rejected
from torch.utils.data import DataLoader, Dataset, DistributedSampler, WeightedRandomSampler

from examples.loader import ResumableLoader
from lightning_fp8.callbacks import _escalation
from lightning_fp8.callbacks._samples import sample_indices
from lightning_fp8.callbacks.fault_injector import Fault, FaultInjector


def told(loader: DataLoader, ranks=(), world_size: int = 1, batches=(0, 2)):
    return sample_indices(SimpleNamespace(train_dataloader=loader, world_size=world_size), batches, ranks)


class Indices(Dataset):
    """Each sample is its index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def loaders(length: int, replicas: int, **settings) -> list[DataLoader]:
    data = Indices(length)
    samplers = [DistributedSampler(data, replicas, rank, seed=3, **settings) for rank in range(replicas)]
    for sampler in samplers:
        sampler.set_epoch(2)
    return [DataLoader(data, 4, sampler=sampler) for sampler in samplers]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("length", "replicas"), [(2, 5), (30, 3), (31, 3), (35, 4), (10, 1)])
def test_they_are_those_of_the_batches_of_each_rank(shuffle, drop_last, length, replicas):
    of_all = loaders(length, replicas, shuffle=shuffle, drop_last=drop_last)
    seen = [[batch.tolist() for batch in loader] for loader in of_all]
    expected = {str(rank): [i for b in batches[0:1] + batches[2:3] for i in b] for rank, batches in enumerate(seen)}
    for loader in of_all:
        assert told(loader, world_size=replicas) == expected
    last = replicas - 1
    assert told(of_all[0], (last,), replicas) == {str(last): expected[str(last)]}


def test_the_order_of_all_is_made_once(monkeypatch):
    made, randperm = [], torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda *args, **kw: made.append(args) or randperm(*args, **kw))
    told(loaders(64, 8)[0], world_size=8)
    assert len(made) == 1


def test_ranks_that_share_a_replica_have_the_same_samples():
    """Tensor parallelism: two replicas on four ranks, and one on two."""
    first, second = (next(iter(loader)).tolist() for loader in loaders(30, 2))
    loader = loaders(30, 2)[1]
    assert told(loader, world_size=4, batches=[0]) == {"0": first, "1": first, "2": second, "3": second}
    assert told(loader, (3,), world_size=4, batches=[0]) == {"3": second}
    (alone,) = loaders(30, 1)
    assert told(alone, (1,), 2, [0]) == {"1": next(iter(alone)).tolist()}


def test_a_sequential_sampler_and_a_resumable_one():
    assert told(make_loader(10**6, 4), batches=[1, 3]) == {"0": [4, 5, 6, 7, 12, 13, 14, 15]}
    loader = ResumableLoader(Indices(24), 4, seed=1)
    assert told(loader, batches=[0]) == {"0": next(iter(loader)).tolist()}
    assert told(DataLoader(Indices(8), 4, shuffle=True)) is None


def test_a_wrapped_sampler_is_not_drawn_from_anew():
    """Lightning's wrapper would go on in the new draw, in the middle of the epoch."""
    data = Indices(16)
    sampler = DistributedSamplerWrapper(WeightedRandomSampler([1.0] * 16, 16), 2, 0)
    orders = []
    for asked in (False, True):
        torch.manual_seed(0)
        loader = DataLoader(data, 2, sampler=sampler)
        batches = iter(loader)
        orders.append([next(batches).tolist()])
        if asked:
            assert told(loader, world_size=2) is None
        orders[-1] += [batch.tolist() for batch in batches]
    assert orders[0] == orders[1]


@pytest.mark.parametrize("writes", [False, True])
def test_only_who_writes_the_log_asks_for_them(tmp_path, monkeypatch, writes):
    asked = []
    monkeypatch.setattr(_escalation, "sample_indices", lambda *args: asked.append(args))
    callback = recovery()

    class Setup(FaultInjector):
        def on_train_start(self, trainer, pl_module):
            callback.events.writes = writes

    fit(tmp_path, [Setup([Fault("batch", 3)]), callback], max_steps=6)
    assert len(asked) == int(writes) and len(rejected(callback)) == 1
