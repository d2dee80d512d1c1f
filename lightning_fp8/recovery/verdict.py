"""Is this step good? Judged on the device, before the optimizer takes it, with one reduction over all ranks.

1. Every rank writes what it saw into one message: its loss, the norm of each gradient, the amax of each operand and how
   far that lies above the operand's last one. Inf becomes the largest number and NaN becomes Inf, for a maximum would
   drop a NaN.
2. One MAX all-reduce. From here on all ranks hold the same message, and decide alike.
3. A step is bad if anything is non-finite, if a rank rejects it, or if loss or gradient norm is a spike against the
   robust statistics of the steps accepted before.
4. Only an accepted step enters the statistics, and only one that had gradients on some rank.

Nothing here waits for the device; :meth:`Layout.findings` names the culprits on the host, when there is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fp8.ranks import local_values
from lightning_fp8.recipes import ROLES
from lightning_fp8.recovery.spikes import SIGNALS, SpikeStatistics, Thresholds

#: Why a rank rejects a step, whatever its values are: the user said so, it had no loss, a monitor said so. It has no
#: gradients, and wanted none: that is a reason only where another rank has some.
REJECTED, NO_LOSS, UNHEALTHY, IDLE = 1, 2, 3, 4
#: In a message: Inf. What no finite value reaches, Inf itself, stands for NaN.
_INF = torch.finfo(torch.float32).max
#: In the part for batches.
_INF_BATCH, _NAN_BATCH = 1.0, 2.0


@dataclass(frozen=True)
class Culprit:
    """One thing that was wrong with a step.

    Attributes:
        what: ``nonfinite``, ``spike``, ``amax_jump``, ``health`` (a monitor said so), ``rejected`` (the user did) or
            ``no_loss``.
        where: a layer's or parameter's qualified name, or ``batch``, ``loss`` or ``grad_norm``; empty where whoever
            rejected the step does not say.
        role: of an operand ``input``, ``weight``, ``grad_output``; of a parameter ``weight``, ``gradient``; else as
            ``where``.
        value: what was seen (a spike: sigmas above the median); NaN where nothing was.
        ranks: that saw it; empty where the ranks cannot be told apart (gradients already reduced).
    """

    what: str
    where: str
    role: str
    value: float
    ranks: tuple[int, ...] = ()


@dataclass
class Finding:
    """Why a step was rejected.

    Attributes:
        culprits: the first cause first.
        loss: the largest over the ranks.
        grad_norm: of this optimizer's gradients, the largest over the ranks.
        overflow: gradients overflowed under a loss scale whose scaler will lower it: no fault of the data.
    """

    culprits: list[Culprit]
    loss: float
    grad_norm: float
    overflow: bool = False

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers with an operand that was at fault, the first cause first."""
        return tuple(dict.fromkeys(c.where for c in self.culprits if c.role in ROLES))

    @property
    def finite(self) -> bool:
        """A suspicion (a spike), not a fact."""
        return all(culprit.what in ("spike", "amax_jump", "health") for culprit in self.culprits)

    @property
    def deliberate(self) -> bool:
        """Somebody asked for the step to be left out."""
        return any(culprit.what in ("rejected", "no_loss") for culprit in self.culprits)


