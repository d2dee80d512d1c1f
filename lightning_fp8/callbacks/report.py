"""The story of a run in one HTML page: :class:`FP8Report`."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_fp8.callbacks._directory import check_writable, default_path
from lightning_fp8.callbacks._ending import while_ending
from lightning_fp8.callbacks._layers import LayerCallback, When
from lightning_fp8.checks import check_number, check_path, check_text
from lightning_fp8.files import located, write_text
from lightning_fp8.health import HealthEvent
from lightning_fp8.history import ThinnedHistory, capacity_for, rows_of
from lightning_fp8.recipes import ROLES, Recipe
from lightning_fp8.report.page import Event, Maps, Operand, Page, Series
from lightning_fp8.statistics import SLOT_SIZE
from lightning_fp8.telemetry import Readout, Telemetry, history_entry
from lightning_fp8.version import __version__

PAGE_NAME = "fp8-report.html"

#: Curves: name and unit.
_CURVES = (("Loss", ""), ("Speed", "steps/s"), ("Peak memory", "GiB"))


class FP8Report(LayerCallback):
    """Writes one self-contained HTML page at the end of a run, on an exception and on demand.

    It shows loss, speed and memory, heat maps of headroom and amax, the last reading, the events that
    :class:`~lightning_fp8.FP8HealthMonitor` and :class:`~lightning_fp8.SkipBatchRecovery` saw, the selection with its
    reasons, recipe, versions and machine. It opens without a network, on a phone, by keyboard, in dark and light.
    Values are those of rank 0, which writes it.

    Args:
        path: of the page, or its address where fsspec reaches (``s3://...``); ``None``: ``fp8-report.html`` in the
            Trainer's log directory.
        every_n_steps: optimizer steps between readings.
        history: readings kept, thinned as the run grows.
        max_layers: layers in the page at most: those with the least headroom.
        title: heading of the page.

    Raises:
        ValueError: a number is too small.
        TypeError: a setting is of another type.
        MisconfigurationException: on setup, if the page can be seen not to be writable; what fails at the end is a
            warning.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        every_n_steps: int = 10,
        history: int = 256,
        max_layers: int = 200,
        title: str = "FP8 training report",
    ) -> None:
        super().__init__()
        check_path(path=path)
        check_number(whole=True, least=1, every_n_steps=every_n_steps, max_layers=max_layers)
        check_number(whole=True, least=2, history=history)
        check_text(title=title)
        self.path = located(path) if path is not None else None
        self.every_n_steps = every_n_steps
        self.history = history
        self.max_layers = max_layers
        self.title = title
        self._default_path: Path | str | None = None
        self._names: list[str] = []
        self._layers: ThinnedHistory | None = None
        self._curves = _curves(history)
        self._last: Readout | None = None
        self._clock: tuple[float, int] | None = None
        self._paused = 0.0
        self._pause_began = 0.0
        self._facts: list[tuple[str, str]] = []
        self._decisions: list[Any] = []

    def write(self, trainer: pl.Trainer, path: str | os.PathLike[str] | None = None) -> Path | str:
        """Write the page now; on rank 0, within a fit or after it.

        Args:
            trainer: the run.
            path: of the page; by default that of this callback.

        Returns:
            Where it is.

        Raises:
            RuntimeError: neither has a path, and no fit has begun.
            OSError: the page cannot be written.
        """
        if self._telemetry is not None:
            self.catch_up(trainer)
        return self._write(trainer, f"At step {trainer.global_step}.", failed=False, path=path)

    # Hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self._default_path = default_path(trainer, PAGE_NAME)
        check_writable(trainer, self._place, "Give FP8Report the path of a file that can be.")

    def _forget(self) -> None:
        self._layers, self._last, self._curves = None, None, _curves(self.history)

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule, telemetry: Telemetry) -> None:
        self._names = list(telemetry.names)
        shape = (len(self._names), len(ROLES), 2)
        if self._layers is None or self._layers.shape != shape:
            self._layers = ThinnedHistory(shape, capacity_for(shape, self.history))
        self._clock = None
        self._facts = _facts(trainer, pl_module, telemetry)
        self._decisions = [decision for conversion in telemetry.conversions for decision in conversion.decisions]

    def _due(self, trainer: pl.Trainer) -> bool:
        return self._passes(self.every_n_steps)

    def _message(self, trainer: pl.Trainer, window: Tensor, outputs: Any) -> Tensor:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if not isinstance(loss, Tensor):
            loss = torch.full((), torch.nan, device=window.device)
        # Lightning divides the loss of accumulated batches by their number.
        loss = loss.detach().to(window.device, torch.float32, non_blocking=True) * trainer.accumulate_grad_batches
        return torch.cat((window.flatten(), loss.reshape(1)))

    def _look(self, trainer: pl.Trainer, message: Tensor, when: When) -> None:
        data = message[:-1].view(len(self._names), len(ROLES), SLOT_SIZE)
        self._last = readout = self.telemetry.readout(data)
        if self._layers is not None:
            self._layers.append(when.step, history_entry(readout))
        self._curves.append(when.step, torch.tensor([float(message[-1]), self._speed(when.step), _memory(trainer)]))

    def _speed(self, step: int) -> float:
        """Steps a second since the last reading, evaluation left out."""
        now = time.perf_counter() - self._paused
        before, self._clock = self._clock, (now, step)
        if before is None or now <= before[0] or step <= before[1]:
            return float("nan")
        return (step - before[1]) / (now - before[0])

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pause_began = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._paused += time.perf_counter() - self._pause_began

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        for callback in _others(trainer):
            callback.catch_up(trainer)
        if trainer.is_global_zero and self._place is not None:
            # Callbacks after this one have ends of their own to make.
            with while_ending("FP8Report", "as the fit ends"):
                self._write(trainer, f"Finished at step {trainer.global_step}.", failed=False)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._telemetry is None:
            return
        super().on_exception(trainer, pl_module, exception)
        for callback in _others(trainer):
            with while_ending(type(callback).__name__):
                callback.catch_up(trainer)
        if trainer.is_global_zero and self._place is not None:
            what = f"{type(exception).__name__}: {exception}".rstrip(": ")
            with while_ending("FP8Report"):
                self._write(trainer, f"Stopped at step {trainer.global_step} by {what}", failed=True)

    # The page

    @property
    def _place(self) -> Path | str | None:
        return self.path or self._default_path

    def _write(
        self, trainer: pl.Trainer, state: str, failed: bool, path: str | os.PathLike[str] | None = None
    ) -> Path | str:
        target = located(path) if path is not None else self._place
        if target is None:
            raise RuntimeError(
                "The log directory of a run is known from the beginning of its fit on, and a fast_dev_run writes there "
                "nothing: give a path."
            )
        write_text(target, self._page(trainer, state, failed).html())
        return target

    def _page(self, trainer: pl.Trainer, state: str, failed: bool) -> Page:
        steps, values = self._curves.steps, self._curves.values
        series = [
            Series(name, unit, steps[seen], values[seen, column])
            for column, (name, unit) in enumerate(_CURVES)
            for seen in [slice(None) if column == 0 else values[:, column].isfinite()]
        ]
        rows = self._worst_layers()
        return Page(
            self.title,
            state,
            failed,
            facts=self._facts,
            series=series,
            maps=self._maps(rows),
            events=_events(trainer),
            operands=self._operands(rows),
            decisions=self._decisions,
        )

    def _worst_layers(self) -> list[int]:
        """Rows of the layers that have room in the page, in the order of registration."""
        rows = list(range(len(self._names)))
        if self._last is None or len(rows) <= self.max_layers:
            return rows
        least = self._last.headroom.nan_to_num(torch.inf, torch.inf).amin(1)
        return sorted(least.argsort(stable=True)[: self.max_layers].tolist())

    def _maps(self, rows: list[int]) -> Maps | None:
        if self._layers is None or not len(self._layers):
            return None
        values = self._layers.values[:, rows]
        names = [self._names[row] for row in rows]
        return Maps(names, self._layers.steps, values[..., 0], values[..., 1], len(self._names) - len(rows))

    def _operands(self, rows: list[int]) -> list[Operand]:
        if self._last is None:
            return []
        parts = [part.tolist() for part in self._last]
        operands = [
            Operand(self._names[row], role, *(part[row][column] for part in parts))
            for row in rows
            for column, role in enumerate(ROLES)
            if not parts[0][row][column] < 0
        ]
        return sorted(operands, key=lambda o: o.headroom if o.headroom == o.headroom else float("inf"))

    def _state(self) -> dict[str, Any]:
        if self._layers is None:
            return {}
        return {"names": list(self._names), "layers": self._layers.state_dict(), "curves": self._curves.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self._curves.load_state_dict(state["curves"])
        if self._layers is not None:
            self._layers.load_state_dict(state["layers"], rows_of(self._names, state["names"]))


def _curves(wished: int) -> ThinnedHistory:
    return ThinnedHistory((len(_CURVES),), capacity_for((len(_CURVES),), wished))


def _others(trainer: pl.Trainer) -> list[LayerCallback]:
    """Monitors whose last reading may still be on its way: what it tells belongs into the page."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [c for c in callbacks if isinstance(c, LayerCallback) and not isinstance(c, FP8Report)]


def _events(trainer: pl.Trainer) -> list[Event]:
    """What other callbacks saw, in the order of steps."""
    events = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        seen = getattr(callback, "events", None)
        for line in getattr(seen, "recent", []):
            details = ", ".join(f"{key} {value}" for key, value in line.items() if key not in ("event", "step"))
            events.append(Event(int(line.get("step", 0)), line["event"], details))
        if isinstance(seen, list):
            events += [Event(e.step, e.kind, e.message()) for e in seen if isinstance(e, HealthEvent)]
    return sorted(events, key=lambda event: event.step)


def _memory(trainer: pl.Trainer) -> float:
    """Peak memory of the device, or of the process on a CPU, in GiB."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
    except ImportError:  # Windows
        return float("nan")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def _facts(trainer: pl.Trainer, pl_module: pl.LightningModule, telemetry: Telemetry) -> list[tuple[str, str]]:
    device = trainer.strategy.root_device
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    recipes = list(dict.fromkeys(_with_defaults(conversion.recipe) for conversion in telemetry.conversions))
    backends = list(
        dict.fromkeys(f"{c.backend!r}, {c.support.kind} ({c.support.reason})" for c in telemetry.conversions)
    )
    # Lazy layers have no sizes before the first batch.
    parameters = sum(p.numel() for p in pl_module.parameters() if not is_lazy(p))
    return [
        ("Recipe", "; ".join(recipes) or "none: nothing runs in FP8"),
        ("Backend", "; ".join(backends) or "none"),
        ("Model", f"{type(pl_module).__name__}, {parameters:,} parameters"),
        ("Precision", str(trainer.precision)),
        ("Strategy", f"{type(trainer.strategy).__name__}, {trainer.world_size} process(es)"),
        ("Machine", f"{machine}, {platform.system()} {platform.release()}"),
        (
            "Versions",
            f"lightning_fp8 {__version__}, torch {torch.__version__}, lightning {lightning.__version__}, "
            f"Python {platform.python_version()}",
        ),
        ("Began", time.strftime("%Y-%m-%d %H:%M:%S %Z")),
    ]


def _with_defaults(recipe: Recipe) -> str:
    return f"{type(recipe).__name__}({', '.join(f'{name}={value!r}' for name, value in recipe.settings().items())})"
