"""The amaxes of past steps, and the scales that follow from them, for all layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.formats import MAX_SCALE, compute_scale, round_down_to_power_of_two
from lightning_fp8.kernels.capability import has_fast_casts
from lightning_fp8.recipes import ROLES, DelayedScaling
from lightning_fp8.statistics import AMAX, LAST_AMAX, SCALE, SCALE_TRANSPOSED, StatisticsTable


class AmaxHistory:
    """A ring of amaxes for every layer and role, each with a position of its own: layers that did not run keep theirs.

    Args:
        recipe: how scales follow.
        table: the layers' statistics.

    Attributes:
        recipe: as given.
        values: the amaxes, fp32 ``[layers, 3, amax_history_len]``; zero: none yet.
        position: int64 ``[layers, 3]``, where the next amax goes.
        format_maxima: fp32 ``[2, 3]``: the largest value of each role's format, straight and transposed.
    """

    def __init__(self, recipe: DelayedScaling, table: StatisticsTable) -> None:
        shape, device = (len(table.names), len(ROLES)), table.device
        self.recipe = recipe
        self.values = torch.zeros(*shape, recipe.amax_history_len, dtype=torch.float32, device=device)
        self.position = torch.zeros(shape, dtype=torch.int64, device=device)
        # Kept on the device: making it anew each step would wait for the copy.
        self.format_maxima = _format_maxima(recipe, device)

    def to(self, device: torch.device) -> None:
        """Move it."""
        self.values, self.position = self.values.to(device), self.position.to(device)
        self.format_maxima = self.format_maxima.to(device)

    def step(self, table: StatisticsTable) -> None:
        """Enter the window's amaxes, move the scales, and begin a new window."""
        if self.recipe.smoothing:
            # What the first window took from one rank's data would linger in the average, different on each rank.
            self.unset_first_scales(table, table.data[..., LAST_AMAX] < 0)
        state = (table.data, self.values, self.position, self.format_maxima, self.recipe)
        if has_fast_casts(table.device):
            # Triton is optional, and slow to import.
            from lightning_fp8.kernels.scale_update import step_scales

            step_scales(*state)
        else:
            update_scales(*state)
            table.finish_step()

    def unset_first_scales(self, table: StatisticsTable, where: Tensor | bool) -> None:
        """Unset the scales that the first window took from its data, before any amax entered the history."""
        first = where & (self.values.amax(-1) == 0)
        for column in (SCALE, SCALE_TRANSPOSED):
            scale = table.data[..., column]
            scale.copy_(torch.where(first, 0.0, scale))

    def live_state(self) -> dict[str, Tensor]:
        """The tensors themselves."""
        return {"history": self.values, "position": self.position}

    def load(self, state: dict[str, Any], rows: Sequence[int | None]) -> None:
        """Go on with that of other layers.

        Args:
            state: holds what :meth:`live_state` gave.
            rows: of each layer here its row there; ``None``: it keeps what it has.
        """
        for index, row in enumerate(rows):
            if row is not None:
                self.values[index].copy_(state["history"][row])
                self.position[index].copy_(state["position"][row])


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


def _format_maxima(recipe: DelayedScaling, device: torch.device) -> Tensor:
    """The largest value of each role's format, straight and transposed: fp32 ``[2, 3]``."""
    casts = [recipe.casts[role] for role in ROLES]
    pairs = [(c.straight, c.transposed) for c in casts]
    maxima = [[c.format.max if c else 1.0 for c in uses] for uses in zip(*pairs, strict=True)]
    return torch.tensor(maxima, dtype=torch.float32, device=device)
