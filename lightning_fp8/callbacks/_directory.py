"""Where a run's own files go."""

from __future__ import annotations

import lightning.pytorch as pl


def run_directory(trainer: pl.Trainer) -> str:
    """The directory of the first logger, without one the Trainer's own; it may be a remote one.

    Every rank must call: Lightning takes the answer of rank 0 and tells the others, so that one alone would wait for
    them. ``setup`` is a place that all ranks come by.
    """
    return str(trainer.log_dir or trainer.default_root_dir)
