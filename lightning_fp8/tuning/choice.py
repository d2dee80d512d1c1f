"""``layers="auto"``: FP8 where it is faster on this GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from lightning_fp8.backends import Backend
from lightning_fp8.recipes import Recipe
from lightning_fp8.selection import Decision, linear_layers
from lightning_fp8.tuning.layers import measure_layer
from lightning_fp8.tuning.table import MeasuredTimes, shipped_tables

#: Tokens a step where nobody says otherwise.
DEFAULT_TOKENS = 8192
#: What a layer must gain for FP8: below it the host's further launches would eat the gain.
LEAST_SPEEDUP = 1.05


class Times(Protocol):
    """Anything that knows how much faster a layer is in FP8."""

    def speedup(self, recipe: str, tokens: int, in_features: int, out_features: int) -> float: ...


def keep_faster(
    decisions: list[Decision], model: nn.Module, recipe: Recipe, times: Times, origin: str, tokens: int
) -> list[Decision]:
    """Leave out the layers that FP8 would not make faster, each with its figure.

    Args:
        decisions: what could be converted.
        model: holds the layers.
        recipe: how they would run.
        times: measured times.
        origin: where they come from, for people to read.
        tokens: rows of the layers' inputs.
    """
    layers = linear_layers(model)

    def judge(decision: Decision) -> Decision:
        if not decision.converted:
            return decision
        layer = layers[decision.name]
        speedup = times.speedup(recipe.name, tokens, layer.in_features, layer.out_features)
        figure = f"x{speedup:.2f} against bf16 at {tokens} tokens, {origin}"
        if speedup < LEAST_SPEEDUP:
            return replace(decision, converted=False, reason=f"FP8 would not be faster: {figure}")
        return replace(decision, reason=f"{decision.reason}, {figure}")

    return [judge(decision) for decision in decisions]


def times_on(device: torch.device, recipe: Recipe, backend: Backend) -> tuple[Times, str]:
    """Measured times for a GPU and where they come from: the shipped table, else measurements kept on disk."""
    gpu = torch.cuda.get_device_name(device)
    table = shipped_tables().get(gpu)
    if table is not None and recipe.name in table.times:
        return table, f"table of {table.date}"

    def measure(variant: str, tokens: int, in_features: int, out_features: int) -> float:
        return measure_layer(tokens, in_features, out_features, None if variant == "bf16" else recipe, backend)

    return MeasuredTimes(gpu, torch.__version__, measure), "measured here"


def from_rank_zero(decisions: list[Decision]) -> list[Decision]:
    """Every rank gets rank 0's decisions, so that all convert the same layers; every rank must call."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return decisions
    message = [decisions]
    dist.broadcast_object_list(message, src=0)
    return message[0]
