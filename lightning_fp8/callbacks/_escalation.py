"""What follows from a verdict under the Trainer: the ladder's rungs, and the lines in the event log."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import lightning.pytorch as pl

from lightning_fp8.callbacks._directory import run_directory
from lightning_fp8.callbacks._held_schedules import HeldSchedules
from lightning_fp8.callbacks._loss_factor import loss_factor
from lightning_fp8.callbacks._samples import sample_indices
from lightning_fp8.recovery.errors import RecoveryExhausted
from lightning_fp8.recovery.events import EventLog, rejected_batches
from lightning_fp8.recovery.guard import Outcome, StepGuard
from lightning_fp8.recovery.ladder import Action, Ladder
from lightning_fp8.recovery.snapshot import Snapshots
from lightning_fp8.recovery.verdict import Culprit, Finding

log = logging.getLogger(__name__)

LOG_NAME = "recovery.jsonl"
LAST_GOOD_NAME = "last-good.ckpt"
#: How many the message of a stop names.
_NAMED_BATCHES, _NAMED_LAYERS = 20, 3


class Escalation:
    """Climbs the ladder in one fit.

    Args:
        trainer: of the fit.
        guard: whose verdicts they are; its layers fall back.
        ladder: decides.
        snapshots: the good state, if there are any.
        schedules: those held for a skipped step.
        events: written to.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        guard: StepGuard,
        ladder: Ladder,
        snapshots: Snapshots | None,
        schedules: HeldSchedules,
        events: EventLog,
    ) -> None:
        self.trainer, self.guard, self.ladder, self.snapshots = trainer, guard, ladder, snapshots
        self.schedules, self.events = schedules, events

    def act(self, outcomes: Iterable[Outcome]) -> None:
        """Act on what became known, batch by batch."""
        undone = False
        for _, steps in groupby(outcomes, key=lambda outcome: (outcome.context["epoch"], outcome.context["batches"])):
            if undone:
                self.write_skipped(steps)
            else:
                undone = self._act_on_batch(list(steps))
        if undone:
            self.write_skipped(self.guard.outcomes())

    def _act_on_batch(self, steps: list[Outcome]) -> bool:
        """Act on a batch: a step of each optimizer, but it counts once. True where what came after is undone."""
        taken: tuple[Action, Outcome, Finding] | None = None
        for outcome in steps:
            finding = outcome.finding
            if finding is None:
                continue
            if finding.overflow and loss_factor(self.trainer) > 1:
                self.write(outcome, finding, "loss_scale_lowered")
            elif finding.deliberate or taken is not None:
                self.write(outcome, finding, "skip")
            else:
                taken = self._climb(finding), outcome, finding
                self.write(outcome, finding, taken[0].rung)
        if taken is not None:
            return self._carry_out(*taken)
        accepted = [outcome for outcome in steps if outcome.finding is None]
        if accepted:
            self._accepted(accepted[-1])
        return False

    def _accepted(self, outcome: Outcome) -> None:
        back = self.ladder.accepted()
        if back:
            self.guard.fp8.set_enabled(back, True)
            self.events.add("fp8_again", step=self.trainer.global_step, layers=back)
        snapshots = self.snapshots
        candidate = snapshots.candidate if snapshots is not None else None
        # Only a step that ran on the candidate's weights vouches for them.
        if snapshots is not None and candidate is not None and outcome.context["step"] >= candidate.label:
            snapshots.promote()

    def _climb(self, finding: Finding) -> Action:
        bad_weights = self.guard.bad_weights()
        finding.culprits[:0] = bad_weights
        return self.ladder.rejected(
            self.guilty(finding),
            finite=finding.finite,
            can_rewind=self._has_good_state(),
            weights_bad=bool(bad_weights),
        )

    def _carry_out(self, action: Action, outcome: Outcome, finding: Finding) -> bool:
        guard, step = self.guard, self.trainer.global_step
        if action.rung == "fall_back":
            guard.fp8.set_enabled(action.layers, False)
            self.events.add("fall_back", step=step, layers=action.layers, steps=action.steps)
        elif action.rung == "rewind":
            self.rewind()
            return True
        elif action.rung == "relearn":
            for judge in guard.judges:
                judge.statistics.reset()
            guard.fp8.forget_last_amax()
            self.events.add("relearn", step=step)
        elif action.rung == "stop":
            self._stop(outcome, finding)
        return False

    def guilty(self, finding: Finding) -> tuple[str, ...]:
        """Layers in FP8 whose operands were at fault; all, where none can be named."""
        enabled = [name for name in self.guard.fp8.names if name not in self.ladder.fallen]
        return tuple(name for name in finding.layers if name in enabled) or tuple(enabled)

    def doubtful(self, *, alone: bool = False) -> bool:
        """Whether the weights may be spoilt.

        Args:
            alone: look at this rank's only; otherwise every rank must call.
        """
        # One bad step is the data's fault; with more in a row, or weights that are not finite, these are in doubt.
        return self.guard.rejected_in_a_row(self.ladder.in_a_row) > 1 or bool(self.guard.bad_weights(alone=alone))

    def go_back_before_a_save(self) -> bool:
        """Doubtful weights are about to be saved; False where there is no good state to save instead."""
        if self.rewind("before a save"):
            # Bad steps that nobody has acted on are answered now: later it would undo steps on the good state.
            self.act(self.guard.outcomes())
            return True
        self.events.add("saved_in_doubt", step=self.trainer.global_step)
        return False

    def rewind(self, reason: str | None = None) -> bool:
        """Put the last good state back; False, and nothing done, where there is none."""
        if self.snapshots is None or not self._has_good_state():
            return False
        label = self.snapshots.restore()
        self.guard.forget()
        self.schedules.drop()
        self.events.add("rewind", step=self.trainer.global_step, good_step=label, reason=reason)
        return True

    def _has_good_state(self) -> bool:
        """One without parameters that the model has by now is none: half of it would be from another time."""
        good = self.snapshots.good if self.snapshots is not None else None
        if self.snapshots is None or good is None:
            return False
        lacking = self.snapshots.drop_incomplete()
        if lacking:
            step, names = self.trainer.global_step, ", ".join(lacking[:_NAMED_LAYERS])
            self.events.add("good_state_dropped", step=step, good_step=good.label, layers=lacking)
            if self.events.writes:
                log.warning(
                    "Step %s: there is no state to go back to until the next good one, for that of step %s lacks "
                    "%s parameters that the model has got since (%s).",
                    step, good.label, len(lacking), names,
                )  # fmt: skip
        return not lacking

    def _stop(self, outcome: Outcome, finding: Finding) -> None:
        message = (
            f"Recovery has done all it may and steps are still bad: {self.ladder.story()}. "
            f"The last one, at step {outcome.context['step']}: {_describe(finding.culprits[0])}. "
        )
        # Whoever resumes from the last good state has other data, and begins without these.
        self.write_skipped(self.guard.outcomes())
        path = os.path.join(run_directory(self.trainer), LAST_GOOD_NAME)
        if self.rewind() and self._save_good(path):
            message += f"The last good state is in {path}: resume from it"
        else:
            message += "Resume from an earlier checkpoint"
        *ways, last = self._other_ways(finding)
        message += f" with {', '.join(ways)}, or {last}."
        self.events.add("stop", step=self.trainer.global_step, message=message)
        raise RecoveryExhausted(message)

    def _save_good(self, path: str) -> bool:
        """Whether what was saved is the good state: a save asks for it once more."""
        doubts = self.events.counts["saved_in_doubt"]
        self.trainer.save_checkpoint(path)
        return self.events.counts["saved_in_doubt"] == doubts

    def _other_ways(self, finding: Finding) -> list[str]:
        """What the run that goes on may do differently."""
        if self.events.path is not None:
            path = self.events.path
            batches = f"skip_batches={str(path.absolute() if isinstance(path, Path) else path)!r}"
        else:
            last = sorted(rejected_batches(self.events.recent))[-_NAMED_BATCHES:]
            batches = f"skip_batches={last}, the last that were rejected: no log has them all"
        ways = [f"other data ({batches})", "a lower learning rate"]
        fp8 = self.guard.fp8.names
        if finding.culprits[0].where in fp8:  # Otherwise the batch or the weights went wrong, and layers only show it.
            layers = [name for name in finding.layers if name in fp8]
            more = f" and {len(layers) - _NAMED_LAYERS} more" if len(layers) > _NAMED_LAYERS else ""
            ways.append(f"{', '.join(layers[:_NAMED_LAYERS])}{more} left in bf16 (LayerSelection's exclude)")
        return ways

    def write_skipped(self, outcomes: Iterable[Outcome]) -> None:
        """The lines of rejected steps that nothing more follows from."""
        for outcome in outcomes:
            if outcome.finding is not None:
                self.write(outcome, outcome.finding, "skip")

    def tell_rest(self, known: Iterable[Outcome]) -> None:
        """The run ends with an exception: verdicts that nobody has acted on are told, and counted for a last save.

        Args:
            known: those that the guard has handed out already.
        """
        self.ladder.in_a_row = self.guard.rejected_in_a_row(self.ladder.in_a_row)
        self.write_skipped([*known, *self.guard.outcomes()])

    def weights_were_replaced(self) -> None:
        """By others than the last steps have left, such as an average: doubts about those mean nothing now."""
        self.write_skipped(self.guard.outcomes())
        self.ladder.in_a_row = 0

    def write(self, outcome: Outcome, finding: Finding, action: str) -> None:
        """The line of a rejected step, and counts for the loggers."""
        first = finding.culprits[0]
        context = outcome.context
        self.events.add(
            "rejected",
            **context,
            verdict=first.what,
            layer=first.where or None,
            role=first.role or None,
            ranks=first.ranks,
            value=first.value if first.where else None,
            loss=finding.loss,
            grad_norm=finding.grad_norm,
            samples=sample_indices(self.trainer, context["batches"], first.ranks) if self.events.writes else None,
            causes=len(finding.culprits),
            action=action,
        )
        if not finding.deliberate and self.events.writes:
            log.warning("Step %s was rejected: %s. Action: %s.", context["step"], _describe(first), action)
        counts = {f"recovery/{name}": float(count) for name, count in self.events.counts.items()}
        for logger in self.trainer.loggers:
            logger.log_metrics(counts, step=context["step"])


def _describe(culprit: Culprit) -> str:
    role = f" ({culprit.role})" if culprit.role != culprit.where else ""
    where = f" in {culprit.where}{role}" if culprit.where else ""
    ranks = f" on rank {', '.join(map(str, culprit.ranks))}" if culprit.ranks else ""
    return f"{culprit.what}{where}{ranks}"
