"""Exceptions of recovery."""

from __future__ import annotations


class SkipBatchException(Exception):
    """Raise it in ``training_step`` to leave a batch out.

    On one device, on all ranks at once, or on any ranks under DDP if nothing that follows in ``training_step`` talks to
    other ranks (``self.log(..., sync_dist=True)`` does, and they would wait for this one). Elsewhere, under DDP's
    ``static_graph=True`` too, return ``recovery.reject(loss)``.
    """


class RecoveryExhausted(RuntimeError):
    """Everything that recovery may do was done, and steps are still bad."""
