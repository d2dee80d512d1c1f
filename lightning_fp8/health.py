"""Is every operand of every layer well? Judged on the device once a step, from the amaxes that the casts left.

Five kinds of trouble:

* ``nonfinite``: an operand held NaN or Inf;
* ``spike``: an amax above ``spike`` times the mean of its last ``window`` steps, and beyond what this operand is used
  to: the gradients of a small batch leap by more than others ever do. Where these steps themselves lie further apart,
  as while a weight grows from zero, their largest stands for the mean;
* ``scale_at_cap``: a scale has stood at its recipe's cap for ``patience`` steps, so that small values may vanish;
* ``zero_gradient``: a layer's whole gradient has been zero for ``patience`` steps;
* ``drift``: the recent mean lies more than ``drift`` powers of two above the long-run mean.

All but the first are reported when they begin, not again while they last. Of each kind the operand that was *first* is
named: forward comes before backward; in forward the layers in their order, a layer's input before its weight; in
backward the layers in reverse. What goes wrong later in the step is a consequence, except for weights, which no step
changes before it ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_fp8.checks import check_number, keep_as_floats
from lightning_fp8.host_copy import to_device
from lightning_fp8.ranks import all_gather, world_size
from lightning_fp8.recipes import ROLES

Kind = Literal["nonfinite", "spike", "scale_at_cap", "zero_gradient", "drift"]
KINDS: tuple[Kind, ...] = ("nonfinite", "spike", "scale_at_cap", "zero_gradient", "drift")

#: Steps before one is taken back for a spike, as many as recovery learns by default: gradients behind layers that begin
#: at zero leap in every run.
_SPIKE_WARMUP = 32
#: Steps that the long-run mean must have seen before drift is judged.
_DRIFT_WARMUP = 100
#: Steps that the noise of an operand remembers.
_NOISE_HORIZON = 100
#: Columns of a summary: place of the first operand (-1: none), its amax, what it is held against, how many there are.
_PLACE, _AMAX, _REFERENCE, _COUNT = range(4)
#: Columns of the details: amax, scale, mean of the window, what was found as a bit for each kind.
_DETAILS = 4


@dataclass(frozen=True)
class HealthLimits:
    """When something is reported.

    Attributes:
        spike: factor over the mean of the last ``window`` steps; ``None``: never.
        window: steps in that mean; nothing is called a spike before they are full.
        sigmas: a spike also lies this many standard deviations above the mean, those of the operand's own upward noise
            (of log2(amax), over about the last 100 steps); ``None``: the factor alone decides.
        patience: steps in a row for ``scale_at_cap`` and ``zero_gradient``.
        drift: powers of two between the recent mean and the long-run one; ``None``: never.
        horizon: steps that the long-run mean (of the amax's logarithm) remembers.

    Raises:
        ValueError: a setting makes no sense.
        TypeError: one is of another type.
    """

    spike: float | None = 3.0
    window: int = 10
    sigmas: float | None = 6.0
    patience: int = 10
    drift: float | None = 4.0
    horizon: int = 1000

    def __post_init__(self) -> None:
        check_number(none=True, spike=self.spike, sigmas=self.sigmas, drift=self.drift)
        check_number(whole=True, least=1, window=self.window, patience=self.patience)
        check_number(whole=True, least=_DRIFT_WARMUP, horizon=self.horizon)
        if self.spike is not None and not 1 < self.spike < math.inf:
            raise ValueError(f"spike is {self.spike}: give a factor above 1, or None for no check.")
        if self.sigmas is not None and not 0 < self.sigmas < math.inf:
            raise ValueError(f"sigmas is {self.sigmas}: give a number above 0, or None to let the factor alone decide.")
        if self.drift is not None and not 0 < self.drift < math.inf:
            raise ValueError(f"drift is {self.drift}: give a number of powers of two above 0, or None for no check.")
        keep_as_floats(self, "spike", "sigmas", "drift")


@dataclass
class HealthEvent:
    """One thing that went wrong.

    Attributes:
        kind: one of :data:`KINDS`.
        step: number of optimizer steps completed before the one in which it began.
        layer: qualified name of the layer that was first.
        role: its operand.
        ranks: the ranks on which it was first.
        amax: what was seen.
        reference: what it is held against: the mean of the window, the cap's scale, the long-run mean.
        others: further layers and roles of the same kind in the same step on this rank, at most ten.
        count: operands of this kind in that step, on the first of ``ranks``.
        steps: steps in a row that the trouble lasted, for ``nonfinite``.
    """

    kind: Kind
    step: int
    layer: str
    role: str
    ranks: tuple[int, ...]
    amax: float
    reference: float
    others: tuple[str, ...] = ()
    count: int = 1
    steps: int = 1

    @property
    def direction(self) -> str:
        """``forward`` or ``backward``: where in the step it began."""
        return "backward" if self.role == "grad_output" else "forward"

    def message(self) -> str:
        """One line for people."""
        what = {
            "nonfinite": f"{_what_is(self.amax)} first seen in",
            "spike": f"amax {self.amax:.4g} is {_ratio(self.amax, self.reference)} the mean of its last steps in",
            "scale_at_cap": f"the scale stands at its cap {self.reference:.4g} for",
            "zero_gradient": "the whole gradient is zero, step after step, for",
            "drift": f"amax has drifted to {_ratio(self.amax, self.reference)} its long-run mean in",
        }[self.kind]
        ranks = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {', '.join(map(str, self.ranks))}"
        more = f"; {self.count - 1} more operands after it" if self.count > 1 else ""
        return f"Step {self.step}: {what} the {self.role} of {self.layer!r} ({self.direction}, {ranks}){more}."

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "ranks": list(self.ranks), "others": list(self.others)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> HealthEvent:
        """The inverse of :meth:`to_dict`."""
        return HealthEvent(**{**values, "ranks": tuple(values["ranks"]), "others": tuple(values["others"])})


class Reading(NamedTuple):
    """What :meth:`Health.observe` found, unpacked on the host.

    Attributes:
        summaries: fp32 ``[ranks, kinds, 4]``.
        amax, scale, mean: fp32 ``[layers, 3]`` of this rank.
        found: int64 ``[layers, 3]``: a bit for each kind.
    """

    summaries: Tensor
    amax: Tensor
    scale: Tensor
    mean: Tensor
    found: Tensor


class Health:
    """The health of a set of operands ``[layers, 3]``, on one device; its memory is constant.

    A step is first observed, as often as one likes, then committed: only then it enters the statistics, and only
    operands that were finite. Spikes enter cut off at the limit, so that one of them neither hides the next nor is
    reported for good where the level has changed.

    Args:
        positions: place of each layer in the execution of a forward.
        caps: the largest scale that each operand can get, fp32 ``[layers, 3]``; Inf where there is no cap.
        limits: when something is reported.
        device: where it is judged.

    Attributes:
        ring: fp32 ``[layers, 3, window]``: the last amaxes.
        count: int64 ``[layers, 3]``: how many entered so far.
        trend: fp32 ``[layers, 3]``: long-run mean of log2(amax).
        noise: fp32 ``[layers, 3]``: mean square of how far amax rose above the mean of its window, in powers of two.
            A spike does not enter, nor do steps while the mean learns a level.
        noise_count: int64 ``[layers, 3]``: how many steps entered that.
        calm: int64 ``[layers, 3]``: steps since the last spike.
        streaks: int64 ``[2, layers, 3]``: steps in a row at the cap, and of zero gradient.
        active: bool ``[kinds, layers, 3]``: what was found in the last committed step.
    """

    def __init__(
        self,
        positions: Sequence[int],
        caps: Tensor,
        limits: HealthLimits,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (len(positions), len(ROLES))
        self.limits = limits
        self.ranks = world_size()
        self.ring = torch.zeros(*shape, limits.window, dtype=torch.float32, device=device)
        self.count = torch.zeros(shape, dtype=torch.int64, device=device)
        self.trend = torch.zeros(shape, dtype=torch.float32, device=device)
        self.noise = torch.zeros(shape, dtype=torch.float32, device=device)
        self.noise_count = torch.zeros(shape, dtype=torch.int64, device=device)
        self.calm = torch.full(shape, limits.window, dtype=torch.int64, device=device)
        self.streaks = torch.zeros(2, *shape, dtype=torch.int64, device=device)
        self.active = torch.zeros(len(KINDS), *shape, dtype=torch.bool, device=device)
        self._caps = caps.to(device)
        self._is_gradient = torch.tensor([role == "grad_output" for role in ROLES], device=device)
        self._is_spike = torch.tensor([kind == "spike" for kind in KINDS], device=device)
        self._bits = (2 ** torch.arange(len(KINDS), device=device)).view(-1, 1, 1)
        self._next: tuple[Tensor, ...] | None = None
        self.set_positions(positions)

    def set_positions(self, positions: Sequence[int]) -> None:
        """Learn the order of execution."""
        self.positions = positions
        self._keys = to_device(_execution_keys(positions), self.ring.device)

    @torch.no_grad()
    def observe(self, amax: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Judge the step that is about to be taken. Every rank must call; one small gather is all they exchange.

        Args:
            amax: fp32 ``[layers, 3]``, negative where not seen.
            scale: fp32 ``[layers, 3]``, 0 where none is stored.

        Returns:
            ``found``, bool ``[kinds]``, the same on all ranks, on the device, and a message for :meth:`unpack`.
        """
        limits = self.limits
        seen = ~(amax < 0)
        usable = seen & torch.isfinite(amax)
        filled = self.count.clamp(max=limits.window)
        mean = self.ring.sum(-1) / filled.clamp(min=1)
        full = filled == limits.window
        # The noise is taken to be as large downwards as upwards, and larger than seen where little was seen.
        doubt = 1 + limits.window / self.noise_count.clamp(min=1)
        usual = torch.exp2((limits.sigmas or 0.0) * doubt * (2 * self.noise).sqrt())
        factor = limits.spike or math.inf
        steady = self.ring.amin(-1) >= mean / factor
        bound = torch.where(steady, mean, self.ring.amax(-1)) * usual.clamp(min=factor)
        spike = usable & full & (mean > 0) & (amax > bound)
        now = torch.stack((usable & (scale >= self._caps), usable & (amax == 0) & self._is_gradient))
        streaks = torch.where(usable, (self.streaks + 1) * now, self.streaks)
        at_cap, zero = streaks >= limits.patience
        recent = torch.log2(mean)
        drift = full & (self.count >= _DRIFT_WARMUP) & (recent - self.trend > (limits.drift or math.inf))
        active = torch.stack((seen & ~usable, spike, at_cap, zero, drift))
        begun = active & ~self.active
        begun[0] = active[0]
        references = torch.stack((mean, mean, scale, mean, torch.exp2(self.trend)))
        settled = full & (mean > 0)
        clipped = torch.where(settled, torch.minimum(amax, bound), amax)
        calm = torch.where(spike, 0, self.calm + 1)
        quiet = settled & steady & (calm > limits.window)
        rise = torch.where(quiet, torch.log2(amax / mean).clamp(min=0), torch.nan)
        self._next = (usable, clipped, rise, calm, streaks, active)
        summaries = self._gather(self._summarize(begun, amax, references))
        details = torch.stack((amax, scale, mean, (begun * self._bits).sum(0).float()), -1)
        found = (summaries[..., _PLACE] >= 0).any(0)
        return found, torch.cat((summaries.flatten(), details.flatten()))

    def rejectable(self, found: Tensor) -> Tensor:
        """Those of ``found``, bool ``[kinds]``, that a step may be taken back for: no spikes in the first 32 steps."""
        return found & (~self._is_spike | (self.count >= _SPIKE_WARMUP).any())

    @torch.no_grad()
    def commit(self, kept: Tensor | None = None) -> None:
        """Let the observed step enter the statistics.

        Args:
            kept: bool ``[]``: whether the step counts; one that recovery has rejected does not.
        """
        if self._next is None:
            return
        usable, clipped, rise, calm, streaks, active = self._next
        self._next = None
        if kept is None:
            kept = torch.ones((), dtype=torch.bool, device=usable.device)
        enters = usable & kept
        place = (self.count % self.limits.window).unsqueeze(-1)
        self.ring.scatter_(
            -1, place, torch.where(enters.unsqueeze(-1), clipped.unsqueeze(-1), self.ring.gather(-1, place))
        )
        self.count += enters
        positive = enters & (clipped > 0)
        weight = 1.0 / self.count.clamp(min=1, max=self.limits.horizon)
        self.trend += torch.where(positive, (torch.log2(clipped.clamp(min=1e-38)) - self.trend) * weight, 0.0)
        learns = enters & ~rise.isnan()
        self.noise_count += learns
        weight = 1.0 / self.noise_count.clamp(min=1, max=_NOISE_HORIZON)
        self.noise += torch.where(learns, (rise.square() - self.noise) * weight, 0.0)
        torch.where(enters, calm, self.calm, out=self.calm)
        torch.where(kept, streaks, self.streaks, out=self.streaks)
        torch.where(kept, active, self.active, out=self.active)

    def scale_gradients(self, factor: float) -> None:
        """Take all that is known of gradients to be of ones ``factor`` times as large, which those to come are."""
        known = self._is_gradient & (self.count > 0)
        self.ring.mul_(torch.where(self._is_gradient, factor, 1.0).unsqueeze(-1))
        self.trend.add_(known, alpha=math.log2(factor))

    def _summarize(self, begun: Tensor, amax: Tensor, references: Tensor) -> Tensor:
        """The first operand of each kind, fp32 ``[kinds, 4]``."""
        if not self.positions:
            return torch.full((len(KINDS), 4), -1.0, device=begun.device)
        begun = begun.flatten(1)
        first = torch.where(begun, self._keys.flatten(), torch.inf).argmin(1, keepdim=True)
        count = begun.sum(1, keepdim=True)
        values = (
            torch.where(count > 0, first, -1),
            amax.flatten().expand_as(begun).gather(1, first),
            references.flatten(1).gather(1, first),
            count,
        )
        return torch.cat([value.float() for value in values], 1)

    def _gather(self, summary: Tensor) -> Tensor:
        """Every rank's summary, fp32 ``[ranks, kinds, 4]``."""
        if self.ranks == 1:
            return summary.unsqueeze(0)
        gathered = summary.new_empty(self.ranks, *summary.shape)
        all_gather(gathered.view(-1), summary.contiguous().view(-1)).wait()
        return gathered

    def unpack(self, message: Tensor) -> Reading:
        """Take a message of :meth:`observe` apart, on the CPU."""
        size = self.ranks * len(KINDS) * 4
        summaries = message[:size].view(self.ranks, len(KINDS), 4)
        details = message[size:].view(len(self.positions), len(ROLES), _DETAILS)
        return Reading(summaries, details[..., 0], details[..., 1], details[..., 2], details[..., 3].long())

    def merge(self, first: Tensor, second: Tensor) -> Tensor:
        """One message of two that belong to the same batch; of each kind the first has the word.

        Args:
            first: as :meth:`observe` gave it, on the device.
            second: a later one.
        """
        size = self.ranks * len(KINDS) * 4
        (summary, details), (later, later_details) = (message.tensor_split([size]) for message in (first, second))
        summary, later = summary.view(-1, 4), later.view(-1, 4)
        details, merged = details.view(-1, _DETAILS), later_details.view(-1, _DETAILS).clone()
        merged[:, 0] = torch.maximum(merged[:, 0], details[:, 0])
        merged[:, -1] = (merged[:, -1].long() | details[:, -1].long()).float()
        return torch.cat((torch.where(summary[:, :1] >= 0, summary, later).flatten(), merged.flatten()))

    def events(self, reading: Reading, names: Sequence[str], step: int) -> list[HealthEvent]:
        """Name what a reading found, the same on every rank but for ``others``; empty for a clean step.

        Args:
            reading: of one step.
            names: of the layers.
            step: number of optimizer steps completed before.
        """
        events: list[HealthEvent] = []
        if not (reading.summaries[..., _PLACE] >= 0).any():
            return events
        keys = _execution_keys(self.positions).flatten()
        for index, kind in enumerate(KINDS):
            places = reading.summaries[:, index, _PLACE].long().tolist()
            hit = [rank for rank, place in enumerate(places) if place >= 0]
            if not hit:
                continue
            place = min((places[rank] for rank in hit), key=lambda p: float(keys[p]))
            ranks = tuple(rank for rank in hit if places[rank] == place)
            summary = reading.summaries[ranks[0], index].tolist()
            layer, role = divmod(place, len(ROLES))
            here = (reading.found.flatten() >> index & 1).nonzero()[:, 0].tolist()
            others = sorted((p for p in here if p != place), key=lambda p: float(keys[p]))[:10]
            labels = tuple(f"{names[p // len(ROLES)]}/{ROLES[p % len(ROLES)]}" for p in others)
            amax, reference, count = summary[_AMAX], summary[_REFERENCE], int(summary[_COUNT])
            events.append(HealthEvent(kind, step, names[layer], ROLES[role], ranks, amax, reference, labels, count))
        return events

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors on the CPU."""
        return {name: getattr(self, name).cpu().clone() for name in _STATE}

    def load_state_dict(self, state: dict[str, Tensor], rows: Sequence[int | None]) -> None:
        """Go on with the history of ``state``; another window starts anew, for its ring has another length.

        Args:
            state: as :meth:`state_dict` gave it.
            rows: for each layer here its row there; ``None`` where it has none.
        """
        here = [row for row, there in enumerate(rows) if there is not None]
        there = [row for row in rows if row is not None]
        if state["ring"].shape[-1] != self.limits.window or not here:
            return
        for name in _STATE:
            mine = getattr(self, name)
            if name in ("streaks", "active"):
                mine[:, here] = state[name][:, there].to(mine.device)
            else:
                mine[here] = state[name][there].to(mine.device)


_STATE = ("ring", "count", "trend", "noise", "noise_count", "calm", "streaks", "active")


def _execution_keys(positions: Sequence[int]) -> Tensor:
    """When in a step each operand is used, fp32 ``[layers, 3]``: exact up to five million layers."""
    place = torch.tensor(positions, dtype=torch.float32).view(-1)
    return torch.stack((2 * place, 2 * place + 1, 3 * len(positions) - place), -1)


def _what_is(value: float) -> str:
    return "NaN" if math.isnan(value) else "Inf"


def _ratio(value: float, reference: float) -> str:
    return f"{value / reference:.3g} times" if reference else "far above"
