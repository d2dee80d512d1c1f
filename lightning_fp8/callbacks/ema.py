"""Averages over accepted steps only: :class:`EMAOfAcceptedSteps`."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.fsdp import FSDPModule

from lightning_fp8.callbacks.recovery import SkipBatchRecovery


class EMAOfAcceptedSteps(EMAWeightAveraging):
    """Lightning's exponential moving average of the weights, left alone by steps that recovery skips.

    Lightning's own averages once per attempt: a skipped step draws the average towards weights that did not move.

    Args and attributes are those of ``EMAWeightAveraging``.
    """

    _recovery: SkipBatchRecovery | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the recovery whose verdicts count.

        Raises:
            MisconfigurationException: there is none among the Trainer's callbacks, FSDP2 shards the model, or the
                Trainer is that of ``pytorch_lightning``, whose modules the callback of ``lightning`` does not take.
        """
        if not isinstance(pl_module, pl.LightningModule):
            raise MisconfigurationException(
                "EMAOfAcceptedSteps averages modules of lightning.pytorch, as the callback of Lightning's that it is: "
                "use the Trainer and LightningModule of lightning.pytorch."
            )
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._recovery = next((c for c in callbacks if isinstance(c, SkipBatchRecovery)), None)
        if self._recovery is None:
            raise MisconfigurationException(
                "EMAOfAcceptedSteps needs a SkipBatchRecovery among the Trainer's callbacks; "
                "without one use Lightning's EMAWeightAveraging."
            )
        try:
            super().setup(trainer, pl_module, stage)
        except AssertionError as error:
            # Lightning runs configure_model in there, and copies what it made.
            if not any(isinstance(module, FSDPModule) for module in pl_module.modules()):
                raise
            raise MisconfigurationException(
                "EMAOfAcceptedSteps averages a copy of the model, and modules that FSDP2 shards cannot be copied: use "
                "DDPStrategy, or leave the average out."
            ) from error

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse fast mode, in which a verdict comes too late.

        Raises:
            MisconfigurationException: recovery runs in fast mode.
        """
        guard = self._recovery.guard if self._recovery is not None else None
        if guard is not None and guard.fast:
            raise MisconfigurationException(
                "EMAOfAcceptedSteps must know of a skipped step at once: use SkipBatchRecovery(mode='exact'), or in "
                "fast mode Lightning's EMAWeightAveraging, which goes on in skipped steps."
            )

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """As Lightning's, but for skipped steps."""
        skipped = step_idx is not None and self._recovery is not None and self._recovery.accepted is False
        return not skipped and super().should_update(step_idx=step_idx, epoch_idx=epoch_idx)
