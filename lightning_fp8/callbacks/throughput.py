"""Speed and cost of a run: :class:`FP8Throughput`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_fp8.batches import tensors_of
from lightning_fp8.checks import check_function, check_number
from lightning_fp8.eager import run_eagerly
from lightning_fp8.model import conversions
from lightning_fp8.tuning.flops import Flops, StepFlops
from lightning_fp8.tuning.peaks import Peak, peak_of

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.uint16)


class FP8Throughput(Callback):
    """Logs tokens or samples per second, TFLOP/s, MFU and what a billion tokens cost.

    Every ``every_n_steps`` optimizer steps, to all loggers, under ``throughput/``:

    - ``tokens_per_second`` or ``samples_per_second``: of all devices (each data-parallel rank is taken to have batches
      of the same size), ``..._per_device`` of one, and ``steps_per_second``.
    - ``tflops_per_device``: model FLOPs a second.
    - ``mfu``: the least time that the device's dense peaks allow for these FLOPs, those of FP8 layers at the FP8 peak
      and all others at the bf16 peak, over the time they took. GPUs with known peaks only.
    - ``cost_per_billion_tokens`` (or ``..._samples``), where a price is given.

    Time is taken on the device by events that are read a batch later: no step waits. Validation does not count, nor
    does the first step, which compiles.

    Args:
        every_n_steps: optimizer steps between readings; ``None``: the Trainer's ``log_every_n_steps``.
        unit: what is counted: ``"tokens"`` are the numbers in the first integer tensor with two dimensions in a batch,
            ``"samples"`` the first dimension of its first tensor; ``"auto"``: tokens where there is such a tensor.
        count: ``count(batch)``: units in one batch on this device, instead.
        flops: ``flops(batch)``: FLOPs of one batch on this device, forward and backward, as one number (taken as high
            precision) or as ``(fp8, high)``. By default they are counted in the first batch of a run, for which
            compiled modules run eagerly; batches of other sizes count in proportion to their units.
        peak: dense peaks of the device in TFLOP/s, ``(bf16, fp8)``; by default from the GPU's name.
        price_per_device_hour: of one device, in any currency.

    Attributes:
        metrics: the last reading.

    Raises:
        ValueError: a number is not positive and finite, or the unit is unknown.
        TypeError: a setting is of another type.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        unit: Literal["auto", "tokens", "samples"] = "auto",
        count: Callable[[Any], int] | None = None,
        flops: Callable[[Any], float | tuple[float, float]] | None = None,
        peak: tuple[float, float] | None = None,
        price_per_device_hour: float | None = None,
    ) -> None:
        check_number(whole=True, none=True, least=1, every_n_steps=every_n_steps)
        check_number(none=True, price_per_device_hour=price_per_device_hour)
        if price_per_device_hour is not None and not 0 < price_per_device_hour < math.inf:
            raise ValueError(f"price_per_device_hour must be positive and finite, got {price_per_device_hour!r}.")
        check_function("a batch", count=count, flops=flops)
        if peak is not None:
            _check_peak(peak)
        if unit not in ("auto", "tokens", "samples"):
            raise ValueError(f"unit must be 'auto', 'tokens' or 'samples', got {unit!r}.")
        if unit == "auto" and count is not None:
            raise ValueError("count needs a unit: unit='tokens' or unit='samples'.")
        self.every_n_steps = every_n_steps
        self.unit = unit
        self.count = count
        self.flops = flops
        self.peak = peak
        self.price_per_device_hour = price_per_device_hour
        self.metrics: dict[str, float] = {}
        self._counted: tuple[Flops, int] | None = None
        self._counted_for: int | None = None
        self._loaded: dict[str, Any] | None = None
        self._counting: tuple[StepFlops, Callable[[], None]] | None = None
        self._begin_run()

    def _begin_run(self) -> None:
        self._clock = _Clock(torch.device("cpu"))
        self._unit: str = self.unit
        self._units = 0
        self._warned = False
        self._done = Flops(0.0, 0.0)
        self._start_step = 0
        self._first_step: int | None = None
        self._pending: tuple[list[tuple[Any, Any]], dict[str, float], Flops, int] | None = None

    # Hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._loaded = None  # An evaluation may have loaded another run's.
            if trainer.global_step == 0:
                self._counted, self.metrics = None, {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin_run()
        self._clock = _Clock(trainer.strategy.root_device)
        self._start_step = trainer.global_step
        if self._counted_for != id(pl_module):
            self._counted = None
        self._counted_for = id(pl_module)
        saved, self._loaded = self._loaded, None
        if saved is not None:
            self._counted = Flops(saved["fp8"], saved["high"]), saved["units"]

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._stop_counting()
        if self.flops is None and self._counted is None:
            counter = StepFlops(*_converted_layers(pl_module))
            self._counting = counter, run_eagerly(pl_module)
            counter.__enter__()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        # What follows is none of the model's, such as the products of an optimizer. In manual optimization another
        # forward may come.
        if self._counting is not None and pl_module.automatic_optimization:
            self._counting[0].stop()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._read(trainer)
        units = self._units_of(batch)
        flops = self._stop_counting()
        # Where training_step returned None the batch was left out, perhaps before its forward: the next one counts.
        if flops is not None and (outputs if pl_module.automatic_optimization else any(flops)):
            self._counted = flops, max(units, 1)
        if trainer.global_step == self._start_step:
            return  # Gradients of the first step still accumulate.
        if self._first_step is None:
            self._first_step = trainer.global_step
            self._clock.start()
            return
        self._units += units
        done = self._flops_of(batch, units)
        self._done = Flops(self._done.fp8 + done.fp8, self._done.high + done.high)
        steps = trainer.global_step - self._first_step
        every: int = self.every_n_steps or max(trainer.log_every_n_steps, 1)  # type: ignore[attr-defined]
        if steps >= every:
            self._clock.stop()
            numbers = {"units": float(self._units), "steps": float(steps), "replicas": float(_replicas(trainer))}
            log_step = trainer.fit_loop.epoch_loop._batches_that_stepped
            self._pending = (self._clock.take(), numbers, self._done, log_step)
            self._units, self._done, self._first_step = 0, Flops(0.0, 0.0), trainer.global_step
            self._clock.start()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._clock.stop()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._first_step is not None:
            self._clock.start()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_counting()  # The epoch may have been left as its first batch began.

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._read(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop_counting()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop_counting()

    def state_dict(self) -> dict[str, Any]:
        # A resumed run does not count again: its first batch runs compiled, as it did in the run that goes on.
        if self._counted is None:
            return self._loaded or {}
        flops, units = self._counted
        return {"fp8": flops.fp8, "high": flops.high, "units": units}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict or None

    # How

    def _stop_counting(self) -> Flops | None:
        """What was counted, if counting was on."""
        counting, self._counting = self._counting, None
        if counting is None:
            return None
        counter, end_eager = counting
        counter.stop()
        end_eager()
        return counter.flops

    def _units_of(self, batch: Any) -> int:
        if self.count is not None:
            return int(self.count(batch))
        tensors = [tensor for tensor in tensors_of(batch) if tensor.ndim]
        tokens = next((t for t in tensors if t.ndim == 2 and t.dtype in _INTEGERS), None)
        if self._unit == "auto":
            self._unit = "tokens" if tokens is not None else "samples"
        if self._unit == "tokens" and tokens is not None:
            return tokens.numel()
        if self._unit == "samples" and tensors:
            return tensors[0].shape[0]
        if not self._warned:
            self._warned = True
            rank_zero_warn(
                f"FP8Throughput finds no {self._unit} in a batch of type {type(batch).__name__}, and leaves out "
                f"what follows from them: give unit={self._unit!r} and count=, a function that counts them."
            )
        return 0

    def _flops_of(self, batch: Any, units: int) -> Flops:
        if self.flops is not None:
            given = self.flops(batch)
            return Flops(*given) if isinstance(given, tuple) else Flops(0.0, float(given))
        if self._counted is None:
            return Flops(0.0, 0.0)
        flops, of = self._counted
        return Flops(flops.fp8 * units / of, flops.high * units / of)

    def _read(self, trainer: pl.Trainer) -> None:
        """Look at the interval that ended with the batch before, and log it."""
        if self._pending is None:
            return
        (spans, numbers, flops, step), self._pending = self._pending, None
        seconds = self._clock.seconds(spans)
        if seconds <= 0:
            return
        per_device = numbers["units"] / seconds
        whole = per_device * numbers["replicas"]
        metrics = {"steps_per_second": numbers["steps"] / seconds}
        if whole:
            metrics[f"{self._unit}_per_second"] = whole
            metrics[f"{self._unit}_per_second_per_device"] = per_device
        if sum(flops):
            metrics["tflops_per_device"] = sum(flops) / seconds / 1e12
            peak = self._peak(trainer)
            if peak is not None:
                metrics["mfu"] = peak.ideal_seconds(*flops) / seconds
        if self.price_per_device_hour is not None and whole:
            hours = 1e9 / whole / 3600
            metrics[f"cost_per_billion_{self._unit}"] = hours * trainer.world_size * self.price_per_device_hour
        self.metrics = {f"throughput/{name}": value for name, value in metrics.items()}
        for logger in trainer.loggers if trainer.is_global_zero else []:
            logger.log_metrics(self.metrics, step=step)

    def _peak(self, trainer: pl.Trainer) -> Peak | None:
        if self.peak is not None:
            return Peak(*self.peak, bandwidth=float("nan"))
        device = trainer.strategy.root_device
        return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def _check_peak(peak: Any) -> None:
    if not isinstance(peak, (tuple, list)) or len(peak) != 2:
        raise TypeError(f"peak must be two numbers in TFLOP/s, (bf16, fp8), or None, got {peak!r}.")
    bf16, fp8 = peak
    check_number(**{"peak of bf16": bf16, "peak of fp8": fp8})
    if not all(0 < rate < math.inf for rate in peak):
        raise ValueError(f"peak must be two positive and finite numbers in TFLOP/s, (bf16, fp8), got {peak!r}.")


class _Clock:
    """Spans of time on a device, read when they are over: CUDA events, or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[Any, Any]] = []
        self._begin: Any = None

    def start(self) -> None:
        """A span begins, if none runs."""
        if self._begin is None:
            self._begin = self._now()

    def stop(self) -> None:
        """The span that runs, if one does, ends."""
        if self._begin is not None:
            self._spans.append((self._begin, self._now()))
            self._begin = None

    def take(self) -> list[tuple[Any, Any]]:
        """The spans so far; the clock keeps none of them."""
        spans, self._spans = self._spans, []
        return spans

    def seconds(self, spans: list[tuple[Any, Any]]) -> float:
        """Their length; waits for the last event."""
        if self._device.type != "cuda":
            return float(sum(end - begin for begin, end in spans))
        for _, end in spans:
            end.synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in spans)) / 1e3

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _converted_layers(model: nn.Module) -> tuple[list[nn.Linear], list[nn.Linear]]:
    """The layers that multiply on FP8 tensor cores, and those that emulate it in high precision."""
    kinds = {id(state): c.support.kind for c in conversions(model) for state in c.runtime.states}
    native: list[nn.Linear] = []
    emulated: list[nn.Linear] = []
    for module in model.modules():
        kind = kinds.get(id(module.__dict__.get("fp8")))
        if isinstance(module, nn.Linear) and kind is not None:
            (native if kind == "native" else emulated).append(module)
    return native, emulated


def _replicas(trainer: pl.Trainer) -> int:
    """How many ranks have batches of their own: under tensor parallelism fewer than there are devices."""
    sampler: dict[str, Any] = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return int(sampler.get("num_replicas", 1))
