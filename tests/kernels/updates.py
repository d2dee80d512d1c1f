"""What the fused update of scales is held to: ``update_scales`` and ``finish_step``, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_fp8.amax_history import AmaxHistory, update_scales
from lightning_fp8.recipes import DelayedScaling
from lightning_fp8.statistics import StatisticsTable
from tests.kernels.agreement import assert_same

RECIPES = [
    DelayedScaling(amax_history_len=3),
    DelayedScaling(amax_history_len=1, margin=0.263, format="e4m3"),
    DelayedScaling(amax_history_len=20, amax_compute_algo="most_recent", smoothing=0.3, max_scale=1e4),
    DelayedScaling(amax_history_len=5, smoothing=0.5, power_of_two=True, margin=1.0),
]


def check_update(step: Callable[..., None], recipe: DelayedScaling, device: str) -> None:
    """Several steps of ``step`` on ``device`` beside the reference's on the CPU."""
    generator = torch.Generator().manual_seed(0)
    table = StatisticsTable(["a", "b", "c", "d", "e"])
    history = AmaxHistory(recipe, table)
    fast = [tensor.clone().to(device) for tensor in (table.data, history.values, history.position)]
    maxima = history.format_maxima.to(device)
    for _ in range(5):
        amax = torch.randn(5, 3, generator=generator).mul(4).exp()
        amax[torch.rand(5, 3, generator=generator) < 0.2] = -1.0
        amax[0, 0], amax[1, 1], amax[2, 2], amax[3, 0], amax[4, 1] = torch.nan, torch.inf, 0.0, 1e-41, 3e38
        amax = amax.view(-1)[torch.randperm(15, generator=generator)].view(5, 3)
        table.amax.copy_(amax)
        fast[0][..., 0] = amax.to(device)
        step(*fast, maxima, recipe)
        update_scales(table.data, history.values, history.position, history.format_maxima, recipe)
        table.finish_step()
        references = (table.data, history.values, history.position)
        for name, got, want in zip(("table", "history", "position"), fast, references, strict=True):
            assert_same(got, want, f"{recipe}: {name}")
