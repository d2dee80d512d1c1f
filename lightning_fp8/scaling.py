"""Scale state: from the amaxes that a step leaves behind to the scales of the next, for all layers at once.

The amaxes of a step gather in the :class:`~lightning_fp8.statistics.StatisticsTable`. When the next training step
begins, :meth:`ScalingState.step` reduces them over the ranks (one all-reduce), enters them into the history and moves
the scales. Nothing here reads the device from the host.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fp8.amax_history import AmaxHistory
from lightning_fp8.formats import MAX_SCALE, MIN_SCALE, round_down_to_power_of_two
from lightning_fp8.history import rows_of
from lightning_fp8.ranks import world_size
from lightning_fp8.recipes import ROLES, DelayedScaling, Recipe, StaticScaling, get_recipe
from lightning_fp8.statistics import AMAX, LAST_AMAX, SCALE, SCALE_TRANSPOSED, StatisticsTable


class ScalingState:
    """The scales of a set of layers under one recipe.

    Args:
        recipe: where scales come from.
        table: the layers' statistics; scales live there.

    Attributes:
        history: amaxes of past steps; ``None`` unless scales come from them.
        steps: how often :meth:`step` was called in this process.
        warned: whether somebody was told that it is not called.
    """

    def __init__(self, recipe: Recipe, table: StatisticsTable) -> None:
        self.recipe = recipe
        self.table = table
        self.history = AmaxHistory(recipe, table) if isinstance(recipe, DelayedScaling) else None
        self.steps = 0
        self.warned = False
        if isinstance(recipe, StaticScaling):
            for index, role in enumerate(ROLES):
                table.data[:, index, [SCALE, SCALE_TRANSPOSED]] = recipe.scale_of(role)

    def to(self, device: torch.device) -> None:
        """Move the table and the history."""
        self.table.to(device)
        if self.history is not None:
            self.history.to(device)

    def step(self, group: dist.ProcessGroup | None = None) -> None:
        """Move the scales after a completed optimizer step, and begin a new window of amaxes.

        Args:
            group: the ranks that share amaxes; ``None`` is all of them. Every rank of it must call.
        """
        self.steps += 1
        self.share_amaxes(group)
        if self.history is None:
            self.table.finish_step()
        else:
            self.history.step(self.table)

    def share_amaxes(self, group: dist.ProcessGroup | None = None) -> None:
        """Give every rank the window's largest amaxes of all, so that any rank's state stands for all of them.

        Args:
            group: as in :meth:`step`.
        """
        if self.history is not None and self.history.recipe.reduce_amax:
            reduce_amax(self.table.amax, group)

    @property
    def differs_by_rank(self) -> bool:
        """Whether each rank takes its scales from a history of its own."""
        return self.history is not None and not self.history.recipe.reduce_amax

    def discard(self, rejected: Tensor | bool = True) -> None:
        """Forget the window's amaxes, as if the step had not run.

        Args:
            rejected: whether to; a bool tensor (scalar, on the table's device) decides without a host read.
        """
        self.table.discard(rejected)
        if self.history is not None:
            # Scales that the rejected step itself took from its data are forgotten too.
            self.history.unset_first_scales(self.table, rejected)

    def live_state(self) -> dict[str, Any]:
        """Plain values, and the tensors themselves: for copies that do not wait for the device."""
        history = {} if self.history is None else self.history.live_state()
        return {"recipe": self.recipe.to_dict(), "table": self.table.live_state(), **history}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Load the state of the same recipe; layers are matched by name.

        Returns:
            Names of layers here that ``state`` does not have; they take their scales from the data.

        Raises:
            ValueError: ``state`` belongs to another recipe.
        """
        # As recipes, not as plain values: an earlier build may not have known all settings.
        theirs = get_recipe(state["recipe"])
        if theirs != self.recipe:
            raise ValueError(f"The state belongs to the recipe {theirs!r}, this run uses {self.recipe!r}.")
        missing = self.table.load_state_dict(state["table"])
        if self.history is not None:
            self.history.load(state, rows_of(self.table.names, state["table"]["names"]))
        return missing


def with_gradients_times(factor: float, state: dict[str, Any]) -> dict[str, Any]:
    """What :meth:`ScalingState.live_state` would have been with gradients ``factor`` times as large.

    Exact for powers of two. Constant scales stay what they are, and none leaves the recipe's bounds.

    Args:
        factor: positive.
        state: is left as it is.
    """
    recipe, gradient = get_recipe(state["recipe"]), ROLES.index("grad_output")
    data = state["table"]["data"].clone()
    changed = state | {"table": state["table"] | {"data": data}}
    for column in (AMAX, LAST_AMAX):
        data[:, gradient, column] = _times(factor, data[:, gradient, column])
    if isinstance(recipe, DelayedScaling):
        changed["history"] = state["history"].clone()
        changed["history"][:, gradient] = _times(factor, state["history"][:, gradient])
        for column in (SCALE, SCALE_TRANSPOSED):
            old = data[:, gradient, column]
            new = (old / factor).clamp(MIN_SCALE, recipe.max_scale or MAX_SCALE)
            new = round_down_to_power_of_two(new) if recipe.power_of_two else new
            data[:, gradient, column] = torch.where(old > 0, new, old)
    return changed


def reduce_amax(amax: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Every rank gets the largest amax of all, in place. Without an initialised process group nothing happens.

    A NaN becomes Inf first, for NCCL's MAX drops NaN. An operand that no rank saw stays not seen.

    Args:
        amax: fp32, any shape and strides.
        group: the ranks; ``None`` is all of them.
    """
    if world_size(group) == 1:
        return
    if not amax.numel():  # The table of a model without FP8 layers is on the CPU, where NCCL does not reach.
        return
    message = torch.where(amax.isnan(), torch.inf, amax).contiguous()
    dist.all_reduce(message, dist.ReduceOp.MAX, group)
    amax.copy_(message)


def _times(factor: float, amax: Tensor) -> Tensor:
    """Amaxes of values that are ``factor`` times as large: finite ones stay so, and not seen stays not seen."""
    product = (amax * factor).clamp(max=torch.finfo(torch.float32).max)
    return torch.where(amax.isfinite() & (amax > 0), product, amax)
