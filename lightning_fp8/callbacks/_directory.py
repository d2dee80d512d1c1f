"""Where a run's own files go."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_fp8.files import located, why_not_writable


def run_directory(trainer: pl.Trainer) -> str:
    """The directory of the first logger, without one the Trainer's own; it may be a remote one.

    Every rank must call: Lightning takes the answer of rank 0 and tells the others, so that one alone would wait for
    them. ``setup`` is a place that all ranks come by.
    """
    return str(trainer.log_dir or trainer.default_root_dir)


def default_path(trainer: pl.Trainer, name: str) -> Path | str | None:
    """Where a run's file of this name goes if nobody says otherwise; every rank must call.

    None in a ``fast_dev_run``, in which Lightning writes neither logs nor checkpoints.
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    return located(os.path.join(run_directory(trainer), name))


def check_writable(
    trainer: pl.Trainer,
    path: str | os.PathLike[str] | None,
    remedy: str,
    why_not: Callable[[str | os.PathLike[str]], str | None] = why_not_writable,
) -> None:
    """Refuse a file that rank 0 cannot write, as far as that can be seen beforehand; every rank must call.

    Args:
        trainer: whose rank 0 looks; it tells the others.
        path: of the file, whose directory need not be there yet; that of rank 0 counts, and None is no file.
        remedy: what to do about it.
        why_not: what rank 0 looks by, one of :mod:`lightning_fp8.files`.

    Raises:
        MisconfigurationException: with the reason and ``remedy``.
    """
    hindrance = why_not(path) if trainer.is_global_zero and path is not None else None
    message = f"{path} cannot be written: {hindrance}. {remedy}" if hindrance is not None else None
    message = trainer.strategy.broadcast(message)
    if message is not None:
        raise MisconfigurationException(message)