class Layout:
    """Where things lie in the message, fp32 ``[size]``.

    Losses, batch flags, operand flags and rejections of each rank; gradient norms; amaxes and their jumps.

    Args:
        parameters: names of the optimizer's parameters, in its order.
        layers: names of the layers in the table of statistics, in its order.
        ranks: number of ranks.
    """

    def __init__(self, parameters: Sequence[str], layers: Sequence[str] = (), ranks: int = 1) -> None:
        self.parameters, self.layers, self.ranks = list(parameters), list(layers), ranks
        self.sizes = [ranks, ranks, ranks, ranks, len(parameters), len(layers) * len(ROLES), len(layers) * len(ROLES)]

    def state_dict(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"parameters": self.parameters, "layers": self.layers, "ranks": self.ranks}

    def split(self, message: Tensor) -> tuple[Tensor, ...]:
        """The seven parts, views."""
        return message.split(self.sizes)

    def findings(self, message: Tensor, scores: Tensor, thresholds: Thresholds, loss_scaled: bool = False) -> Finding:
        """Name what is wrong in a reduced ``message`` with the ``scores`` of its signals; both on the CPU.

        Args:
            message: as :meth:`Judge.judge` left it.
            scores: fp32 ``[signals]``.
            thresholds: those of the judge.
            loss_scaled: a scaler lowers the loss scale when gradients overflow.
        """
        losses, batches, operands, rejections, norms, amaxes, jumps = self.split(message)
        codes = list(enumerate(rejections.tolist()))
        without_loss = (NO_LOSS,) if all(code == IDLE for _, code in codes) else (NO_LOSS, IDLE)
        culprits = [
            Culprit(what, "", "", math.nan, who)
            for what, given in (("rejected", (REJECTED,)), ("no_loss", without_loss))
            if (who := tuple(rank for rank, code in codes if code in given))
        ]
        ranks = tuple((operands > 0).nonzero()[:, 0].tolist())
        by_layer = amaxes.view(-1, len(ROLES))
        bad_operands = [
            Culprit("nonfinite", self.layers[layer], ROLES[role], seen_value(by_layer[layer, role]), ranks)
            for layer, role in _first_causes(by_layer)
        ]
        bad_batches = tuple((batches > 0).nonzero()[:, 0].tolist())
        bad_losses = tuple((losses >= _INF).nonzero()[:, 0].tolist())
        bad_gradients = (norms >= _INF).nonzero()[:, 0].tolist()
        loss = seen_value(losses.max())
        if bad_batches and (bad_losses or bad_gradients):
            value = math.nan if batches.max() == _NAN_BATCH else math.inf
            culprits.append(Culprit("nonfinite", "batch", "batch", value, bad_batches))
        in_forward = any(c.role != "grad_output" for c in bad_operands)
        if in_forward or not bad_losses:
            # Otherwise forward went wrong outside these layers, and backward only carried it here.
            culprits += bad_operands
        if bad_losses:
            culprits.append(Culprit("nonfinite", "loss", "loss", loss, bad_losses))
        # Backward runs from the last parameter to the first: the last bad one is the first cause.
        culprits += [
            Culprit("nonfinite", self.parameters[i], "gradient", seen_value(norms[i])) for i in reversed(bad_gradients)
        ]
        if thresholds.amax_jump is not None:
            for index in (jumps > thresholds.amax_jump).nonzero()[:, 0].tolist():
                layer, role = divmod(index, len(ROLES))
                culprits.append(Culprit("amax_jump", self.layers[layer], ROLES[role], amaxes[index].item(), ranks))
        if thresholds.spike is not None and not culprits:
            for signal, score in zip(SIGNALS, scores.tolist(), strict=True):
                if score > thresholds.spike:
                    spiked = (int(losses.argmax()),) if signal == "loss" else ()
                    culprits.append(Culprit("spike", signal, signal, score, spiked))
        if (unhealthy := tuple(rank for rank, code in codes if code == UNHEALTHY)) and not culprits:
            culprits.append(Culprit("health", "", "", math.nan, unhealthy))
        return Finding(
            culprits,
            loss=loss,
            grad_norm=seen_value(norms.max() if bad_gradients else torch.linalg.vector_norm(norms)),
            overflow=loss_scaled and not bad_losses and not in_forward and bool(bad_gradients),
        )


def _first_causes(amaxes: Tensor) -> list[tuple[int, int]]:
    """(layer, role) of non-finite operands, the first cause first.

    A weight is a cause in itself. An input that is bad makes the ones after it bad, so the first layer's is the cause;
    only where no operand of the forward pass is bad did the trouble begin in backward, which visits the layers from
    the last to the first.
    """
    bad = amaxes >= _INF
    inputs, weights, grad_outputs = (bad[:, role].nonzero()[:, 0].tolist() for role in range(len(ROLES)))
    forward = [(layer, ROLES.index("weight")) for layer in weights]
    forward += [(layer, ROLES.index("input")) for layer in inputs[:1]]
    return forward or [(layer, ROLES.index("grad_output")) for layer in grad_outputs[-1:]]


