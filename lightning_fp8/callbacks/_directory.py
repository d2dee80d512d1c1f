"""Where a run's own files go."""

from __future__ import annotations

import os
import re
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException


def run_directory(trainer: pl.Trainer) -> str:
    """The directory of the first logger, without one the Trainer's own; it may be a remote one.

    Every rank must call: Lightning takes the answer of rank 0 and tells the others, so that one alone would wait for
    them. ``setup`` is a place that all ranks come by.
    """
    return str(trainer.log_dir or trainer.default_root_dir)


def check_writable(trainer: pl.Trainer, path: str | os.PathLike[str], remedy: str) -> None:
    """Refuse a file that rank 0 cannot write, as far as that can be seen beforehand; every rank must call.

    Args:
        trainer: whose rank 0 looks; it tells the others.
        path: of the file, whose directory need not be there yet.
        remedy: what to do about it.

    Raises:
        MisconfigurationException: with the reason and ``remedy``.
    """
    hindrance = trainer.strategy.broadcast(why_not_writable(path) if trainer.is_global_zero else None)
    if hindrance is not None:
        raise MisconfigurationException(f"{path} cannot be written: {hindrance}. {remedy}")


def why_not_writable(path: str | os.PathLike[str]) -> str | None:
    """What keeps a file from being made or appended to, as far as that can be seen without doing it; None: nothing."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        return "it is no path of this machine"
    path = Path(path)
    try:
        place = next(p for p in (path, *path.absolute().parents) if p.exists())
    except OSError as error:
        return str(error)
    if path.is_dir():
        return "it is a directory"
    if place != path and not place.is_dir():
        return f"{place} is no directory"
    return None if os.access(place, os.W_OK) else f"{place} may not be written to"
