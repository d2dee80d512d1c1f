"""``SkipBatchException`` and None from ``training_step``, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_fp8.callbacks._surrounded import surround
from lightning_fp8.recovery.errors import SkipBatchException


class CaughtSteps:
    """Surrounds a module's ``training_step`` while it is fitted.

    On one device a step that gave up returns None, and Lightning runs no backward. On several ranks the others are
    about to reduce their gradients, so this rank joins them with a loss that is NaN on the path to every parameter
    (zero, where no verdict would keep the NaN from the weights).
    Where it cannot, for the steps are the user's own, the model is sharded or DDP's graph static, an error names the
    rank.

    Args:
        trainer: whose strategy runs the steps.
        module: surrounded until ``release()``.
        left_out: told of each step that gave up, with the reason; whether the step will be judged.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, left_out: Callable[[str], bool]) -> None:
        self.trainer, self.module, self.left_out = trainer, module, left_out
        self.release = surround(module, "training_step", self._around)

    def _around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def training_step(*args: Any, **kwargs: Any) -> Any:
            try:
                output = step(*args, **kwargs)
            except SkipBatchException as exception:
                return self._nothing(self.left_out(str(exception) or "SkipBatchException"))
            if output is None and self.module.automatic_optimization and self.trainer.world_size > 1:
                return self._nothing(self.left_out("training_step returned None"))
            return output

        return training_step

    def _nothing(self, judged: bool) -> Tensor | None:
        if self.trainer.world_size == 1:
            return None
        if not self.module.automatic_optimization:
            raise RuntimeError(
                f"training_step gave up its batch on rank {self.trainer.global_rank}, while the others wait for its "
                "gradients: in manual optimization give recovery.reject(loss) to manual_backward instead, which keeps "
                "this rank in step."
            )
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        if any(hasattr(p, "to_local") for p in parameters) or "FSDP" in type(self.trainer.strategy).__name__:
            raise RuntimeError(
                f"training_step gave up its batch on rank {self.trainer.global_rank}, while the others wait for its "
                "part of the sharded model: return recovery.reject(loss) instead, which keeps this rank in step."
            )
        if getattr(self.trainer.strategy.model, "static_graph", False):
            raise RuntimeError(
                f"training_step gave up its batch on rank {self.trainer.global_rank}, while static_graph=True has the "
                "others wait for the gradients of the same graph as always: return recovery.reject(loss) instead, "
                "which keeps it, or leave static_graph=False."
            )
        nothing = torch.stack([parameter.reshape(-1)[0].float() for parameter in parameters]).sum()
        return nothing * (float("nan") if judged else 0.0)
