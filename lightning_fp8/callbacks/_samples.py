"""Which samples were in a batch, where the sampler can tell."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import lightning.pytorch as pl
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler


def sample_indices(
    trainer: pl.Trainer, batches: Sequence[int], ranks: Sequence[int] = ()
) -> dict[str, list[int]] | None:
    """Indices into the dataset, by rank.

    Known for one ``DataLoader`` whose order can be told again: a sequential one, or that of a ``DistributedSampler``.

    Args:
        trainer: in a fit.
        batches: indices within the epoch.
        ranks: whose samples; empty: all ranks'.
    """
    loader = trainer.train_dataloader
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return None
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        orders = {}
        for rank in ranks or range(sampler.num_replicas):
            twin = copy.copy(sampler)
            twin.rank = rank if sampler.num_replicas > 1 else 0
            orders[rank] = list(twin)
    elif isinstance(sampler, SequentialSampler):
        orders = {0: list(range(len(loader.dataset)))}  # type: ignore[arg-type]
    else:
        return None
    size = loader.batch_size
    return {str(r): [i for b in batches for i in order[b * size : (b + 1) * size]] for r, order in orders.items()}
