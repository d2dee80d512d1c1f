"""What callbacks that watch the layers have in common: when to read, and when to look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from lightning_fp8.callbacks._ending import while_ending
from lightning_fp8.callbacks._intervals import passes_multiple
from lightning_fp8.host_copy import HostCopy
from lightning_fp8.recipes import ROLES
from lightning_fp8.statistics import AMAX, NOT_SEEN
from lightning_fp8.telemetry import Telemetry


@dataclass(frozen=True)
class When:
    """The step of a reading.

    Attributes:
        step: number of optimizer steps completed before it (``trainer.global_step``).
        log_step: the step under which loggers file it.
    """

    step: int
    log_step: int


class LayerCallback(Callback):
    """Reads the statistics of all layers on the device, and looks at them on the host a training batch later.

    The window of a step is complete after its last backward, and read there: before any callback could take the step
    back. It comes to the host in one copy that nobody waits for.
    """

    def __init__(self) -> None:
        self._trainer: pl.Trainer | None = None
        self._telemetry: Telemetry | None = None
        self._window: Tensor | None = None
        self._started: int | None = None
        self._before: int | None = None
        self._told = False
        self._copy = HostCopy()
        self._pending: When | None = None
        self._loaded: dict[str, Any] | None = None

    # What a subclass says

    def _forget(self) -> None:
        """A run of its own is set up: let go of what an earlier one left."""

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule, telemetry: Telemetry) -> None:
        """A fit begins."""

    def _due(self, trainer: pl.Trainer) -> bool:
        """Whether the batch that runs is to be read."""
        return True

    def _message(self, trainer: pl.Trainer, window: Tensor, outputs: Any) -> Tensor | None:
        """What goes to the host, on the device, after the optimizer step; ``None``: nothing.

        Args:
            trainer: the Trainer.
            window: the statistics as they were before it, fp32 ``[layers, 3, 4]``.
            outputs: of ``training_step``.
        """
        return window.flatten()

    def _look(self, trainer: pl.Trainer, message: Tensor, when: When) -> None:
        """A message has arrived; on every rank, after the batch that follows its own, or when training ends."""

    def _state(self) -> dict[str, Any]:
        """What goes into a checkpoint: plain values and tensors; empty before the first fit."""
        return {}

    def _load(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was; within a fit."""

    # What it may ask

    def _passes(self, interval: int, start: int = 0) -> bool:
        """Whether this batch's first step is one of every ``interval`` from ``start`` on, or the next one there is."""
        now = self._started or 0
        before = now - 1 if self._before is None else self._before
        return passes_multiple(interval, before - start, now - start)

    # What others may ask

    def catch_up(self, trainer: pl.Trainer) -> None:
        """Look at the last reading now, if it is still on its way."""
        when, self._pending = self._pending, None
        if when is not None:
            self._look(trainer, self._copy.wait(), when)

    # Hooks

    @property
    def telemetry(self) -> Telemetry:
        """The statistics of the model's layers; within a fit only."""
        if self._telemetry is None:
            raise RuntimeError(f"{type(self).__name__} works inside Trainer.fit only: is it among its callbacks?")
        return self._telemetry

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._loaded = None  # An evaluation may have loaded another run's.
            if trainer.global_step == 0:
                self._forget()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._trainer = trainer
        self._telemetry = Telemetry.attach(pl_module)
        self._window = self._started = self._before = self._pending = None
        self._begin(trainer, pl_module, self._telemetry)
        self._resume()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.telemetry.begin_batch()
        if trainer.global_step != self._started:  # Otherwise gradients accumulate.
            self._before, self._started = self._started, trainer.global_step
        self._told = False

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._told = True
        if self._due(trainer):
            self._window = self.telemetry.read()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self.telemetry.begin_optimizer_step()
        # Whoever calls loss.backward() in manual optimization goes past on_after_backward; each optimizer may have a
        # backward of its own. What recovery has taken back since an earlier one was seen all the same.
        if not self._told and self._due(trainer):
            before, self._window = self._window, self.telemetry.read()
            if before is not None:
                self._window[..., AMAX] = torch.maximum(self._window[..., AMAX], before[..., AMAX])
        if self._window is not None and any(getattr(c, "told_to_reject", False) for c in trainer.callbacks):  # type: ignore[attr-defined]
            # Whatever was in that data is known; and recovery.reject(loss) makes gradients NaN, so that all ranks take
            # part in a backward that is thrown away. Weights are not the batch's.
            for role in ("input", "grad_output"):
                self._window[:, ROLES.index(role), AMAX] = NOT_SEEN

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.catch_up(trainer)
        if self._window is None or trainer.global_step == self._started:
            return  # Gradients accumulate.
        window, self._window = self._window, None
        message = self._message(trainer, window, outputs)
        if message is not None:
            self._copy.start(message)
            self._pending = When(self._started or 0, trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.catch_up(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        # Lightning tears no callback down after an exception: hooks would stay, and the next fit read stale tables.
        with while_ending(type(self).__name__):
            self.catch_up(trainer)
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._telemetry is not None:
            self._telemetry.release(pl_module)
            self._telemetry = self._trainer = None

    def state_dict(self) -> dict[str, Any]:
        if self._trainer is not None:
            self.catch_up(self._trainer)
        state = self._state()
        return {**state, "started": self._started} if state else self._loaded or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict or None
        self._resume()

    def _resume(self) -> None:
        """Sharded strategies load after a fit has begun, others before."""
        if self._loaded is not None and self._telemetry is not None:
            self._load(self._loaded)
            self._started = self._loaded.get("started")
            self._loaded = None
