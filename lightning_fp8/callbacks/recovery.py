"""A bad batch never ends a run: :class:`SkipBatchRecovery`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_fp8.callbacks._averages import Averages, average_again
from lightning_fp8.callbacks._caught_steps import CaughtSteps
from lightning_fp8.callbacks._directory import check_writable, default_path
from lightning_fp8.callbacks._ending import while_ending
from lightning_fp8.callbacks._escalation import LOG_NAME, Escalation
from lightning_fp8.callbacks._guarded_saves import collect_again, guard_saves_of_weights_only
from lightning_fp8.callbacks._held_schedules import HeldSchedules
from lightning_fp8.callbacks._intervals import passes_multiple
from lightning_fp8.callbacks._logged_metrics import LoggedMetrics
from lightning_fp8.callbacks._loops import accumulates, fits, runs_forward_only
from lightning_fp8.callbacks._loss_factor import loss_scaler
from lightning_fp8.callbacks._surrounded import surround
from lightning_fp8.checks import check_flag, check_number, check_path
from lightning_fp8.files import located, why_not_begun
from lightning_fp8.loss_scaling import LossScaler
from lightning_fp8.ranks import world_size
from lightning_fp8.recovery.errors import RecoveryExhausted, SkipBatchException
from lightning_fp8.recovery.events import EventLog, batches_to_leave_out
from lightning_fp8.recovery.guard import Mode, Outcome, StepGuard, check_mode
from lightning_fp8.recovery.ladder import Ladder, LadderSettings
from lightning_fp8.recovery.snapshot import Snapshots
from lightning_fp8.recovery.spikes import Thresholds
from lightning_fp8.recovery.unjudged import UnjudgedSteps

__all__ = ["RecoveryExhausted", "SkipBatchException", "SkipBatchRecovery"]


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
        amax_jump: an FP8 operand's amax this many times its last is bad, but for the first steps; None: never.
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
        log: path of the event log, or its address where fsspec reaches (``s3://...``); ``"auto"``: ``recovery.jsonl``
            in the Trainer's log directory; None: none.

    Attributes:
        events: what was seen and done in this run, over resumes: ``events.recent`` holds the last 1000 as dicts,
            ``events.counts`` how many there were of each kind, ``events.path`` the log of the running fit, or None.

    Raises:
        TypeError: where a setting is of the wrong type.
        ValueError: where one makes no sense, or settings contradict each other.
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
        check_number(whole=True, none=True, least=1, snapshot_every=snapshot_every)
        check_flag(retry=retry)
        check_flag(none=True, hold_schedule=hold_schedule)
        check_path(log=log)
        check_mode(mode)
        if mode == "fast" and hold_schedule:
            raise ValueError("hold_schedule needs the verdict on the host before the step: choose mode='exact'.")
        if mode == "fast" and retry:
            raise ValueError("retry needs the verdict on the host before the step: choose mode='exact'.")
        if rewinds and snapshot_every is None:
            raise ValueError("There is no rewind without snapshots: set snapshot_every, or rewinds=0.")
        # What only exact mode can do makes 'auto' exact.
        self.mode: Mode = "exact" if mode == "auto" and (hold_schedule or retry) else mode
        self.hold_schedule, self.retry, self.snapshot_every = hold_schedule, retry, snapshot_every
        self.skip_batches = batches_to_leave_out(skip_batches)
        self.log_path = log
        self.events = EventLog()
        self.guard: StepGuard | None = None
        self.snapshots: Snapshots | None = None
        self._metrics = LoggedMetrics()
        self._batches: list[int] = []
        self._step = 0
        self._decided = False
        self._unjudged: UnjudgedSteps | None = None
        self._schedules = HeldSchedules()
        self._loaded: dict[str, Any] | None = None
        self._batch: Any = None
        self._known: list[Outcome] = []
        self._rejection: Tensor | bool = False
        self._undone: Tensor | None = None
        self._releases: list[Callable[[], None]] = []
        self._ended = False
        self._escalation: Escalation | None = None
        self._set_aside: Callable[[], bool] | None = None

    # For the user's training_step

    def reject(self, loss: Tensor) -> Tensor:
        """Return this from ``training_step`` instead of ``loss`` to leave the batch out, on any subset of ranks.

        While Lightning's finders try learning rates or batch sizes, nothing is judged: the batch then ends here on one
        device, and on several has a loss of zero.
        """
        if not self._in_finder:
            return self._running().reject(loss)
        if world_size() == 1:
            raise SkipBatchException("rejected")
        return loss * 0.0

    def observe(self, loss: Tensor) -> None:
        """In manual optimization: tell of a loss whose backward does not go through ``manual_backward``."""
        if not self._in_finder:
            self._running().observe(loss)

    def reject_where(self, flag: Tensor) -> None:
        """For monitors, in ``on_before_optimizer_step`` before this callback's: the step is bad where ``flag`` is True.

        Args:
            flag: bool ``[]`` on the device.
        """
        self._running().reject_where(flag)

    @property
    def told_to_reject(self) -> bool:
        """Whether the step that runs is left out by the user's own word, on this rank: monitors look away."""
        return self.guard is not None and self.guard.told_to_reject

    @property
    def accepted(self) -> bool | None:
        """Whether the last optimizer step was taken; None where that is not known yet (fast mode), or not judged.

        In manual optimization, step schedulers and averages only where it is not False.
        """
        return None if self._in_finder else self._running().accepted

    @property
    def _in_finder(self) -> bool:
        """Whether Lightning tries learning rates or batch sizes: it takes all callbacks out for that."""
        return self._set_aside is not None and self._set_aside()

    def _running(self) -> StepGuard:
        if self.guard is None:
            raise RuntimeError("SkipBatchRecovery works inside Trainer.fit only: is it among the Trainer's callbacks?")
        return self.guard

    # Hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        # A fit of its own: what the last one left is kept until here, so that it could be saved.
        self.ladder = Ladder(self.ladder.settings)
        self.guard = self.snapshots = self._escalation = self._loaded = None
        self._ended = False
        if "DeepSpeed" in type(trainer.strategy).__name__:
            raise MisconfigurationException(
                "DeepSpeed's engine steps by itself, so that SkipBatchRecovery cannot keep it from a bad step: "
                "use DDP or ModelParallelStrategy."
            )
        if self.retry and (accumulates(trainer) or not pl_module.automatic_optimization):
            raise MisconfigurationException(
                "retry=True repeats training_step for one batch: it needs automatic optimization, and no "
                "accumulate_grad_batches or GradientAccumulationScheduler."
            )
        if self.retry and is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
            raise MisconfigurationException(
                "retry=True repeats training_step for one batch, which training_step(self, dataloader_iter) takes from "
                "its iterator itself: take batch and batch_idx instead, or leave retry=False."
            )
        default = default_path(trainer, LOG_NAME)
        path = default if self.log_path == "auto" else self.log_path
        remedy = "Choose another path for the event log with log=, or log=None."
        check_writable(trainer, path, remedy, why_not_begun)
        self.events.path = located(path) if path is not None else None
        self.events.writes = trainer.is_global_zero
        self._releases = [
            CaughtSteps(trainer, pl_module, partial(self._leave_out, trainer)).release,
            guard_saves_of_weights_only(pl_module, self._make_good),
            surround(pl_module, "configure_gradient_clipping", self._clip_unless_rejected),
        ]
        # Not the Trainer itself, for a module that knows this callback may be copied.
        self._set_aside = lambda: self not in trainer.callbacks  # type: ignore[attr-defined]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        scaler = loss_scaler(trainer)
        if self.retry and isinstance(scaler, GradScaler):
            raise MisconfigurationException(
                "retry=True runs backward twice before a step, which Lightning's own loss scaling cannot follow: use "
                "FP8Precision(precision='16-mixed'), or retry=False."
            )
        self.guard = guard = StepGuard(pl_module, trainer.optimizers, self.thresholds, self.mode, scaler)
        if self._loaded is not None:
            guard.load_state_dict(self._loaded["guard"])
            self.ladder.load_state_dict(self._loaded["ladder"])
            self.events.load_state_dict(self._loaded["events"])
            self._loaded = None
        elif trainer.global_step == 0:
            self.events.clear()
        guard.fp8.set_enabled(self.ladder.fallen, False)
        self._unjudged = None if pl_module.automatic_optimization else UnjudgedSteps(trainer.optimizers)
        self._begin_escalation(trainer, pl_module, guard)
        # Weights that only the first batch will make are no state to go back to.
        lazy = any(is_lazy(tensor) for tensor in chain(pl_module.parameters(), pl_module.buffers()))
        if self.snapshots is not None and not lazy:
            self.snapshots.capture(trainer.global_step)
            self.snapshots.promote()
        self._step = trainer.global_step

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # An epoch that somebody ended early left its last step open.
        self._batches = []
        self._undone = None
        # The module may have got torchmetrics since.
        self._metrics = LoggedMetrics()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        guard = self._running()
        self._schedules.after_validation()
        if runs_forward_only(trainer):
            self._batches = []
            if self._escalation is not None:
                self._escalation.weights_were_replaced()
        if not self._batches:
            # In manual optimization a step without gradients is the user's own.
            guard.begin(loss_expected=pl_module.automatic_optimization)
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
        if runs_forward_only(trainer):
            return
        if guard.optimizers != trainer.optimizers:
            self._follow_optimizers(trainer, pl_module, guard)
        context = {"epoch": trainer.current_epoch, "step": trainer.global_step, "batches": list(self._batches)}
        accepted = guard.decide(optimizer, **context)
        if accepted is False and self.retry:
            accepted = self._try_again(trainer, pl_module, optimizer, context)
        self._decided = True
        self._end_unjudged()
        self._rejection = self._rejection | (guard.flag if accepted is None else not accepted)
        if accepted is False and self.hold_schedule is not False:
            self._schedules.hold(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        guard, escalation = self._running(), self._escalation
        self._batch = None
        if runs_forward_only(trainer):
            flag = guard.judge_forward(outputs.get("loss"))
            self._metrics.restore(trainer, flag)
            self._undone = flag.long() if self._undone is None else self._undone + flag
        if not self._decided or escalation is None:
            if self._unjudged is not None and self._unjudged.take():
                self._stand_aside(self._unjudged)
            return
        self._metrics.restore(trainer, self._rejection)
        self._decided, self._rejection, self._batches = False, False, []
        self._schedules.after_batch()
        known, self._known = self._known + guard.outcomes(everything=False), []
        escalation.act(known)
        before, self._step = self._step, trainer.global_step
        if self.snapshots is not None and self.snapshot_every is not None and not self.ladder.in_a_row:
            due = passes_multiple(self.snapshot_every, before, self._step)
            if due or self.snapshots.empty:
                self._take_snapshot(self.snapshots, self._step)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A checkpoint may be written next.
        self._schedules.after_validation()
        undone, self._undone = int(self._undone) if self._undone is not None else 0, None
        if undone:
            reason = f"{undone} batches of an epoch without backward: given up, or with a loss that is not finite"
            self.events.add("left_out", step=trainer.global_step, epoch=trainer.current_epoch, reason=reason)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for release in self._releases:
            release()
        self._releases, self._set_aside = [], None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        escalation = self._escalation
        if escalation is not None:
            # No save need have come after the last steps, and the verdict on the very last one may come only now.
            if escalation.doubtful() and escalation.rewind("at the end of the fit"):
                average_again(trainer, pl_module, self)
            escalation.write_skipped(self._running().outcomes())
        # From here on the weights are the user's.
        self._escalation = None
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self.guard is not None:
            self._ended = True
            what = {"kind": type(exception).__name__, "text": str(exception)}
            with while_ending("SkipBatchRecovery"):
                if self._escalation is not None:
                    self._escalation.tell_rest(self._known)
            with while_ending("SkipBatchRecovery"):
                self.events.add("exception", step=trainer.global_step, **what)
            self._close()
        # Lightning tears no callback down after an exception: this one would stay around the next fit's training_step.
        self.teardown(trainer, pl_module, "fit")

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
        escalation = self._escalation
        if escalation is None or not fits(trainer):
            return
        if escalation.doubtful(alone=self._ended):
            if escalation.go_back_before_a_save():
                collect_again(trainer, self, checkpoint)
        elif self.snapshots is not None:
            self._take_snapshot(self.snapshots, trainer.global_step)

    def _begin_escalation(self, trainer: pl.Trainer, pl_module: pl.LightningModule, guard: StepGuard) -> None:
        """With no good state yet."""
        if self.snapshot_every is not None:
            others: dict[str, Any] = {f"statistics.{i}": judge.statistics for i, judge in enumerate(guard.judges)}
            others |= {"fp8": guard.fp8, "averages": Averages(trainer)}
            others |= {f"scheduler.{i}": config.scheduler for i, config in enumerate(trainer.lr_scheduler_configs)}
            self.snapshots = Snapshots(pl_module, trainer.optimizers, others)
        self._escalation = Escalation(trainer, guard, self.ladder, self.snapshots, self._schedules, self.events)

    def _follow_optimizers(self, trainer: pl.Trainer, pl_module: pl.LightningModule, guard: StepGuard) -> None:
        """Others took their place in mid-run: the good state is theirs no more, and the next good step makes one."""
        good = self.snapshots.good if self.snapshots is not None else None
        guard.watch(trainer.optimizers)
        self._begin_escalation(trainer, pl_module, guard)
        if good is not None:
            reason = "the optimizers were replaced"
            self.events.add("good_state_dropped", step=trainer.global_step, good_step=good.label, reason=reason)

    def _stand_aside(self, unjudged: UnjudgedSteps) -> None:
        """An optimizer stepped unasked: nothing is kept for a verdict, nor a state from before all that it learnt."""
        self._batches = []
        if self.snapshots is not None:
            self.snapshots.drop()
        if not unjudged.told:
            unjudged.told = True
            rank_zero_warn(
                "An optimizer steps past SkipBatchRecovery, which has judged no step: bad ones are neither skipped nor "
                "undone. In manual optimization use self.optimizers(), whose steps are judged, without "
                "use_pl_optimizer=False."
            )

    def _end_unjudged(self) -> None:
        if self._unjudged is not None:
            self._unjudged.release()
            self._unjudged = None

    def _take_snapshot(self, snapshots: Snapshots, step: int) -> None:
        # The verdict on the candidate comes a step or two later: taking its place before then, where saves are as
        # frequent, none would ever become the good one.
        if snapshots.candidate is None:
            snapshots.capture(step)

    def _make_good(self) -> bool:
        """Before a save of weights only; whether the weights are others now."""
        escalation = self._escalation
        return escalation is not None and escalation.doubtful(alone=self._ended) and escalation.go_back_before_a_save()

    def _clip_unless_rejected(self, clip: Callable[..., None]) -> Callable[..., None]:
        """Stands around the module's clipping: what was rejected on the host has no gradients left."""

        def configure_gradient_clipping(*args: Any, **kwargs: Any) -> None:
            if self.accepted is not False:
                clip(*args, **kwargs)

        return configure_gradient_clipping

    def _leave_out(self, trainer: pl.Trainer, reason: str) -> bool:
        """``training_step`` gave its batch up; whether its step will be judged."""
        if self._in_finder:
            return False
        guard = self._running()
        if trainer.lightning_module.automatic_optimization:
            guard.reject_step()
        else:
            # It has left training_step, in which its step would have come: the next one is another batch's.
            guard.give_up()
            self._decided = self._rejection = True
        batch = self._batches[-1] if self._batches else None
        self.events.add("left_out", step=trainer.global_step, epoch=trainer.current_epoch, reason=reason, batch=batch)
        return True

    def _try_again(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer, context: dict[str, Any]
    ) -> bool | None:
        """The same batch once more, its guilty layers in bf16."""
        guard, escalation = self._running(), self._escalation
        self._known = guard.outcomes()
        outcome = self._known[-1]
        finding = outcome.finding
        if escalation is None or finding is None or finding.deliberate or finding.overflow:
            return False
        guilty = escalation.guilty(finding)
        if not guilty:
            return False
        self._known = []
        escalation.write(outcome, finding, "retry")
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
            if isinstance(guard.scaler, LossScaler):
                # The precision plugin has done that already, to the gradients that were thrown away.
                guard.scaler.unscale_(optimizer)
        accepted = guard.decide(optimizer, **context)
        guard.fp8.set_enabled(guilty, True)
        return accepted

    def _close(self) -> None:
        if self.guard is not None:
            self.guard.close()
        self._end_unjudged()
        self._metrics = LoggedMetrics()
        self._schedules.drop()
        self._batches, self._known, self._batch = [], [], None
        self._decided = self._rejection = False
