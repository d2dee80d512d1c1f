"""A ``DataLoader`` that can stop after any batch and go on there, bit for bit, also on another number of ranks.

Lightning saves the state of every loader that has ``state_dict`` and ``load_state_dict`` with its checkpoints; a plain
``DataLoader`` has none, so after a resume in mid-epoch it would begin its epoch anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class ResumableSampler(DistributedSampler[Any]):
    """A ``DistributedSampler`` whose next epoch can begin at a later sample; with one replica it serves one process.

    The order depends on ``seed`` and the epoch only. Rank r of R takes every R-th index of that order, so that after n
    samples on each rank exactly the first n * R are used up: a position that means the same on any number of ranks.
    """

    #: Samples of this rank to leave out at the front of the next epoch.
    start = 0

    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start, 0
        return iter(list(super().__iter__())[start:])


class ResumableLoader(DataLoader[Any]):
    """Batches in an order that is shuffled anew each epoch, and a position in it that a checkpoint can hold.

    Args:
        dataset: a dataset with a length.
        batch_size: samples per batch and rank.
        shuffle: whether to permute the samples, or to keep their order.
        drop_last: whether to leave out the samples that do not fill the last batch.
        num_replicas: number of ranks that share the data.
        rank: the index of this one.
        seed: seed of the order, the same on all ranks.

    Raises:
        ValueError: there are too few samples for a single batch.
    """

    sampler: ResumableSampler

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = True,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
    ) -> None:
        sampler = ResumableSampler(dataset, num_replicas, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
        # A generator of its own: an iterator's seed would otherwise be drawn from the global one, and move dropout.
        super().__init__(dataset, batch_size, sampler=sampler, drop_last=drop_last, generator=torch.Generator())
        self._samples_per_rank = batch_size
        self._batch = 0
        self._loaded: dict[str, int] | None = None
        if len(self) == 0:
            samples = len(dataset)  # type: ignore[arg-type]
            raise ValueError(
                f"{samples} samples do not fill one batch of {batch_size} on each of {num_replicas} ranks: "
                "use more data or a smaller batch_size"
            )

    @property
    def _samples_per_batch(self) -> int:
        """Over all ranks."""
        return self._samples_per_rank * self.sampler.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, and with it the order; a Trainer does it by itself."""
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Any:
        # A generator: its body runs with the first batch, after the Trainer has set the epoch.
        loaded, self._loaded = self._loaded, None
        self._batch = 0
        if loaded is not None and loaded["epoch"] == self.sampler.epoch:
            self._batch = loaded["samples"] // self._samples_per_batch
        self.sampler.start = self._batch * self._samples_per_rank
        for batch in super().__iter__():
            self._batch += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Epoch and number of samples that all ranks together have used of it."""
        return {"epoch": self.sampler.epoch, "samples": self._batch * self._samples_per_batch}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Begin the next iteration where the one that gave ``state_dict`` was, if it is of the same epoch."""
        self._loaded = dict(state_dict)
        self.set_epoch(state_dict["epoch"])


def make_loader(
    trainer: pl.Trainer | None, dataset: Dataset[Any], batch_size: int, *, train: bool, seed: int
) -> ResumableLoader:
    """This rank's loader: shuffled full batches for training, everything in its own order for evaluation.

    Args:
        trainer: tells how its strategy shares data among ranks; ``None`` means a single process.
        dataset: a dataset with a length.
        batch_size: samples per batch and rank.
        train: whether it is for training.
        seed: seed of the order.
    """
    shard = {} if trainer is None else getattr(trainer.strategy, "distributed_sampler_kwargs", {})
    return ResumableLoader(dataset, batch_size, shuffle=train, drop_last=train, seed=seed, **shard)
