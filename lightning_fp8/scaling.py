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

from lightning_fp8.formats import MAX_SCALE, MIN_SCALE, compute_scale, round_down_to_power_of_two
from lightning_fp8.kernels.capability import has_fast_casts
from lightning_fp8.ranks import world_size
from lightning_fp8.recipes import ROLES, DelayedScaling, Recipe, StaticScaling, get_recipe
from lightning_fp8.statistics import AMAX, LAST_AMAX, SCALE, SCALE_TRANSPOSED, StatisticsTable, on_cpu


class ScalingState:
    """The scales of a set of layers under one recipe.

    Args:
        recipe: where scales come from.
        table: the layers' statistics; scales live there.

    Attributes:
        history: amaxes of past steps, fp32 ``[layers, 3, amax_history_len]``, a ring with a position of its own for
            every layer and role, so that layers that did not run keep theirs; ``None`` unless the recipe has one.
        position: int64 ``[layers, 3]``, where the next amax goes.
        steps: how often :meth:`step` was called in this process.
        warned: whether somebody was told that it is not called.
    """

    def __init__(self, recipe: Recipe, table: StatisticsTable) -> None:
        self.recipe = recipe
        self.table = table
        self.history: Tensor | None = None
        self.position: Tensor | None = None
        self.steps = 0
        self.warned = False
        # Kept on the device: making it anew each step would wait for the copy.
        self._format_maxima = _format_maxima(recipe, table.device)
        if isinstance(recipe, DelayedScaling):
            shape = (len(table.names), len(ROLES))
            self.history = torch.zeros(*shape, recipe.amax_history_len, dtype=torch.float32, device=table.device)
            self.position = torch.zeros(shape, dtype=torch.int64, device=table.device)
        if isinstance(recipe, StaticScaling):
            for index, role in enumerate(ROLES):
                table.data[:, index, [SCALE, SCALE_TRANSPOSED]] = recipe.scale_of(role)

    def to(self, device: torch.device) -> None:
        """Move the table and the history."""
        self.table.to(device)
        self._format_maxima = self._format_maxima.to(device)
        if self.history is not None and self.position is not None:
            self.history = self.history.to(device)
            self.position = self.position.to(device)

    def step(self, group: dist.ProcessGroup | None = None) -> None:
        """Move the scales after a completed optimizer step, and begin a new window of amaxes.

        Args:
            group: the ranks that share amaxes; ``None`` is all of them. Every rank of it must call.
        """
        self.steps += 1
        self.share_amaxes(group)
        if isinstance(self.recipe, DelayedScaling) and self.history is not None and self.position is not None:
            if self.recipe.smoothing:
                # What the first window took from one rank's data would linger in the average, different on each rank.
                self._unset_first_scales(self.table.data[..., LAST_AMAX] < 0)
            state = (self.table.data, self.history, self.position, self._format_maxima, self.recipe)
            if has_fast_casts(self.table.device):
                # Triton is optional, and slow to import.
                from lightning_fp8.kernels.scale_update import step_scales

                step_scales(*state)
                return
            update_scales(*state)
        self.table.finish_step()

    def share_amaxes(self, group: dist.ProcessGroup | None = None) -> None:
        """Give every rank the window's largest amaxes of all, so that any rank's state stands for all of them.

        Args:
            group: as in :meth:`step`.
        """
        if isinstance(self.recipe, DelayedScaling) and self.recipe.reduce_amax:
            reduce_amax(self.table.amax, group)

    @property
    def differs_by_rank(self) -> bool:
        """Whether each rank takes its scales from a history of its own."""
        return isinstance(self.recipe, DelayedScaling) and not self.recipe.reduce_amax

    def discard(self, rejected: Tensor | bool = True) -> None:
        """Forget the window's amaxes, as if the step had not run.

        Args:
            rejected: whether to; a bool tensor (scalar, on the table's device) decides without a host read.
        """
        self.table.discard(rejected)
        # Scales that the rejected step itself took from its data are forgotten too.
        self._unset_first_scales(rejected)

    def _unset_first_scales(self, where: Tensor | bool) -> None:
        """Unset the scales that the first window took from its data, before any amax entered the history."""
        if self.history is None:
            return
        first = where & (self.history.amax(-1) == 0)
        for column in (SCALE, SCALE_TRANSPOSED):
            scale = self.table.data[..., column]
            scale.copy_(torch.where(first, 0.0, scale))

    def live_state(self) -> dict[str, Any]:
        """What :meth:`state_dict` copies to the CPU, where it is: for copies that do not wait for the device."""
        state: dict[str, Any] = {"recipe": self.recipe.to_dict(), "table": self.table.live_state()}
        if self.history is not None and self.position is not None:
            state |= {"history": self.history, "position": self.position}
        return state

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, on the CPU."""
        return on_cpu(self.live_state())

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
        if self.history is not None and self.position is not None:
            rows = {name: row for row, name in enumerate(state["table"]["names"])}
            for index, name in enumerate(self.table.names):
                if name in rows:
                    self.history[index].copy_(state["history"][rows[name]])
                    self.position[index].copy_(state["position"][rows[name]])
        return missing


def with_gradients_times(factor: float, state: dict[str, Any]) -> dict[str, Any]:
    """What :meth:`ScalingState.state_dict` would have given with gradients ``factor`` times as large.

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


