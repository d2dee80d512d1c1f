"""``SkipBatchException`` and None from ``training_step``, on any number of ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_fp8.recovery.errors import SkipBatchException


class CaughtSteps:
    """Surrounds a module's ``training_step`` while it is fitted.

    On one device a step that gave up returns None, and Lightning runs no backward. On several ranks the others are
    about to reduce their gradients, so this rank joins them with a loss that is NaN on the path to every parameter.
    The wrapper stands in the module's own attributes, as Lightning's redirection of ``forward`` does.

    Args:
        trainer: whose strategy runs the steps.
        module: surrounded until :meth:`release`.
        left_out: told of each step that gave up, with the reason.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, left_out: Callable[[str], None]) -> None:
        self.trainer, self.module, self.left_out = trainer, module, left_out
        self._own = module.__dict__.get("training_step")
        self._step: Callable[..., Any] = module.training_step
        module.training_step = self._wrapped()  # type: ignore[method-assign]

    def _wrapped(self) -> Callable[..., Any]:
        @functools.wraps(self._step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            try:
                output = self._step(*args, **kwargs)
            except SkipBatchException as exception:
                self.left_out(str(exception) or "SkipBatchException")
                return self._nothing()
            if output is None and self._others_wait():
                self.left_out("training_step returned None")
                return self._nothing()
            return output

        return training_step

    def _others_wait(self) -> bool:
        return self.trainer.world_size > 1 and self.module.automatic_optimization

    def _nothing(self) -> Tensor | None:
        if not self._others_wait():
            return None
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        if any(hasattr(p, "to_local") for p in parameters) or "FSDP" in type(self.trainer.strategy).__name__:
            raise RuntimeError(
                f"training_step gave up its batch on rank {self.trainer.global_rank}, while the others wait for its "
                "part of the sharded model: return recovery.reject(loss) instead, which keeps this rank in step."
            )
        return torch.stack([parameter.reshape(-1)[0].float() for parameter in parameters]).sum() * float("nan")

    def release(self) -> None:
        """Leave the module as it was."""
        if self._own is not None:
            self.module.training_step = self._own  # type: ignore[method-assign]
        else:
            nn.Module.__delattr__(self.module, "training_step")
