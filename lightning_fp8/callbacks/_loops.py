"""What a Trainer is doing with its batches."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn


def fits(trainer: pl.Trainer) -> bool:
    """Whether a fit is going on, or about to end with an exception."""
    return trainer.state.fn == TrainerFn.FITTING and trainer.state.stage is not None


def runs_forward_only(trainer: pl.Trainer) -> bool:
    """Whether Lightning runs no backward by design, and offers no public way to tell.

    So it does in the epoch in which ``StochasticWeightAveraging`` renews the statistics of BatchNorm. The step at its
    end has no gradients, or those that an earlier step has left.
    """
    return trainer.lightning_module.automatic_optimization and trainer.fit_loop._skip_backward


def accumulates(trainer: pl.Trainer) -> bool:
    """Whether a step ever takes several batches."""
    schedulers = [c for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler)]  # type: ignore[attr-defined]
    return trainer.accumulate_grad_batches > 1 or any(s.going_to_accumulate_grad_batches() for s in schedulers)