def update_scales(
    table: Tensor, history: Tensor, position: Tensor, format_maxima: Tensor, recipe: DelayedScaling
) -> None:
    """Enter the window's amaxes into the history and compute the next scales, in place.

    An operand that was not seen, or whose amax is not finite, keeps its history and scale. One whose history is all
    zero keeps its scale too: zeros tell nothing about the values to come.

    Args:
        table: fp32 ``[layers, 3, 4]``, the statistics.
        history: fp32 ``[layers, 3, length]``.
        position: int64 ``[layers, 3]``.
        format_maxima: fp32 ``[2, 3]``: the largest value of each role's format, straight and transposed.
        recipe: the settings.
    """
    amax = table[..., AMAX]
    seen = amax.isfinite() & (amax >= 0)
    place = position.unsqueeze(-1)
    history.scatter_(-1, place, torch.where(seen.unsqueeze(-1), amax.unsqueeze(-1), history.gather(-1, place)))
    position.copy_((position + seen) % history.shape[-1])
    basis = history.amax(-1) if recipe.amax_compute_algo == "max" else amax
    movable = seen & (basis > 0)
    for column, maxima in zip((SCALE, SCALE_TRANSPOSED), format_maxima, strict=True):
        old = table[..., column]
        new = compute_scale(basis, maxima, recipe.margin)
        if recipe.smoothing:
            new = torch.where(old > 0, recipe.smoothing * old + (1 - recipe.smoothing) * new, new)
        new = new.clamp(max=recipe.max_scale or MAX_SCALE)
        if recipe.power_of_two:
            new = round_down_to_power_of_two(new)
        old.copy_(torch.where(movable, new, old))


def _times(factor: float, amax: Tensor) -> Tensor:
    """Amaxes of values that are ``factor`` times as large: finite ones stay so, and not seen stays not seen."""
    product = (amax * factor).clamp(max=torch.finfo(torch.float32).max)
    return torch.where(amax.isfinite() & (amax > 0), product, amax)


def _format_maxima(recipe: Recipe, device: torch.device) -> Tensor:
    """The largest value of each role's format, straight and transposed: fp32 ``[2, 3]``."""
    casts = [recipe.casts[role] for role in ROLES]
    pairs = [(c.straight, c.transposed) for c in casts]
    maxima = [[c.format.max if c else 1.0 for c in uses] for uses in zip(*pairs, strict=True)]
    return torch.tensor(maxima, dtype=torch.float32, device=device)
