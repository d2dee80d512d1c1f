"""Is something wrong with a layer, in which, since when: :class:`FP8HealthMonitor`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_fp8.callbacks._layers import LayerCallback, When
from lightning_fp8.callbacks._loss_factor import loss_factor
from lightning_fp8.callbacks._progress import show_worst_layer, skipped_steps
from lightning_fp8.checks import check_flag
from lightning_fp8.health import KINDS, Health, HealthEvent, HealthLimits, Kind, Reading
from lightning_fp8.history import rows_of
from lightning_fp8.recipes import ROLES
from lightning_fp8.statistics import AMAX, SCALE, SLOT_SIZE
from lightning_fp8.telemetry import Telemetry

log = logging.getLogger(__name__)

Action = Literal["ignore", "log", "warn", "raise", "recover"]

#: Events kept in memory and in the checkpoint.
MAX_EVENTS = 1000


class FP8HealthError(RuntimeError):
    """An event whose action is ``raise``.

    Attributes:
        event: what happened.
    """

    def __init__(self, event: HealthEvent) -> None:
        super().__init__(
            f"{event.message()} Look at that layer, or let lightning_fp8.SkipBatchRecovery go on without such steps."
        )
        self.event = event

    def __reduce__(self) -> tuple[Any, ...]:
        # Between processes: an exception is made again from its message otherwise.
        return type(self), (self.event,)


class FP8HealthMonitor(LayerCallback):
    """Looks at every operand of every linear layer in every step, and names the one where trouble begins.

    It costs no wait: the step is judged on the device from amaxes that are there anyway (layers in high precision take
    theirs for it), the ranks tell each other in one small gather, and the host reads the result one step later. So
    ``raise`` raises on every rank, one step after the event.

    Kinds of trouble: ``nonfinite``, ``spike``, ``scale_at_cap``, ``zero_gradient``, ``drift``; see
    :mod:`lightning_fp8.health`. Where a step with NaN or Inf was taken and spoilt weights, the steps after it count as
    the same event. In a checkpoint is the history of rank 0.

    Args:
        action: what to do about an event: ``"ignore"``, ``"log"``, ``"warn"``, ``"raise"`` or ``"recover"`` (the
            step is rejected by :class:`~lightning_fp8.SkipBatchRecovery`, which must come after this callback); or a
            mapping from kinds to actions, where missing kinds are warned of. Loggers get a count of each kind.
        spike: an amax above this factor times the mean of the last ``window`` steps is a spike; ``None``: never.
        window: steps in that mean.
        sigmas: a spike also lies this many standard deviations of the operand's own noise above the mean, for the
            gradients of small batches leap in every run; ``None``: the factor alone decides.
        patience: steps in a row that a scale may stand at its cap, or a whole gradient be zero.
        drift: powers of two that the recent mean may lie above the long-run mean; ``None``: any.
        progress_bar: show the layer with the least headroom, and the number of skipped steps.

    Attributes:
        events: the last 1000, the oldest first.
        counts: events of each kind, over resumes; like ``events`` they begin anew with a new run.
        verdict: bool ``[]`` on the device, the same on all ranks: the step that is about to be taken has an event whose
            action is ``recover``. It is there when callbacks after this one see ``on_before_optimizer_step``.

    Raises:
        ValueError: an unknown kind or action, or a limit that makes no sense.
        TypeError: a setting is of another type.
    """

    def __init__(
        self,
        action: Action | Mapping[str, Action] = "warn",
        *,
        spike: float | None = 3.0,
        window: int = 10,
        sigmas: float | None = 6.0,
        patience: int = 10,
        drift: float | None = 4.0,
        progress_bar: bool = True,
    ) -> None:
        super().__init__()
        check_flag(progress_bar=progress_bar)
        self.actions = _actions(action)
        self.limits = HealthLimits(spike, window, sigmas, patience, drift)
        self.progress_bar = progress_bar
        self.events: list[HealthEvent] = []
        self.counts: Counter[str] = Counter()
        self.verdict: Tensor | None = None
        self._names: list[str] = []
        self._health: Health | None = None
        self._recover = torch.zeros(len(KINDS), dtype=torch.bool)
        self._observed: Tensor | None = None
        self._spoilt: HealthEvent | None = None
        self._worst: tuple[str, str, float] | None = None
        self._factor: float | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and "recover" in self.actions.values():
            self._recovery(trainer)

    def _recovery(self, trainer: pl.Trainer) -> Any:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks[callbacks.index(self) :]:
            if hasattr(callback, "reject_where"):
                return callback
        raise MisconfigurationException(
            "FP8HealthMonitor with the action 'recover' needs a SkipBatchRecovery after it in the list of callbacks."
        )

    def _forget(self) -> None:
        self.events, self.counts, self._health = [], Counter(), None

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule, telemetry: Telemetry) -> None:
        self._names = list(telemetry.names)
        self._health = Health(telemetry.positions, telemetry.caps(), self.limits, telemetry.device)
        self._recover = torch.tensor([self.actions[kind] == "recover" for kind in KINDS], device=telemetry.device)
        self._observed = self.verdict = self._spoilt = self._worst = self._factor = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The loss scale is loaded by now: gradients of a run that goes on under another are larger or smaller."""
        if self._factor is not None:
            self._running().scale_gradients(loss_factor(trainer) / self._factor)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._factor = loss_factor(trainer)  # For what is saved later.

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        if self._window is None:
            return
        health = self._running()
        if self.telemetry.positions is not health.positions:
            health.set_positions(self.telemetry.positions)
        found, message = health.observe(self._window[..., AMAX], self._window[..., SCALE])
        # Recovery may have taken back what another optimizer's step on the same batch left: it was seen all the same.
        self._observed = message if self._observed is None else health.merge(self._observed, message)
        self.verdict = (health.rejectable(found) & self._recover).any()
        if "recover" in self.actions.values():
            self._recovery(trainer).reject_where(self.verdict)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self.progress_bar and self._worst is not None:
            show_worst_layer(trainer, pl_module, *self._worst, skipped_steps(trainer))

    def _message(self, trainer: pl.Trainer, window: Tensor, outputs: Any) -> Tensor | None:
        observed, self._observed = self._observed, None
        # Lightning counts a step too where the user's own optimizer_step() takes none: this batch is judged with the
        # next step, for its window goes on until then.
        if observed is not None:
            self._running().commit(self.telemetry.kept(window))
        return observed

    def _look(self, trainer: pl.Trainer, message: Tensor, when: When) -> None:
        health = self._running()
        reading = health.unpack(message)
        events = health.events(reading, self._names, when.step)
        new = [event for event in events if not self._continues(event, reading)]
        if all(event.kind != "nonfinite" for event in events):
            self._spoilt = None
        if self.progress_bar and trainer.progress_bar_callback is not None:
            self._worst = self._find_worst(reading)
        if new:
            self._report(trainer, new, when)

    def _continues(self, event: HealthEvent, reading: Reading) -> bool:
        """Whether the event is what a step before has left behind: non-finite weights."""
        if event.kind != "nonfinite":
            return False
        weights = reading.amax[:, ROLES.index("weight")]
        if self._spoilt is not None and not weights.isfinite().all():
            self._spoilt.steps += 1
            return True
        self._spoilt = event
        return False

    def _find_worst(self, reading: Reading) -> tuple[str, str, float] | None:
        """Layer and role, measure and value: the least headroom, or where scales are not stored the steepest amax."""
        data = torch.zeros(*reading.amax.shape, SLOT_SIZE, dtype=torch.float32)
        data[..., AMAX], data[..., SCALE] = reading.amax, reading.scale
        measure, values = (
            "fp8_headroom",
            torch.where(reading.scale > 0, self.telemetry.readout(data).headroom, torch.nan),
        )
        if values.isnan().all():
            measure, values = "amax_ratio", -reading.amax / reading.mean
        values = torch.where(values.isfinite(), values, torch.inf).flatten()
        if not values.numel() or values.min() == torch.inf:
            return self._worst
        place = int(values.argmin())
        name = f"{self._names[place // len(ROLES)]}/{ROLES[place % len(ROLES)]}"
        return name, measure, abs(float(values[place])) if measure == "amax_ratio" else float(values[place])

    def _report(self, trainer: pl.Trainer, new: list[HealthEvent], when: When) -> None:
        self.events = (self.events + new)[-MAX_EVENTS:]
        self.counts.update(event.kind for event in new)
        counts = {f"fp8/health/{kind}": float(self.counts[kind]) for kind in {event.kind for event in new}}
        for logger in trainer.loggers:
            logger.log_metrics(counts, step=when.log_step)
        for event in new:
            action = self.actions[event.kind]
            if action == "log" and trainer.is_global_zero:
                log.info(event.message())
            elif action in ("warn", "recover"):
                rank_zero_warn(event.message())
        for event in new:
            if self.actions[event.kind] == "raise":
                raise FP8HealthError(event)

    def _running(self) -> Health:
        if self._health is None:
            raise RuntimeError("FP8HealthMonitor works inside Trainer.fit only: is it among the Trainer's callbacks?")
        return self._health

    def _state(self) -> dict[str, Any]:
        if self._health is None:
            return {}
        return {
            "loss_factor": self._factor if self._trainer is None else loss_factor(self._trainer),
            "names": list(self._names),
            "health": self._health.state_dict(),
            "events": [event.to_dict() for event in self.events],
            "counts": dict(self.counts),
            "spoilt": self._spoilt is not None,
        }

    def _load(self, state: dict[str, Any]) -> None:
        self._running().load_state_dict(state["health"], rows_of(self._names, state["names"]))
        self._factor = state.get("loss_factor")
        self.events = [HealthEvent.from_dict(values) for values in state["events"]]
        self.counts = Counter(state["counts"])
        nonfinite = [event for event in self.events if event.kind == "nonfinite"]
        self._spoilt = nonfinite[-1] if state["spoilt"] and nonfinite else None


def _actions(action: Action | Mapping[str, Action]) -> dict[Kind, Action]:
    given = dict(action) if isinstance(action, Mapping) else dict.fromkeys(KINDS, action)
    unknown = sorted(map(str, set(given) - set(KINDS)))
    if unknown:
        raise ValueError(f"Unknown kind of event {', '.join(unknown)}: choose among {', '.join(KINDS)}.")
    for value in given.values():
        if value not in get_args(Action):
            raise ValueError(f"Unknown action {value!r}: choose among {', '.join(get_args(Action))}.")
    return {kind: given.get(kind, "warn") for kind in KINDS}  # type: ignore[misc]
