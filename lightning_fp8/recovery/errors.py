"""Exceptions of recovery."""

from __future__ import annotations


class SkipBatchException(Exception):
    """Raise it in ``training_step`` to leave a batch out.

    On one device, or on all ranks at once. Where only some ranks can tell that their data is bad, return
    ``recovery.reject(loss)`` instead.
    """


class RecoveryExhausted(RuntimeError):
    """Everything that recovery may do was done, and steps are still bad."""
