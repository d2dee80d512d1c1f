"""What a backend is: a library that runs the GEMMs of converted layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fp8.convert import to_float8, to_linear
from lightning_fp8.kernels.capability import Hardware, supports
from lightning_fp8.linear import Float8State
from lightning_fp8.recipes import ROLES, Recipe
from lightning_fp8.scaling import ScalingState
from lightning_fp8.selection import linear_layers
from lightning_fp8.statistics import StatisticsTable


class Support(NamedTuple):
    """Whether a backend runs a recipe on a device.

    Attributes:
        kind: ``native`` on tensor cores, ``emulated`` with the same operands in slower arithmetic, or ``refused``.
        reason: why, for people to read; for a refusal, with the remedy.
    """

    kind: Literal["native", "emulated", "refused"]
    reason: str


class GatheredWeights(Protocol):
    """What scales weights that are gathered in FP8, beside the layers' own scales."""

    def before_training(self) -> None:
        """A training step begins."""

    def weights_changed(self) -> None:
        """The weights may be others now."""

    def note(self) -> None:
        """Enter what the step has left so far into the layers' own statistics."""

    def close(self) -> None:
        """Another takes its place."""


class Runtime:
    """The converted layers of one model at work: their statistics, their step and their state.

    Every backend keeps its scales and amaxes in the same :class:`~lightning_fp8.scaling.ScalingState`, so that monitors
    read one table, scales move by one rule, and what a checkpoint holds is the same whichever library multiplies.

    Args:
        scaling: the layers' scales and statistics.
        states: each layer's own state, in the order of the table.
        forward_context: makes what surrounds forward and loss.

    Attributes:
        gathered: the scales of weights that are gathered in FP8, where that is done.
    """

    def __init__(
        self,
        scaling: ScalingState,
        states: Sequence[Float8State],
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._scaling = scaling
        self.states = states
        self.forward_context = forward_context
        self.gathered: GatheredWeights | None = None

    @property
    def scaling(self) -> ScalingState:
        """The layers' scales and statistics, up to date."""
        if self.gathered is not None:
            self.gathered.note()
        return self._scaling

    @property
    def table(self) -> StatisticsTable:
        """The statistics of all converted layers."""
        return self.scaling.table

    @torch.inference_mode(False)
    def to(self, device: torch.device) -> None:
        """Move scales and statistics; for weights that moved without their modules."""
        self.scaling.to(device)
        for state in self.states:
            state.link()

    def step(self, group: dist.ProcessGroup | None = None) -> None:
        """A training step begins after a completed optimizer step: move the scales.

        Args:
            group: the ranks that share amaxes; ``None`` is all of them. Every rank of it must call.

        Raises:
            RuntimeError: the layers were put on several devices.
        """
        # The table has followed the last of them: the others' amaxes would stay behind, and their scales stand still.
        if apart := {state.slots[0].device for state in self.states} - {self._scaling.table.device}:
            raise RuntimeError(
                f"FP8 layers that were converted together are on several devices ({', '.join(map(str, apart))} besides "
                f"{self._scaling.table.device}): convert each part by itself, before they are put on their devices."
            )
        self.scaling.step(group)

    def share_amaxes(self, group: dist.ProcessGroup | None = None) -> None:
        """Give every rank the window's largest amaxes of all; every rank of ``group`` must call."""
        self.scaling.share_amaxes(group)

    def before_training(self) -> None:
        """A training step begins."""
        if self.gathered is not None:
            self.gathered.before_training()

    def weights_changed(self) -> None:
        """An optimizer step has completed: what was cast from the weights before is void."""
        if self.gathered is not None:
            self.gathered.weights_changed()

    def discard(self, rejected: Tensor | bool = True) -> None:
        """Forget what the running step left in the scale state, if ``rejected`` (a bool tensor costs no host read)."""
        self.scaling.discard(rejected)

    def set_enabled(self, names: list[str], enabled: bool) -> None:
        """Switch the layers called ``names`` to high precision, or back to FP8."""
        rows = self.table.names
        for name in names:
            self.states[rows.index(name)].enabled = enabled

    def live_state(self) -> dict[str, Any]:
        """Plain values, and the tensors themselves: for copies that do not wait for the device."""
        return self.scaling.live_state()

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Load the state of the same recipe; returns the names of layers it does not have.

        Raises:
            ValueError: the state belongs to another recipe.
        """
        return self.scaling.load_state_dict(state)


class Backend(ABC):
    """A library that multiplies. Options are its constructor's arguments.

    A backend says what it can run (:meth:`support_on`, :meth:`why_not_installed`) and makes each layer's state
    (:meth:`make_state`), whose class names the layer's new class; the rest is common.
    """

    name: ClassVar[str]

    def support(self, recipe: Recipe, device: torch.device) -> Support:
        """Whether ``recipe`` runs on ``device`` with what is installed."""
        support = self.support_on(recipe, Hardware.of(device))
        if support.kind != "refused" and (against := self.why_not_installed(recipe)) is not None:
            return Support("refused", against)
        return support

    @abstractmethod
    def support_on(self, recipe: Recipe, hardware: Hardware) -> Support:
        """Whether ``recipe`` runs on such hardware, were the library installed; asks neither the device nor it."""

    def why_not_installed(self, recipe: Recipe) -> str | None:
        """What the library lacks, in one line that names what to install; ``None`` if nothing."""
        return None

    @abstractmethod
    def make_state(self, scaling: ScalingState, index: int, layer: nn.Linear, autocast_only: bool) -> Float8State:
        """The state of one layer, before it is converted.

        Args:
            scaling: the scales and statistics of all layers of this conversion.
            index: the layer's row in the table.
            layer: still an ``nn.Linear``.
            autocast_only: FP8 under autocast only: where autocast is off, the layer runs in high precision.

        Raises:
            ValueError: the backend cannot run this layer.
        """

    def convert(self, model: nn.Module, names: list[str], recipe: Recipe, autocast_only: bool) -> Runtime:
        """Convert the layers called ``names`` in place.

        Args:
            model: holds the layers.
            names: qualified names, as :func:`lightning_fp8.selection.linear_layers` gives them.
            recipe: one that :meth:`support` does not refuse.
            autocast_only: as in :meth:`make_state`.
        """
        scaling = ScalingState(recipe, StatisticsTable(names, _device_of(model, names)))
        states = to_float8(model, names, lambda index, layer: self.make_state(scaling, index, layer, autocast_only))
        return Runtime(scaling, states)

    def revert(self, model: nn.Module) -> None:
        """Turn every layer that was converted back into the ``nn.Linear`` it was."""
        to_linear(model)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), repr(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"


def why_emulate(recipe: Recipe, device: torch.device | Hardware) -> str | None:
    """Why the tensor cores of ``device`` cannot run ``recipe`` through torch; ``None`` if they can."""
    for cast in [cast for role in ROLES for cast in recipe.casts[role].uses]:
        native, reason = supports(cast.granularity, device, cast.format)
        if not native:
            return reason
    return None


def _device_of(model: nn.Module, names: list[str]) -> torch.device:
    """Where the layers are; the CPU while they are on the meta device. The table follows them when they move.

    Raises:
        ValueError: the layers are on several devices.
    """
    layers = linear_layers(model)
    devices = {layers[name].weight.device for name in names}
    if len(devices) > 1:
        raise ValueError(
            f"The layers to convert are on several devices ({', '.join(sorted(map(str, devices)))}): convert each "
            "part by itself, before they are put on their devices."
        )
    device = devices.pop() if devices else torch.device("cpu")
    return torch.device("cpu") if device.type == "meta" else device
