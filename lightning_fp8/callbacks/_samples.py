"""Which samples were in a batch, where the sampler can tell."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler


def sample_indices(
    trainer: pl.Trainer, batches: Sequence[int], ranks: Sequence[int] = ()
) -> dict[str, list[int]] | None:
    """Indices into the dataset, by rank.

    Known for one ``DataLoader`` whose order can be told again: a sequential one, or that of a ``DistributedSampler``,
    for which the order of the whole dataset is made once.

    Args:
        trainer: in a fit.
        batches: indices within the epoch.
        ranks: whose samples; empty: all ranks'.
    """
    loader = trainer.train_dataloader
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return None
    sampler = loader.sampler
    order: Sequence[int]
    if isinstance(sampler, SequentialSampler):
        order, replicas, ranks = range(len(loader.dataset)), 1, (0,)  # type: ignore[arg-type]
    # One over something else, as Lightning makes it around another sampler, would be drawn from anew.
    elif isinstance(sampler, DistributedSampler) and sampler.dataset is loader.dataset:
        order, replicas = _order_of_all(sampler), sampler.num_replicas
    else:
        return None
    # Neighbouring ranks share a replica's data where there are more of them, as under tensor parallelism.
    world, size = max(trainer.world_size, replicas), loader.batch_size * replicas
    firsts = {rank: rank * replicas // world for rank in ranks or range(world)}
    return {
        str(rank): [i for b in batches for i in order[first + b * size : first + (b + 1) * size : replicas]]
        for rank, first in firsts.items()
    }


def _order_of_all(sampler: DistributedSampler[Any]) -> list[int]:
    """Of all replicas in turn, padded or cut as theirs is."""
    twin = copy.copy(sampler)
    twin.num_replicas, twin.rank, twin.num_samples = 1, 0, twin.total_size
    return list(twin)
