"""What a backend is: a library that runs the GEMMs of converted layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fp8.recipes import Recipe
from lightning_fp8.statistics import StatisticsTable


class Support(NamedTuple):
    """Whether a backend runs a recipe on a device.

    Attributes:
        kind: ``native`` on tensor cores, ``emulated`` with the same operands in slower arithmetic, or ``refused``.
        reason: why, for people to read; for a refusal, with the remedy.
    """

    kind: Literal["native", "emulated", "refused"]
    reason: str


class Runtime(ABC):
    """The converted layers of one model at work: their statistics, their step and their state.

    Attributes:
        table: the statistics of all converted layers.
    """

    table: StatisticsTable

    def forward_context(self) -> AbstractContextManager[Any]:
        """Surrounds forward and loss."""
        return nullcontext()

    @abstractmethod
    def step(self, group: dist.ProcessGroup | None = None) -> None:
        """A training step begins after a completed optimizer step: move the scales.

        Args:
            group: the ranks that share amaxes; ``None`` is all of them. Every rank of it must call.
        """

    @abstractmethod
    def discard(self, rejected: Tensor | bool = True) -> None:
        """Forget what the running step left in the scale state, if ``rejected`` (a bool tensor costs no host read)."""

    @abstractmethod
    def set_enabled(self, names: list[str], enabled: bool) -> None:
        """Switch the layers called ``names`` to high precision, or back to FP8."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Plain values and CPU tensors."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Load the state of the same recipe; returns the names of layers it does not have.

        Raises:
            ValueError: the state belongs to another recipe.
        """


class Backend(ABC):
    """A library that multiplies. Options are its constructor's arguments."""

    name: ClassVar[str]

    @abstractmethod
    def support(self, recipe: Recipe, device: torch.device) -> Support:
        """Whether ``recipe`` runs on ``device`` with what is installed."""

    @abstractmethod
    def convert(self, model: nn.Module, names: list[str], recipe: Recipe, autocast_only: bool) -> Runtime:
        """Convert the layers called ``names`` in place.

        Args:
            model: holds the layers.
            names: qualified names, as :func:`lightning_fp8.selection.linear_layers` gives them.
            recipe: one that :meth:`support` does not refuse.
            autocast_only: FP8 under autocast only: where autocast is off, layers run in high precision.
        """

    @abstractmethod
    def revert(self, model: nn.Module) -> None:
        """Turn every layer that this backend converted back into the ``nn.Linear`` it was."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), tuple(sorted(vars(self).items()))))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"