class Judge:
    """Judges the steps of one optimizer.

    Args:
        parameters: the optimizer's parameters; sharded ones contribute this rank's shard.
        layout: names for them and for the layers of the table.
        thresholds: when a finite step is bad.
        device: where the verdict is made.

    Attributes:
        statistics: of accepted steps.
        message: of the last step, reduced.
        scores: of the last step, fp32 ``[signals]``.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        layout: Layout,
        thresholds: Thresholds,
        device: torch.device | str = "cpu",
    ) -> None:
        self.parameters, self.layout, self.thresholds = list(parameters), layout, thresholds
        self.device = torch.device(device)
        self.statistics = SpikeStatistics(thresholds, device, len(self.parameters))
        self.rank = dist.get_rank() if layout.ranks > 1 else 0
        self.message = self.scores = torch.zeros(0, device=device)
        # A step of Adam is as large as the learning rate, so that the first (where a schedule begins at zero, the
        # second) changes small initial weights, and the gradients behind them, by orders of magnitude. Under delayed
        # scaling these saturate at first, so that the change goes one layer further with each step.
        self._settled = min(thresholds.warmup, 2 + len(layout.layers))

    def watch(self, parameters: Sequence[Tensor], layout: Layout) -> None:
        """Judge these from now on, with statistics that begin anew."""
        self.parameters, self.layout = list(parameters), layout
        self.statistics.parameters = len(self.parameters)
        self.statistics.reset()

    @torch.no_grad()
    def judge(
        self,
        loss: Tensor | None,
        batch: Tensor | None = None,
        amax: Tensor | None = None,
        last_amax: Tensor | None = None,
        rejected: int = 0,
        unhealthy: Tensor | None = None,
    ) -> Tensor:
        """The verdict on the step whose gradients the parameters hold.

        Args:
            loss: this rank's, ``[]``; None: the step had none.
            batch: not finite where this rank's data holds NaN or Inf, ``[]``; named in findings, no fault by itself.
            amax: of this step, fp32 ``[layers, roles]``, negative where not seen.
            last_amax: of the last accepted step, the same.
            rejected: 0, :data:`REJECTED`, :data:`NO_LOSS` or :data:`IDLE`.
            unhealthy: bool ``[]``: a monitor rejects the step.

        Returns:
            bool ``[]`` on the device, the same on all ranks: True where the step must not be taken.
        """
        norms = self._gradient_norms()
        message = self.message = torch.full((sum(self.layout.sizes),), -math.inf, device=self.device)
        losses, batches, operands, rejections, norm_part, amax_part, jump_part = self.layout.split(message)
        if loss is not None:
            losses[self.rank].copy_(for_message(loss.detach().float()))
        rejections[self.rank].fill_(float(rejected))
        if unhealthy is not None and rejected in (0, IDLE):
            rejections[self.rank].copy_(torch.where(unhealthy, float(UNHEALTHY), float(rejected)))
        norm_part.copy_(for_message(norms))
        batches[self.rank].fill_(0.0)
        if batch is not None:
            # Not the codes of other parts: bad data is no fault by itself.
            batches[self.rank].copy_(batch.isinf() * _INF_BATCH + batch.isnan() * _NAN_BATCH)
        operands[self.rank].fill_(0.0)
        if amax is not None and last_amax is not None and self.layout.layers:
            amax_part.copy_(for_message(amax).flatten())
            # A slot that was never seen, or only saw zeros, has nothing to jump from.
            comparable = (last_amax > 0) & torch.isfinite(amax) & (self.statistics.count >= self._settled)
            jumps = torch.where(comparable, amax / last_amax, 0.0).clamp(max=_INF / 2)
            jump_part.copy_(jumps.flatten())
            suspicious = (amax_part >= _INF).any()
            if self.thresholds.amax_jump is not None:
                suspicious = suspicious | (jump_part > self.thresholds.amax_jump).any()
            operands[self.rank].copy_(suspicious)
        if self.layout.ranks > 1:
            dist.all_reduce(message, op=dist.ReduceOp.MAX)
        signals = torch.stack((losses.max(), torch.linalg.vector_norm(norm_part)))
        nothing_to_step = (rejections == IDLE).all()
        bad = (message >= _INF).any() | ((rejections > 0).any() & ~nothing_to_step)
        if self.thresholds.amax_jump is not None:
            bad = bad | (jump_part > self.thresholds.amax_jump).any()
        self.scores = self.statistics.score(signals)
        if self.thresholds.spike is not None:
            bad = bad | (self.scores > self.thresholds.spike).any()
        self.statistics.update(signals, ~(bad | nothing_to_step))
        return bad

    def _gradient_norms(self) -> Tensor:
        """Norm of each parameter's gradient (0 without one), fp32 ``[parameters]``, in one pass over them."""
        norms = torch.zeros(len(self.parameters), device=self.device)
        found = [(i, local_values(p.grad)) for i, p in enumerate(self.parameters) if p.grad is not None]
        if found:
            values = torch.stack([norm.to(self.device) for norm in norms_of([g for _, g in found])])
            if len(found) == len(self.parameters):
                return values
            indices = torch.tensor([i for i, _ in found], pin_memory=self.device.type == "cuda")
            norms[indices.to(self.device, non_blocking=True)] = values
        return norms


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each, fp32 scalars; of complex numbers that of their parts."""
    real = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    # Norms in a narrower type than the values' are refused.
    wide = any(t.dtype == torch.float64 for t in real)
    norms = torch._foreach_norm(real, 2, torch.float64 if wide else torch.float32)
    return [norm.float() for norm in norms] if wide else list(norms)


def for_message(values: Tensor) -> Tensor:
    """fp32 ``values`` of which a maximum over ranks may be taken: Inf of either sign is the largest number, NaN Inf."""
    return values.nan_to_num(nan=math.inf, posinf=_INF, neginf=_INF)


def seen_value(entry: Tensor) -> float:
    """What :func:`for_message` was given for a scalar of a message."""
    value = float(entry)
    return math.nan if value == math.inf else math.inf if value >= _INF else value
