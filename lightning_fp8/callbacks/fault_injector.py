"""Plant faults into a run, to see it recover: :class:`FaultInjector`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_fp8.recovery import faults
from lightning_fp8.recovery.faults import Fault, InjectedFault
from lightning_fp8.recovery.layers import FP8Layers
from lightning_fp8.selection import clean_name

#: Where faults are planted; all others as a batch begins.
_HOOKS = {"loss": "before backward", "amax": "after backward"}

__all__ = ["Fault", "FaultInjector", "InjectedFault"]


class FaultInjector(Callback):
    """Plants each fault at its step, the same in every run.

    In manual optimization a batch may take several steps: what is planted as a batch begins (all but ``loss`` and
    ``amax``) then waits for the next batch, where none begins at its step. A warning as the fit ends tells of faults
    whose step did not come.

    Args:
        faults: :class:`Fault` s, or mappings with their fields.

    Raises:
        ValueError: where a fault's settings make no sense.
        TypeError: where one is of another type.
    """

    def __init__(self, faults: Iterable[Fault | Mapping[str, Any]]) -> None:
        if isinstance(faults, (Fault, Mapping, str)) or not isinstance(faults, Iterable):
            raise TypeError(f"faults is a list of faults, got {faults!r}.")
        self.faults = [_fault(fault) for fault in faults]
        self._hooks: list[Any] = []
        self._planted = -1
        self._spans: dict[str, tuple[int, int]] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what could not be planted, before the first step.

        Raises:
            ValueError: a layer or a rank that does not exist.
        """
        self._planted, self._spans = -1, {}
        for fault in self.faults:
            if fault.rank is not None and fault.rank >= trainer.world_size:
                raise ValueError(f"{fault}: there are {trainer.world_size} ranks, counted from 0.")
            if fault.layer is not None:
                _module(pl_module, fault.layer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # Of a batch that was left out, whose end nobody told.
        self._remove_hooks()
        step = trainer.global_step
        # Of accumulated batches, the first gets the fault.
        if step == self._planted:
            return
        self._planted = step
        for fault in self._due(trainer, "batch start"):
            module = _module(pl_module, fault.layer) if fault.layer is not None else pl_module
            if fault.kind == "batch":
                faults.spoil_batch(batch, fault.value)
            elif fault.kind == "activation":
                self._hooks.append(faults.spoil_activation(module, fault.value))
            elif fault.kind == "gradient" and not faults.is_sharded(module):
                self._hooks.append(faults.spoil_gradient(module, fault.value))
            elif fault.kind == "weight":
                faults.spoil_weight(module, fault.value)
            elif fault.kind == "bit_flip":
                faults.flip_bit(module, fault.bit)
            elif fault.kind == "exception":
                raise InjectedFault(f"Planted at step {step}.")
            elif fault.kind == "kill":
                faults.kill_process()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        for fault in self._due(trainer, "before backward"):
            if fault.kind == "loss":
                loss.mul_(fault.multiplier)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for fault in self._due(trainer, "after backward"):
            if fault.kind == "gradient" and fault.layer is not None:
                module = _module(pl_module, fault.layer)
                if faults.is_sharded(module):
                    faults.spoil_reduced_gradient(module, fault.value)
            if fault.kind == "amax" and fault.layer is not None:
                layers, name = FP8Layers(pl_module), clean_name(fault.layer)
                if name not in layers.names:
                    raise ValueError(f"{fault.layer!r} does not run in FP8, so it has no amax to plant a fault in.")
                layers.multiply_amax(name, fault.role, fault.multiplier)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._remove_hooks()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        late = [fault for fault in self.faults if fault.step > self._last_step(_HOOKS.get(fault.kind, "batch start"))]
        if late:
            rank_zero_warn(
                f"{len(late)} faults were not planted, for the fit ended before their step: "
                f"{', '.join(f'{fault.kind} at step {fault.step}' for fault in late)}."
            )

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._remove_hooks()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _last_step(self, hook: str) -> int:
        """The last step at which ``hook`` was called; -1: it never was."""
        return self._spans.get(hook, (-1, -1))[1]

    def _due(self, trainer: pl.Trainer, hook: str) -> list[Fault]:
        """The faults of this step, and of those that have gone by since the hook was last called."""
        now, here = trainer.global_step, (None, trainer.global_rank)
        first, last = self._spans.get(hook, (now, now))
        if now != last:
            first = last + 1
        self._spans[hook] = first, now
        return [fault for fault in self.faults if first <= fault.step <= now and fault.rank in here]


def _fault(given: Fault | Mapping[str, Any]) -> Fault:
    """A fault from its fields, or itself."""
    if isinstance(given, Fault):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(f"A fault is a Fault or a mapping with its fields, got {given!r}.")
    known = {field.name: field for field in fields(Fault)}
    if unknown := sorted(map(str, set(given) - set(known))):
        raise ValueError(f"A fault has no field {', '.join(unknown)}: choose among {', '.join(known)}.")
    if missing := [name for name, field in known.items() if field.default is MISSING and name not in given]:
        raise ValueError(f"The fault {dict(given)} lacks {' and '.join(missing)}.")
    return Fault(**given)


def _module(root: nn.Module, name: str) -> nn.Module:
    try:
        return root.get_submodule(name)
    except AttributeError as error:
        names = ", ".join(n for n, m in root.named_modules() if n and not list(m.children()))
        raise ValueError(f"There is no layer {name!r} to put a fault in. Layers: {names}.") from error
