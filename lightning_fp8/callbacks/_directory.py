"""Where a run's own files go."""

from __future__ import annotations

import os

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_fp8.files import append_text, why_not_writable


def run_directory(trainer: pl.Trainer) -> str:
    """The directory of the first logger, without one the Trainer's own; it may be a remote one.

    Every rank must call: Lightning takes the answer of rank 0 and tells the others, so that one alone would wait for
    them. ``setup`` is a place that all ranks come by.
    """
    return str(trainer.log_dir or trainer.default_root_dir)


def check_writable(trainer: pl.Trainer, path: str | os.PathLike[str], remedy: str, begin: bool = False) -> None:
    """Refuse a file that rank 0 cannot write, as far as that can be seen beforehand; every rank must call.

    Args:
        trainer: whose rank 0 looks; it tells the others.
        path: of the file, whose directory need not be there yet.
        remedy: what to do about it.
        begin: make the file, if it is not there: no better way to see.

    Raises:
        MisconfigurationException: with the reason and ``remedy``.
    """
    hindrance = why_not_writable(path) if trainer.is_global_zero else None
    if begin and hindrance is None and trainer.is_global_zero:
        try:
            append_text(path, "")
        except OSError as error:
            hindrance = str(error)
    hindrance = trainer.strategy.broadcast(hindrance)
    if hindrance is not None:
        raise MisconfigurationException(f"{path} cannot be written: {hindrance}. {remedy}")
