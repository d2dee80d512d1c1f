"""Guards the steps of a training loop: judges each, and makes a bad one leave no trace.

With it, a plain PyTorch or Fabric loop is guarded like this::

    guard = StepGuard(model, [optimizer])
    for batch in data:
        guard.begin()
        loss = compute_loss(model(batch))
        guard.observe(loss)
        loss.backward()
        guard.decide(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        for outcome in guard.outcomes():
            if outcome.finding is not None:
                print(outcome.context, outcome.finding)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_fp8.amaxes import amax_of, with_norms
from lightning_fp8.batches import tensors_of
from lightning_fp8.loss_scaling import LossScaler
from lightning_fp8.optimizers import parameters_of
from lightning_fp8.ranks import local_values, reshard, world_size
from lightning_fp8.recovery.buffers import MovedBuffers
from lightning_fp8.recovery.layers import FP8Layers
from lightning_fp8.recovery.pending import PendingVerdict
from lightning_fp8.recovery.spikes import Thresholds
from lightning_fp8.recovery.verdict import (
    IDLE,
    NO_LOSS,
    REJECTED,
    Culprit,
    Finding,
    Judge,
    Layout,
    for_message,
    norms_of,
    seen_value,
)

Mode = Literal["auto", "fast", "exact"]


@dataclass(frozen=True)
class Outcome:
    """What became of a step.

    Attributes:
        context: what the caller said about it.
        finding: why it was rejected; None where it was accepted.
    """

    context: dict[str, Any]
    finding: Finding | None


class StepGuard:
    """Decides on each optimizer step.

    *exact*: one flag is read on the host each step; a rejected step finds no gradients, so that any optimizer leaves
    weights and state alone. *fast*: the flag stays on the device, where fused optimizers obey it (``found_inf``); the
    host learns of it with the next step.

    Args:
        model: its buffers and parameter names; not a wrapper around it.
        optimizers: whose steps are judged, each with statistics of its own. Parameter groups that join later are judged
            like the others; an optimizer's statistics then begin anew.
        thresholds: when a finite step is bad.
        mode: ``auto`` is fast where every optimizer is fused and no dynamic loss scale is used.
        scaler: of the loss, if there is one.

    Attributes:
        fast: the mode, decided.
        accepted: whether the last step was; None: not known yet (fast).
        flag: bool ``[]`` on the device: the last step was rejected.
        fp8: the model's FP8 layers.
        loss_scaled: a dynamic loss scale is used: it is lowered when gradients overflow.

    Raises:
        ValueError: ``mode="fast"`` with an optimizer that is not fused, or with a dynamic loss scale; an optimizer that
            runs backward itself. :meth:`decide` raises the first also where a group joins that is not fused.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        thresholds: Thresholds | None = None,
        mode: Mode = "auto",
        scaler: torch.amp.GradScaler | LossScaler | None = None,
    ) -> None:
        self.thresholds = thresholds or Thresholds()
        self.loss_scaled = isinstance(scaler, torch.amp.GradScaler) or (
            scaler is not None and scaler.loss_scale == "dynamic"
        )
        self._mode, self._model, self.scaler = mode, model, scaler
        self.fp8, self.ranks = FP8Layers(model), world_size()
        self.accepted: bool | None = True
        self.optimizers: list[Optimizer] = []
        self.judges: list[Judge] = []
        self.watch(optimizers)
        self.device = self.judges[0].device
        self.flag = torch.zeros((), dtype=torch.bool, device=self.device)
        self._buffers = MovedBuffers(model)
        self._batches: list[Tensor] = []
        self._losses: list[tuple[Tensor, Tensor | None]] = []
        self._rejected = 0
        self._left_out = False
        self._loss_expected = True
        self._last_rejected = False
        self._unhealthy: Tensor | None = None
        self._pending: list[PendingVerdict] = []
        self._window = 0

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """Judge the steps of these from now on; the statistics of those that are new begin with nothing.

        Raises:
            ValueError: as of the constructor.
        """
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
            raise ValueError(
                "LBFGS runs backward several times in a step, which cannot be judged before it begins: use another "
                "optimizer, or leave recovery out."
            )
        self.fast = _choose_mode(self._mode, optimizers, self.loss_scaled)
        known = dict(zip(self.optimizers, self.judges, strict=True))
        self.judges = [known.get(optimizer) or self._judge(optimizer) for optimizer in optimizers]
        self._leave_optimizers()
        self.optimizers = list(optimizers)
        self._without_state = [_with_momentum(optimizer) for optimizer in optimizers]

    def _judge(self, optimizer: Optimizer) -> Judge:
        parameters = parameters_of(optimizer)
        if not parameters:
            raise ValueError(
                f"{type(optimizer).__name__} has no parameters: there is nothing to guard. Leave SkipBatchRecovery "
                "out where configure_optimizers gives no optimizer."
            )
        return Judge(parameters, self._layout(parameters), self.thresholds, parameters[0].device)

    def _layout(self, parameters: Sequence[Tensor]) -> Layout:
        reshard(self._model)
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        labels = [names.get(id(p), f"parameter {index}") for index, p in enumerate(parameters)]
        return Layout(labels, self.fp8.names, self.ranks)

    def _follow(self, index: int) -> Judge:
        """The judge of an optimizer, of all that it steps by now: parameter groups may have joined in mid-run."""
        optimizer, judge = self.optimizers[index], self.judges[index]
        parameters = parameters_of(optimizer)
        if len(parameters) != len(judge.parameters) or not all(map(operator.is_, parameters, judge.parameters)):
            self.fast = self.fast and _choose_mode(self._mode, self.optimizers, self.loss_scaled)
            judge.watch(parameters, self._layout(parameters))
            self._without_state[index] = _with_momentum(optimizer)
        return judge

    def begin(self, *, loss_expected: bool = True) -> None:
        """A step's first forward is about to begin; of several optimizers, the first one's.

        Args:
            loss_expected: a step without a loss and without gradients is one that was given up, and leaves no trace;
                otherwise it has nothing to step by design, and what its forward moved stays.
        """
        self._window += 1
        self._loss_expected = loss_expected
        self._buffers.remember()
        self._losses, self._rejected, self._unhealthy = [], 0, None
        self._batches, self._left_out, self._last_rejected = [], False, False

    @torch.no_grad()
    def observe_batch(self, batch: Any) -> None:
        """A batch, so that a finding can tell whether the data itself held NaN or Inf; by itself that is no fault."""
        amaxes = [amax_of(tensor) for tensor in tensors_of(batch) if tensor.is_floating_point()]
        self._batches += [amax.to(self.device, torch.float32) for amax in amaxes if amax is not None]

    def observe(self, loss: Tensor) -> None:
        """A loss that backward is about to run from, scaled if losses are; of accumulated batches each one's share."""
        self._last_rejected = False
        # The tensor's memory: whatever is done to it in place before backward counts.
        self._losses.append((loss.detach(), self._loss_factor(loss.device)))

    def _loss_factor(self, device: torch.device) -> Tensor | None:
        if isinstance(self.scaler, torch.amp.GradScaler):
            return self.scaler.scale(torch.ones((), device=device))
        return self.scaler.factor_on(device) if self.scaler is not None else None

    def reject(self, loss: Tensor) -> Tensor:
        """Leave this step out, whatever the other ranks say.

        Returns:
            ``loss`` as NaN, with a NaN gradient on every path, so that this rank takes part in backward like any other.
        """
        self._rejected = REJECTED
        return loss * float("nan")

    def reject_where(self, flag: Tensor) -> None:
        """Count this step as bad where ``flag`` (bool ``[]`` on the device) says so; the host is not asked."""
        self._unhealthy = flag if self._unhealthy is None else self._unhealthy | flag

    def reject_step(self) -> None:
        """Leave this step out, that of every optimizer; backward may run or not."""
        self._left_out = True

    @property
    def told_to_reject(self) -> bool:
        """This rank's caller has left out the step that comes, or that was decided last: NaN in it is no fault."""
        return self._left_out or self._last_rejected or self._rejected == REJECTED

    @torch.no_grad()
    def give_up(self) -> None:
        """Leave no trace of what was done since :meth:`begin`; its steps need not come, and the gradients are gone."""
        for optimizer in self.optimizers:
            self._skip_on_host(optimizer)

    @torch.no_grad()
    def judge_forward(self, loss: Tensor | None) -> Tensor:
        """In place of :meth:`decide` for a batch whose forward is all there is: no backward, no step.

        Each rank decides on its own batch. One that was left out, or has a loss that is not finite, leaves no trace.

        Args:
            loss: ``[]``; None: the batch was given up.

        Returns:
            bool ``[]`` on the device: the batch is undone.
        """
        if loss is None or self._left_out or self._rejected:
            flag = torch.ones((), dtype=torch.bool, device=self.device)
        else:
            flag = ~loss.detach().isfinite().all().to(self.device)
        self._buffers.restore(flag)
        self.fp8.discard(flag)
        return flag

    @torch.no_grad()
    def decide(self, optimizer: Optimizer, **context: Any) -> bool | None:
        """Judge the step that ``optimizer`` is about to take; a bad one will leave no trace.

        Args:
            optimizer: one of those guarded; its gradients are complete, and not yet clipped. In fast mode those of a
                bad step stay what they are, so that clipping must not raise at NaN (``error_if_nonfinite=False``).
            context: comes back with the outcome.

        Returns:
            Whether it was accepted; None where the host doesn't know yet.

        Raises:
            ValueError: it is none of those guarded.
        """
        index = self._index(optimizer)
        judge = self._follow(index)
        self._buffers.after_forward()
        if isinstance(self.scaler, torch.amp.GradScaler) and getattr(optimizer, "_step_supports_amp_scaling", False):
            # Fused optimizers leave that to their step, which would come too late for the norm.
            self.scaler.unscale_(optimizer)
        loss = self._loss(judge)
        amax, last_amax = (self.fp8.amax(), self.fp8.last_amax()) if self.fp8.names else (None, None)
        batch = torch.stack(self._batches).sum() if self._batches else None
        rejected = REJECTED if self._left_out else self._rejected
        self.flag = judge.judge(loss, batch, amax, last_amax, rejected, self._unhealthy)
        pending = PendingVerdict(judge.layout, self.flag, judge.message, judge.scores, context, self._window)
        if self.fast and not self._first_step(index):
            self._skip_on_device(optimizer)
            self.accepted = None
            pending.copy_flag()
        else:
            optimizer.__dict__.pop("found_inf", None)
            self.accepted = not self.flag.item()
            pending.flag = torch.tensor(not self.accepted)
            pending.late = False
            if not self.accepted:
                self._skip_on_host(optimizer)
                self._keep_loss_scale(optimizer, self._finding(pending))
        self._pending.append(pending)
        # The data is every optimizer's, a loss is one's own.
        self._last_rejected = self._rejected == REJECTED
        self._losses, self._rejected, self._unhealthy = [], 0, None
        return self.accepted

    def _index(self, optimizer: Optimizer) -> int:
        for index, other in enumerate(self.optimizers):
            if other is optimizer:
                return index
        raise ValueError(
            f"{type(optimizer).__name__} is none of the optimizers that are guarded: give the optimizer itself, not "
            "what wraps it (of Fabric's its .optimizer), or tell of a new one with watch([...])."
        )

    def _first_step(self, index: int) -> bool:
        """Whether the optimizer has no state yet, or none for a parameter that it is about to step.

        SGD's fused kernel, kept from such a step on the device, would leave the momentum unset.
        """
        state = self.optimizers[index].state
        without = self._without_state[index] = [p for p in self._without_state[index] if p not in state]
        return not state or any(p.grad is not None for p in without)

    def outcomes(self, *, everything: bool = True) -> list[Outcome]:
        """What became known since the last call; to be called each step, for what is not collected is kept.

        Args:
            everything: wait for a fast last step too; otherwise for those before it only, which costs no time. What
                several optimizers did between two calls of :meth:`begin` counts as one step.

        Returns:
            The steps' outcomes, in order.
        """
        last = [pending for pending in self._pending if pending.window == self._window]
        kept = last if not everything and any(pending.late for pending in last) else []
        known, self._pending = [pending for pending in self._pending if pending not in kept], kept
        return [Outcome(pending.context, self._finding(pending)) for pending in known]

    def rejected_in_a_row(self, before: int = 0) -> int:
        """How many steps in a row, up to the last, were rejected. Waits for those not yet collected.

        What several optimizers did between two calls of :meth:`begin` counts as one step, rejected if one of them was.

        Args:
            before: the same, up to the last that was collected.
        """
        for _, steps in groupby(self._pending, key=lambda pending: pending.window):
            before = before + 1 if any(pending.rejected() for pending in steps) else 0
        return before

    def forget(self) -> None:
        """Drop the accepted steps that are not collected: they are undone. Rejected ones are still to be told."""
        self._pending = [pending for pending in self._pending if pending.rejected()]
        self._without_state = [_with_momentum(optimizer) for optimizer in self.optimizers]

    def _finding(self, pending: PendingVerdict) -> Finding | None:
        if not pending.rejected():
            return None
        details = pending.message.cpu(), pending.scores.cpu()
        return pending.layout.findings(*details, self.thresholds, self.loss_scaled)

    @torch.no_grad()
    def bad_weights(self, *, alone: bool = False) -> list[Culprit]:
        """Weights that are not finite, or so large that the sum of their squares is not.

        Args:
            alone: look at this rank's only; otherwise every rank must call.
        """
        judges = [self._follow(index) for index in range(len(self.judges))]
        names = [name for judge in judges for name in judge.layout.parameters]
        floating = [self._values(parameter) for judge in judges for parameter in judge.parameters]
        norms = [norm.to(self.device) for norm in norms_of(floating)]
        bad = for_message(torch.stack(norms))
        message = torch.zeros(len(names) + self.ranks, device=self.device)
        message[: len(names)] = bad
        message[len(names) + self.judges[0].rank] = bad.max()
        if self.ranks > 1 and not alone:
            dist.all_reduce(message, dist.ReduceOp.MAX)
        seen = [seen_value(entry) for entry in message.cpu()]
        ranks = tuple(rank for rank in range(self.ranks) if not math.isfinite(seen[len(names) + rank]))
        culprits = [index for index in range(len(names)) if not math.isfinite(seen[index])]
        if not culprits:
            return []
        # Not the norm: that of finite weights may not be finite.
        largest = [floating[index].abs().amax() if floating[index].numel() else norms[index] for index in culprits]
        message = for_message(torch.stack([amax.to(self.device, torch.float32) for amax in largest]))
        if self.ranks > 1 and not alone:
            dist.all_reduce(message, dist.ReduceOp.MAX)
        amaxes = [seen_value(entry) for entry in message.cpu()]
        return [Culprit("nonfinite", names[i], "weight", amax, ranks) for i, amax in zip(culprits, amaxes, strict=True)]

    def _values(self, parameter: Tensor) -> Tensor:
        """This rank's that can be bad; lazy ones before their first forward and integers have a place only."""
        if is_lazy(parameter) or not (parameter.is_floating_point() or parameter.is_complex()):
            return torch.empty(0, device=self.device)
        return with_norms(local_values(parameter.detach()))

    def _loss(self, judge: Judge) -> Tensor | None:
        if not self._losses:
            if any(parameter.grad is not None for parameter in judge.parameters):
                return torch.zeros((), device=judge.device)
            self._rejected = self._rejected or (NO_LOSS if self._loss_expected else IDLE)
            return None
        losses = [loss if scale is None else loss / scale for loss, scale in self._losses]
        return torch.stack([loss.to(judge.device, torch.float32) for loss in losses]).sum()

    def _skip_on_device(self, optimizer: Optimizer) -> None:
        optimizer.found_inf = self.flag.float()  # type: ignore[attr-defined]
        self._buffers.restore(self.flag)
        self.fp8.discard(self.flag)

    def _skip_on_host(self, optimizer: Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)
        self._buffers.restore()
        self.fp8.discard()

    def _keep_loss_scale(self, optimizer: Optimizer, finding: Finding | None) -> None:
        """NaN of a batch that was left out on purpose says nothing about the loss scale; true overflows do."""
        left_out = finding is not None and finding.deliberate and not finding.overflow
        if left_out and isinstance(self.scaler, LossScaler):
            self.scaler.leave_out(optimizer)

    def close(self) -> None:
        """Leave optimizers and layers as they were: fallbacks end."""
        self.fp8.all_back()
        self._leave_optimizers()

    def _leave_optimizers(self) -> None:
        for optimizer in self.optimizers:
            optimizer.__dict__.pop("found_inf", None)

    def state_dict(self) -> dict[str, Any]:
        """Statistics of accepted steps, and the outcomes not yet collected: plain values and tensors on the CPU."""
        return {
            "statistics": [judge.statistics.state_dict() for judge in self.judges],
            # Negative windows: before those of the guard that goes on.
            "pending": [{**p.state_dict(), "window": p.window - self._window - 1} for p in self._pending],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was."""
        for judge, statistics in zip(self.judges, state["statistics"], strict=False):
            judge.statistics.load_state_dict(statistics)
        self._pending = [
            PendingVerdict(**{**pending, "layout": Layout(**pending["layout"])}) for pending in state["pending"]
        ]


def _with_momentum(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that get a state: without momentum SGD keeps none."""
    return [p for group in optimizer.param_groups if group.get("momentum") != 0 for p in group["params"]]


def check_mode(mode: str) -> None:
    """Look whether there is such a mode.

    Raises:
        ValueError: there is none.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode is {mode!r}: choose among {', '.join(map(repr, get_args(Mode)))}.")


def _choose_mode(mode: Mode, optimizers: Sequence[Optimizer], loss_scaled: bool) -> bool:
    """Whether the verdict can stay on the device."""
    check_mode(mode)
    slow = [type(o).__name__ for o in optimizers if not all(g.get("fused") for g in o.param_groups)]
    if mode == "fast" and slow:
        raise ValueError(f"mode='fast' needs fused optimizers: pass fused=True to {', '.join(slow)}, or choose 'auto'.")
    if mode == "fast" and loss_scaled:
        raise ValueError("mode='fast' does not go with a dynamic loss scale, which asks the device: choose 'auto'.")
    return mode != "exact" and not slow and not loss_scaled
