"""Take what a rejected step logged out of means, monitors and progress bars again."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric


class LoggedMetrics:
    """The training metrics as they were before a step.

    Lightning keeps what ``self.log`` gathers in the loop's result collection, and offers no public way to take a value
    back; torchmetrics keep their own states. They are those that the module has at the first step.
    """

    def __init__(self) -> None:
        self._found: list[Metric] | None = None
        self._results: dict[str, dict[str, Any]] = {}
        self._metrics: list[tuple[Metric, dict[str, Any]]] = []

    def remember(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Keep them: a step is about to begin. References only, but for torchmetrics, which change in place."""
        self._results = {key: dict(metric.__dict__) for key, metric in (trainer._results or {}).items()}
        if self._found is None:
            self._found = [m for m in module.modules() if isinstance(m, Metric)]
        self._metrics = [(m, {**m.__dict__, **_states(m)}) for m in self._found]

    def restore(self, trainer: pl.Trainer, rejected: Tensor | bool) -> None:
        """Put them back if ``rejected``; a tensor on the device decides there, state by state."""
        results = trainer._results
        if results is None or rejected is False:
            return
        if isinstance(rejected, Tensor):
            for key, metric in results.items():
                if metric.is_tensor:
                    _choose(metric, self._results.get(key, metric._defaults), rejected)
            for metric, before in self._metrics:
                _choose(metric, before, rejected)
            return
        for key in [key for key in results if key not in self._results]:
            del results[key]
        for key, before in self._results.items():
            results[key].__dict__.update(before)
        for metric, before in self._metrics:
            metric.__dict__.update(before)
            metric.__dict__.update(_states(metric))


def _states(metric: Metric) -> dict[str, Any]:
    """Copies of a metric's states."""
    states = {name: getattr(metric, name) for name in metric._defaults}
    return {name: s.clone() if isinstance(s, Tensor) else list(s) for name, s in states.items()}


def _choose(metric: Metric, before: dict[str, Any], rejected: Tensor) -> None:
    """Each state, and the value of the last step, from before where ``rejected``.

    States that are lists stay as they are, and so do those on another device than the verdict: to change them the host
    would have to wait.
    """
    for name in [*metric._defaults, "_forward_cache"]:
        new, old = getattr(metric, name, None), before.get(name)
        if not isinstance(new, Tensor) or not isinstance(old, Tensor):
            continue
        old = old.to(new.device) if old.device.type == "cpu" and not old.ndim else old
        if new.shape == old.shape and new.device == old.device == rejected.device:
            setattr(metric, name, torch.where(rejected, old, new))
