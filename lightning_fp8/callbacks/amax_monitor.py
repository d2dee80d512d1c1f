"""Every layer's numbers, in any logger: :class:`AmaxMonitor`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lightning_fp8.callbacks._layers import LayerCallback, When
from lightning_fp8.checks import as_patterns, check_flag, check_number
from lightning_fp8.history import ThinnedHistory, capacity_for, rows_of
from lightning_fp8.operand_statistics import OperandStatistics
from lightning_fp8.recipes import ROLES, Recipe, get_recipe
from lightning_fp8.report.colors import color_range, heat_map
from lightning_fp8.statistics import SLOT_SIZE
from lightning_fp8.telemetry import Readout, Telemetry, history_entry

#: Places in an entry of the history.
_AMAX, _HEADROOM = 0, 1


class AmaxMonitor(LayerCallback):
    """Logs amax, scale and headroom of every linear layer and role, FP8 or not.

    The values of a step come to the host in one copy, a batch later. Names are those of Transformer Engine's debug
    tools: ``fp8/<layer>/<role>/amax``; extremes over all layers are ``fp8/<role>/amax_max`` and
    ``fp8/<role>/headroom_min``. *Headroom* is the number of powers of two between the scaled amax and the format's
    largest value; below zero, values were clamped. TensorBoard gets histograms over the layers too, and heat maps of
    layers x steps. Values are those of rank 0 (delayed scaling's scales are common to all).

    The extra statistics of a cast (``underflows%``, ``overflows%``, ``mse``, ``sqnr`` in decibels, ``scale_inv_min``,
    ``scale_inv_max``) cost a second cast of every operand. They run only in the steps chosen for them, in which
    compiled code runs eagerly so that the operands can be seen; nothing is compiled again.

    Args:
        every_n_steps: optimizer steps between readings; ``None``: the Trainer's ``log_every_n_steps``.
        layers: shell patterns on qualified names; ``None``: all layers.
        statistics_every_n_steps: optimizer steps between the extra statistics, a multiple of ``every_n_steps``;
            ``None``: never.
        what_if: recipes whose statistics are told too, as ``fp8/<layer>/<role>/<recipe>/mse``, with scales from the
            data at hand (``static``: with its own); for layers in high precision as well. A second recipe of the same
            name is called ``<recipe>_2``.
        sample_rows: statistics compare about this many rows of an operand (its scale comes from all); ``None``: all.
        start_step: first optimizer step that is looked at.
        end_step: the step before which looking ends; ``None``: never.
        per_layer: log a scalar for every layer and role, not just the extremes.
        picture_every: readings between TensorBoard's histograms and heat maps, which are drawn at the end too;
            ``None``: no pictures.
        history: readings kept in memory and in the checkpoint for the heat map, thinned as the run grows.

    Attributes:
        history: ``history.steps``, int64 ``[n]``, and ``history.values``, fp32 ``[n, layers, 3, 2]``: log2(amax) and
            headroom, NaN where there is nothing to tell, Inf where not finite. It goes on over resumes, and begins anew
            with a new run; ``None`` before the first fit.

    Raises:
        ValueError: a number makes no sense, or ``what_if`` without steps for statistics.
        TypeError: a setting is of another type.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        layers: Sequence[str] | str | None = None,
        statistics_every_n_steps: int | None = None,
        what_if: Sequence[Recipe | dict[str, Any] | str] = (),
        sample_rows: int | None = 4096,
        start_step: int = 0,
        end_step: int | None = None,
        per_layer: bool = True,
        picture_every: int | None = 10,
        history: int = 256,
    ) -> None:
        super().__init__()
        check_number(
            whole=True,
            none=True,
            least=1,
            every_n_steps=every_n_steps,
            statistics_every_n_steps=statistics_every_n_steps,
            sample_rows=sample_rows,
            end_step=end_step,
            picture_every=picture_every,
        )
        check_number(whole=True, least=0, start_step=start_step)
        check_number(whole=True, least=2, history=history)
        check_flag(per_layer=per_layer)
        if statistics_every_n_steps is not None and statistics_every_n_steps % (every_n_steps or 1):
            raise ValueError(
                f"statistics_every_n_steps is {statistics_every_n_steps}: give a multiple of every_n_steps "
                f"({every_n_steps}), or None for no extra statistics."
            )
        if end_step is not None and end_step <= start_step:
            raise ValueError(
                f"end_step is {end_step}: give a step after start_step ({start_step}), or None for no end."
            )
        recipes = _recipes(what_if)
        if recipes and statistics_every_n_steps is None:
            raise ValueError("what_if needs steps in which to look: set statistics_every_n_steps.")
        self.every_n_steps = every_n_steps
        self.layers = as_patterns("layers", layers) if layers is not None else None
        self.statistics_every_n_steps = statistics_every_n_steps
        self.what_if = recipes
        self.sample_rows = sample_rows
        self.start_step, self.end_step = start_step, end_step
        self.per_layer, self.picture_every = per_layer, picture_every
        self.history_capacity = history
        self.history: ThinnedHistory | None = None
        self._names: list[str] = []
        self._rows: list[int] = []
        self._statistics: OperandStatistics | None = None
        self._statistics_of: int | None = None
        self._readings = 0
        self._undrawn: tuple[Readout, int] | None = None

    @property
    def state_key(self) -> str:
        # Several may look at different layers, or at different steps.
        statistics = self.statistics_every_n_steps
        return self._generate_state_key(layers=self.layers, every_n_steps=self.every_n_steps, statistics=statistics)

    def _forget(self) -> None:
        self.history = None

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule, telemetry: Telemetry) -> None:
        self._rows = telemetry.select(self.layers)
        self._names = [telemetry.names[row] for row in self._rows]
        shape = (len(self._rows), len(ROLES), 2)
        if self.history is None or self.history.shape != shape:
            self.history = ThinnedHistory(shape, capacity_for(shape, self.history_capacity))
        self._statistics_of, self._readings, self._undrawn = None, 0, None
        if self.statistics_every_n_steps is not None:
            self._statistics = OperandStatistics(pl_module, telemetry, self._rows, self.what_if, self.sample_rows)

    def _due(self, trainer: pl.Trainer) -> bool:
        interval = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        return self._chosen(interval) or self._chosen(self.statistics_every_n_steps)

    def _chosen(self, interval: int | None) -> bool:
        step = self._started or 0
        if not interval or step < self.start_step or (self.end_step is not None and step >= self.end_step):
            return False
        return self._passes(interval, self.start_step)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        # Of accumulated batches the first is looked at.
        new = self._started != self._statistics_of
        if self._statistics is not None and new and self._chosen(self.statistics_every_n_steps):
            self._statistics_of = self._started
            self._statistics.begin()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._statistics is not None:
            self._statistics.end()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._statistics is not None and self._statistics.running:
            # The epoch was left as a batch began: its step is still to come.
            self._statistics.end()
            self._statistics_of = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._statistics is not None:
            self._statistics.end()
        super().on_exception(trainer, pl_module, exception)

    def _message(self, trainer: pl.Trainer, window: Tensor, outputs: Any) -> Tensor:
        if self._statistics is None or self._statistics_of != self._started:
            return window.flatten()
        return torch.cat((window.flatten(), self._statistics.values.flatten()))

    def _look(self, trainer: pl.Trainer, message: Tensor, when: When) -> None:
        telemetry = self.telemetry
        size = len(telemetry.names) * len(ROLES) * SLOT_SIZE
        data = message[:size].view(len(telemetry.names), len(ROLES), SLOT_SIZE)
        readout = Readout(*(part[self._rows] for part in telemetry.readout(data)))
        if self.history is not None:
            self.history.append(when.step, history_entry(readout))
        if not trainer.loggers or not trainer.is_global_zero:
            return
        scalars = _extremes(readout)
        if self.per_layer:
            scalars |= _scalars(self._names, readout)
            if message.numel() > size and self._statistics is not None:
                scalars |= self._statistics.scalars(message[size:])
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=when.log_step)
        self._undrawn = (readout, when.log_step)
        if self.picture_every is not None and self._readings % self.picture_every == 0:
            self._draw_all(trainer)
        self._readings += 1

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._draw_all(trainer)

    def _draw_all(self, trainer: pl.Trainer) -> None:
        if self._undrawn is None or self.picture_every is None:
            return
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                self._draw(logger.experiment, *self._undrawn)
        self._undrawn = None

    def _draw(self, writer: Any, readout: Readout, step: int) -> None:
        entry = history_entry(readout)
        for column, role in enumerate(ROLES):
            for name, index in (("amax_log2", _AMAX), ("headroom", _HEADROOM)):
                values = entry[:, column, index]
                if values.isfinite().any():
                    writer.add_histogram(f"fp8/{role}/{name}", values[values.isfinite()], step)
            if self.history is not None and len(self.history):
                maps = self.history.values[:, :, column]
                for name, index in (("amax_log2", _AMAX), ("headroom", _HEADROOM)):
                    finite = maps[..., index][maps[..., index].isfinite()]
                    if finite.numel():
                        picture = heat_map(maps[..., index], *color_range(finite, index == _HEADROOM))
                        writer.add_image(f"fp8/{role}/{name}", picture.numpy(), step, dataformats="HWC")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._statistics is not None:
            self._statistics.end()
            self._statistics = None
        super().teardown(trainer, pl_module, stage)

    def _state(self) -> dict[str, Any]:
        if self.history is None:
            return {}
        return {"names": list(self._names), "history": self.history.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        if self.history is not None:
            self.history.load_state_dict(state["history"], rows_of(self._names, state["names"]))


def _recipes(what_if: Any) -> list[Recipe]:
    if not isinstance(what_if, Iterable) or isinstance(what_if, (str, Mapping)):
        raise TypeError(f"what_if must be a list of recipes, got {what_if!r}.")
    try:
        return [get_recipe(recipe) for recipe in what_if]
    except (TypeError, ValueError) as error:
        raise type(error)(f"what_if is {what_if!r}: {error}") from error


def _extremes(readout: Readout) -> dict[str, float]:
    scalars = {}
    for column, role in enumerate(ROLES):
        amax, headroom = readout.amax[:, column], readout.headroom[:, column]
        if amax.numel() and not (amax < 0).all():
            scalars[f"fp8/{role}/amax_max"] = float(amax.max())
        if not headroom.isnan().all():
            scalars[f"fp8/{role}/headroom_min"] = float(headroom.nan_to_num(torch.inf, torch.inf).min())
    return scalars


def _scalars(names: Sequence[str], readout: Readout) -> dict[str, float]:
    scalars = {}
    for statistic, part in zip(Readout._fields, readout, strict=True):
        for name, row in zip(names, part.tolist(), strict=True):
            for role, value in zip(ROLES, row, strict=True):
                # NaN: there is none; but an amax that is NaN is one.
                if value == value if statistic != "amax" else not value < 0:
                    scalars[f"fp8/{name}/{role}/{statistic}"] = value
    return scalars
