"""A bad batch never ends a run: :class:`SkipBatchRecovery`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer

from lightning_fp8.callbacks._caught_steps import CaughtSteps
from lightning_fp8.callbacks._guarded_saves import collect_again, guard_saves_of_weights_only
from lightning_fp8.callbacks._held_schedules import HeldSchedules
from lightning_fp8.callbacks._logged_metrics import LoggedMetrics
from lightning_fp8.callbacks._samples import sample_indices
from lightning_fp8.loss_scaling import LossScaler
from lightning_fp8.recovery.errors import RecoveryExhausted, SkipBatchException
from lightning_fp8.recovery.events import EventLog, read_events, rejected_batches
from lightning_fp8.recovery.guard import Mode, Outcome, StepGuard
from lightning_fp8.recovery.ladder import Ladder, LadderSettings
from lightning_fp8.recovery.snapshot import Snapshots
from lightning_fp8.recovery.verdict import Finding, Thresholds
from lightning_fp8.settings import FP8Settings

__all__ = ["RecoveryExhausted", "SkipBatchException", "SkipBatchRecovery"]

LOG_NAME = "recovery.jsonl"
LAST_GOOD_NAME = "last-good.ckpt"


class SkipBatchRecovery(Callback):
    """Judges every step before the optimizer takes it, and recovers from bad ones.

    A step is bad if a loss, gradient or FP8 operand is not finite, or if loss or gradient norm is a spike against the
    steps accepted before. All ranks decide alike. A bad step is skipped and leaves no trace: weights, optimizer state,
    FP8 history, BatchNorm statistics, logged means stay as they were. If bad steps go on, recovery climbs a ladder:
    skip, put the guilty layers into bf16 for a while, go back to the last good state and on with later data, stop.
    ``trainer.global_step`` and ``max_steps`` count attempts.

    Args:
        spike: loss or gradient norm this many robust sigmas above the median of accepted steps is bad; None: never.
        window: accepted steps that the median is taken over.
        warmup: accepted steps before a spike can be called.
        floor: sigma is at least this fraction of the median.
        amax_jump: an FP8 operand's amax this many times its last is bad; None: never.
        mode: ``"exact"`` reads one flag on the host each step. ``"fast"`` leaves it on the device, for fused
            optimizers; the host learns of a skip with the next step, so the learning-rate schedule and other people's
            EMA callbacks advance in skipped steps too. ``"auto"`` is fast where every optimizer is fused and no loss
            scaler is used.
        hold_schedule: learning-rate schedules stepped each batch stand still in skipped steps. None: in exact mode.
        skips: bad steps in a row that are just skipped.
        retry: first try the same batch once more with the guilty layers in bf16 (exact, automatic optimization).
        fallbacks: times an episode may put guilty layers into bf16; 0: never.
        fallback_steps: accepted steps that a layer then stays there.
        fallback_backoff: factor on that time with each further fallback of the same layer.
        rewinds: times an episode may go back to the last good state; 0: never.
        snapshot_every: steps between copies of the state to host memory; None: no copies (and no rewinds).
        relearn: spikes (not NaNs) that outlast all that are taken for the curve's new shape instead of stopping.
        calm: accepted steps in a row that end an episode.
        skip_batches: (epoch, batch index) pairs to leave out, or the path of an event log: those rejected there.
        log: path of the event log; ``"auto"``: ``recovery.jsonl`` in the Trainer's log directory; None: none.

    Raises:
        ValueError: where a setting makes no sense, or settings contradict each other.
    """

    def __init__(
        self,
        *,
        spike: float | None = 10.0,
        window: int = 128,
        warmup: int = 32,
        floor: float = 0.1,
        amax_jump: float | None = 1000.0,
        mode: Mode = "auto",
        hold_schedule: bool | None = None,
        skips: int = 3,
        retry: bool = False,
        fallbacks: int = 2,
        fallback_steps: int = 200,
        fallback_backoff: float = 2.0,
        rewinds: int = 2,
        snapshot_every: int | None = 100,
        relearn: bool = True,
        calm: int = 100,
        skip_batches: Iterable[tuple[int, int]] | str | os.PathLike[str] = (),
        log: str | os.PathLike[str] | None = "auto",
    ) -> None:
        self.thresholds = Thresholds(spike, window, warmup, floor, amax_jump)
        self.ladder = Ladder(LadderSettings(skips, fallbacks, fallback_steps, fallback_backoff, rewinds, relearn, calm))
        if mode not in ("auto", "fast", "exact"):
            raise ValueError(f"mode is {mode!r}: choose 'auto', 'fast' or 'exact'.")
        if mode == "fast" and hold_schedule:
            raise ValueError("hold_schedule needs the verdict on the host before the step: choose mode='exact'.")
        if mode == "fast" and retry:
            raise ValueError("retry needs the verdict on the host before the step: choose mode='exact'.")
        if snapshot_every is not None and snapshot_every < 1:
            raise ValueError(f"snapshot_every is {snapshot_every}: give a number of steps, or None for no snapshots.")
        if rewinds and snapshot_every is None:
            raise ValueError("There is no rewind without snapshots: set snapshot_every, or rewinds=0.")
        # What only exact mode can do makes 'auto' exact.
        self.mode: Mode = "exact" if mode == "auto" and (hold_schedule or retry) else mode
        self.hold_schedule, self.retry, self.snapshot_every = hold_schedule, retry, snapshot_every
        self.skip_batches = _batches(skip_batches)
        self.log_path = log
        self.events = EventLog()
        self.guard: StepGuard | None = None
        self.snapshots: Snapshots | None = None
        self._metrics = LoggedMetrics()
        self._batches: list[int] = []
        self._decided = False
        self._schedules = HeldSchedules()
        self._loaded: dict[str, Any] | None = None
        self._batch: Any = None
        self._known: list[Outcome] = []
        self._rejection: Tensor | bool = False
        self._releases: list[Callable[[], None]] = []
        self._ended = False

    # For the user's training_step

    def reject(self, loss: Tensor) -> Tensor:
        """Return this from ``training_step`` instead of ``loss`` to leave the batch out, on any subset of ranks."""
        return self._running().reject(loss)

    def observe(self, loss: Tensor) -> None:
        """In manual optimization: tell of a loss whose backward does not go through ``manual_backward``."""
        self._running().observe(loss)

    def reject_where(self, flag: Tensor) -> None:
        """For monitors, in ``on_before_optimizer_step`` before this callback's: the step is bad where ``flag`` is True.

        Args:
            flag: bool ``[]`` on the device.
        """
        self._running().reject_where(flag)

    @property
    def accepted(self) -> bool | None:
        """Whether the last optimizer step was taken; None where that is not known yet (fast mode).

        In manual optimization, step schedulers and averages only where it is not False.
        """
        return self._running().accepted

    def _running(self) -> StepGuard:
        if self.guard is None:
            raise RuntimeError("SkipBatchRecovery works inside Trainer.fit only: is it among the Trainer's callbacks?")
        return self.guard

    # Hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._loaded, self._ended = None, False
        if "DeepSpeed" in type(trainer.strategy).__name__:
            raise MisconfigurationException(
                "DeepSpeed's engine steps by itself, so that SkipBatchRecovery cannot keep it from a bad step: "
                "use DDP or ModelParallelStrategy."
            )
        if self.retry and (trainer.accumulate_grad_batches > 1 or not pl_module.automatic_optimization):
            raise MisconfigurationException(
                "retry=True repeats training_step for one batch: it needs automatic optimization, and no "
                "accumulate_grad_batches."
            )
        self._releases = [
            CaughtSteps(trainer, pl_module, self._leave_out).release,
            guard_saves_of_weights_only(pl_module, lambda: self._doubtful() and self._go_back_before_a_save(trainer)),
        ]
        path = self.log_path
        if path == "auto":
            path = os.path.join(trainer.log_dir or trainer.default_root_dir, LOG_NAME)
        self.events.path = Path(path) if path is not None else None
        self.events.writes = trainer.is_global_zero

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        scaler = _loss_scaler(trainer)
        self.guard = guard = StepGuard(pl_module, trainer.optimizers, self.thresholds, self.mode, scaler)
        if self._loaded is not None:
            guard.load_state_dict(self._loaded["guard"])
            self.ladder.load_state_dict(self._loaded["ladder"])
            self.events.load_state_dict(self._loaded["events"])
            self._loaded = None
        guard.fp8.set_enabled(self.ladder.fallen, False)
        if self.snapshot_every is not None:
            others: dict[str, Any] = {f"statistics.{i}": judge.statistics for i, judge in enumerate(guard.judges)}
            others["fp8"] = guard.fp8
            others |= {f"scheduler.{i}": config.scheduler for i, config in enumerate(trainer.lr_scheduler_configs)}
            self.snapshots = Snapshots(pl_module, trainer.optimizers, others)
            self.snapshots.capture(trainer.global_step)
            self.snapshots.promote()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # An epoch that somebody ended early left its last step open.
        self._batches = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        guard = self._running()
        self._schedules.before_batch()
        if not self._batches:
            guard.begin()
            self._metrics.remember(trainer, pl_module)
        self._batches.append(batch_idx)
        self._batch = batch
        guard.observe_batch(batch)
        if (trainer.current_epoch, batch_idx) in self.skip_batches:
            guard.reject_step()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._running().observe(loss)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        guard = self._running()
        if self.snapshots is not None:
            self.snapshots.before_optimizer_step()
        context = {"epoch": trainer.current_epoch, "step": trainer.global_step, "batches": list(self._batches)}
        accepted = guard.decide(optimizer, **context)
        if accepted is False and self.retry:
            accepted = self._try_again(trainer, pl_module, optimizer, context)
        self._decided = True
        self._rejection = self._rejection | (guard.flag if accepted is None else not accepted)
        if accepted is False and self.hold_schedule is not False:
            self._schedules.hold(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        guard = self._running()
        self._batch = None
        if not self._decided:
            return
        self._metrics.restore(trainer, self._rejection)
        self._decided, self._rejection, self._batches = False, False, []
        self._schedules.after_batch()
        known, self._known = self._known + guard.outcomes(everything=False), []
        for outcome in known:
            if outcome.finding is None:
                self._accepted(trainer, outcome)
            elif self._rejected(trainer, outcome, outcome.finding):
                break
        due = self.snapshots is not None and trainer.global_step % (self.snapshot_every or 1) == 0
        if due and self.snapshots is not None and not self.ladder.in_a_row:
            self.snapshots.capture(trainer.global_step)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for release in self._releases:
            release()
        self._releases = []

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for outcome in self._running().outcomes():
            if outcome.finding is not None:
                self._write(trainer, outcome, outcome.finding, "skip")
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self.guard is not None:
            self._ended = True
            self.events.add("exception", step=trainer.global_step, kind=type(exception).__name__, text=str(exception))
            self._close()

    def state_dict(self) -> dict[str, Any]:
        if self.guard is None:
            return {}
        return {
            "guard": self.guard.state_dict(),
            "ladder": self.ladder.state_dict(),
            "events": self.events.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict or None

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self.guard is None:
            return
        if self._doubtful():
            if self._go_back_before_a_save(trainer):
                collect_again(trainer, self, checkpoint)
        elif self.snapshots is not None:
            self.snapshots.capture(trainer.global_step)

    def _doubtful(self) -> bool:
        """Whether the weights may be spoilt; every rank must call."""
        if self.guard is None:
            return False
        # One bad step is the data's fault; with more in a row, or weights that are not finite, these are in doubt.
        streak = self.guard.rejected_in_a_row(self.ladder.in_a_row)
        return streak > 1 or bool(self.guard.bad_weights(alone=self._ended))

    def _go_back_before_a_save(self, trainer: pl.Trainer) -> bool:
        """Never let doubtful weights be saved; False where there is no good state to save instead."""
        if self.snapshots is None or self.snapshots.good is None:
            self.events.add("saved_in_doubt", step=trainer.global_step)
            return False
        self._rewind(trainer, "before a save")
        return True

    # The ladder

    def _accepted(self, trainer: pl.Trainer, outcome: Outcome) -> None:
        back = self.ladder.accepted()
        if back:
            self._running().fp8.set_enabled(back, True)
            self.events.add("fp8_again", step=trainer.global_step, layers=back)
        snapshots = self.snapshots
        candidate = snapshots.candidate if snapshots is not None else None
        # Only a step that ran on the candidate's weights vouches for them.
        if snapshots is not None and candidate is not None and outcome.context["step"] >= candidate.label:
            snapshots.promote()

    def _rejected(self, trainer: pl.Trainer, outcome: Outcome, finding: Finding) -> bool:
        """Act on it; True where the steps after it are undone."""
        if finding.overflow and _current_scale(trainer) > 1:
            self._write(trainer, outcome, finding, "loss_scale_lowered")
            return False
        if finding.deliberate:
            self._write(trainer, outcome, finding, "skip")
            return False
        guard = self._running()
        bad_weights = guard.bad_weights()
        finding.culprits[:0] = bad_weights
        enabled = [name for name in guard.fp8.names if name not in self.ladder.fallen]
        action = self.ladder.rejected(
            tuple(name for name in finding.layers if name in enabled) or tuple(enabled),
            finite=finding.finite,
            can_rewind=self.snapshots is not None and self.snapshots.good is not None,
            weights_bad=bool(bad_weights),
        )
        self._write(trainer, outcome, finding, action.rung)
        step = trainer.global_step
        if action.rung == "fall_back":
            guard.fp8.set_enabled(action.layers, False)
            self.events.add("fall_back", step=step, layers=action.layers, steps=action.steps)
        elif action.rung == "rewind":
            self._rewind(trainer)
            return True
        elif action.rung == "relearn":
            for judge in guard.judges:
                judge.statistics.reset()
            guard.fp8.forget_last_amax()
            self.events.add("relearn", step=step)
        elif action.rung == "stop":
            self._stop(trainer, outcome, finding)
        return False

    def _rewind(self, trainer: pl.Trainer, reason: str | None = None) -> None:
        if self.snapshots is None:
            return
        label = self.snapshots.restore()
        self._running().forget()
        self._schedules.drop()
        self.events.add("rewind", step=trainer.global_step, good_step=label, reason=reason)

    def _stop(self, trainer: pl.Trainer, outcome: Outcome, finding: Finding) -> None:
        message = (
            f"Recovery has done all it may and steps are still bad: {self.ladder.story()}. "
            f"The last one, at step {outcome.context['step']}: {_describe(finding)}. "
        )
        if self.snapshots is not None and self.snapshots.good is not None:
            self._rewind(trainer)
            path = os.path.join(trainer.log_dir or trainer.default_root_dir, LAST_GOOD_NAME)
            trainer.save_checkpoint(path)
            message += f"The last good state is in {path}: resume from it with other data (skip_batches={LOG_NAME!r}), "
        else:
            message += "Resume from an earlier checkpoint with other data, "
        message += "a lower learning rate, or the layers named above left in bf16."
        self.events.add("stop", step=trainer.global_step, message=message)
        raise RecoveryExhausted(message)

    def _write(self, trainer: pl.Trainer, outcome: Outcome, finding: Finding, action: str) -> None:
        first = finding.culprits[0]
        context = outcome.context
        self.events.add(
            "rejected",
            **context,
            verdict=first.what,
            layer=first.where,
            role=first.role,
            ranks=first.ranks,
            value=first.value,
            loss=finding.loss,
            grad_norm=finding.grad_norm,
            samples=sample_indices(trainer, context["batches"], first.ranks),
            causes=len(finding.culprits),
            action=action,
        )
        counts = {f"recovery/{name}": float(count) for name, count in self.events.counts.items()}
        for logger in trainer.loggers:
            logger.log_metrics(counts, step=context["step"])

    def _leave_out(self, reason: str) -> None:
        self._running().reject_step()
        self.events.add("left_out", reason=reason, batch=self._batches[-1] if self._batches else None)

    def _try_again(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer, context: dict[str, Any]
    ) -> bool | None:
        """The same batch once more, its guilty layers in bf16."""
        guard = self._running()
        self._known = guard.outcomes()
        outcome = self._known[-1]
        finding = outcome.finding
        if finding is None or finding.deliberate or finding.overflow:
            return False
        enabled = [name for name in guard.fp8.names if name not in self.ladder.fallen]
        guilty = [name for name in finding.layers if name in enabled] or enabled
        if not guilty:
            return False
        self._known = []
        self._write(trainer, outcome, finding, "retry")
        self._metrics.restore(trainer, True)
        self._metrics.remember(trainer, pl_module)
        guard.begin()
        guard.fp8.set_enabled(guilty, False)
        arguments = [self._batch, self._batches[-1]]
        if not is_param_in_hook_signature(pl_module.training_step, "batch_idx", min_args=2):
            arguments.pop()
        output = call._call_strategy_hook(trainer, "training_step", *arguments)
        loss = output["loss"] if isinstance(output, Mapping) else output
        if loss is not None:
            trainer.strategy.backward(loss, optimizer)
        accepted = guard.decide(optimizer, **context)
        guard.fp8.set_enabled(guilty, True)
        return accepted

    def _close(self) -> None:
        if self.guard is not None:
            self.guard.close()
        self._metrics = LoggedMetrics()
        self._schedules.drop()
        self._batches, self._known, self._batch = [], [], None
        self._decided = self._rejection = False


def _loss_scaler(trainer: pl.Trainer) -> torch.amp.GradScaler | LossScaler | None:
    """This package's precision plugin keeps it in its settings, Lightning's own as ``scaler``."""
    plugin = trainer.precision_plugin
    settings = getattr(plugin, "settings", None)
    return settings.loss_scaler if isinstance(settings, FP8Settings) else getattr(plugin, "scaler", None)


def _current_scale(trainer: pl.Trainer) -> float:
    scaler = _loss_scaler(trainer)
    return float(scaler.scale(torch.ones((), device=trainer.strategy.root_device))) if scaler is not None else 1.0


def _batches(given: Iterable[tuple[int, int]] | str | os.PathLike[str]) -> set[tuple[int, int]]:
    if isinstance(given, (str, os.PathLike)):
        return rejected_batches(read_events(given))
    batches = set()
    for pair in given:
        try:
            epoch, batch = pair
            batches.add((int(epoch), int(batch)))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"skip_batches holds {pair!r}: give pairs (epoch, batch index), or an event log's path."
            ) from error
    return batches


def _describe(finding: Finding) -> str:
    first = finding.culprits[0]
    ranks = f" on rank {', '.join(map(str, first.ranks))}" if first.ranks else ""
    return f"{first.what} in {first.where} ({first.role}){ranks}"
