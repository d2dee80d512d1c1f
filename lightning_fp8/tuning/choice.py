"""``layers="auto"``: FP8 where it is faster on this GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_fp8.backends import Backend, NativeBackend, Support
from lightning_fp8.casts import are_foreseeable
from lightning_fp8.ranks import world_size
from lightning_fp8.recipes import ROLES, Recipe, get_recipe
from lightning_fp8.selection import Decision, in_compiled, linear_layers
from lightning_fp8.tuning.layers import measure_host, measure_layer
from lightning_fp8.tuning.shares import Place, Share, shares_of_step
from lightning_fp8.tuning.table import LayerTable, MeasuredTimes, Times, shipped_tables

#: Tokens a step and GPU where nobody says otherwise.
DEFAULT_TOKENS = 8192


class Chosen(NamedTuple):
    """What ``layers="auto"`` stands for.

    Attributes:
        decisions: one for each linear layer.
        origin: what the choice rests on, for people to read.
        saved: the layers of a checkpoint, where the choice is a checkpoint's: not all of them may be eligible here.
    """

    decisions: list[Decision]
    origin: str
    saved: set[str] | None = None


class Source(NamedTuple):
    """Measured times.

    Attributes:
        times: the times.
        variant: the name under which they know the recipe.
        origin: where they come from, for people to read.
    """

    times: Times
    variant: str
    origin: str


def choose_layers(
    decisions: list[Decision],
    model: nn.Module,
    recipe: Recipe,
    backend: Backend,
    support: Support,
    device: torch.device,
    tokens: int | None,
    compiled: bool | None = None,
) -> Chosen:
    """Keep in FP8 the layers that it makes faster; without FP8 hardware, all.

    Rank 0 chooses for all, so every rank must call; it measures what no table knows.

    Args:
        decisions: what could be converted.
        model: holds the layers.
        recipe: how they would run.
        backend: what would multiply.
        support: how it runs the recipe on the device.
        device: where they will run.
        tokens: rows of the layers' inputs, a step and GPU; ``None`` is :data:`DEFAULT_TOKENS`.
        compiled: as in :func:`keep_faster`.
    """
    if support.kind != "native":
        return Chosen(decisions, "every eligible layer, for FP8 is emulated here")
    rows = DEFAULT_TOKENS if tokens is None else tokens
    hint = "by default, tokens=N tells better" if tokens is None else "by the tokens hint"

    def choose() -> Chosen:
        source = times_on(device, recipe, backend)
        chosen = keep_faster(decisions, model, source, rows, compiled)
        return Chosen(chosen, f"layers that FP8 makes faster at {rows} tokens ({hint}), times from {source.origin}")

    return _from_rank_zero(choose)


def choose_saved(decisions: list[Decision], saved: Sequence[str]) -> Chosen:
    """The choice that a checkpoint holds.

    Args:
        decisions: what could be converted.
        saved: names of the layers in FP8.
    """

    def judge(decision: Decision) -> Decision:
        if not decision.converted:
            return decision
        if decision.name in saved:
            return replace(decision, reason=f"{decision.reason}, as in the checkpoint")
        return replace(decision, converted=False, reason="not chosen, as in the checkpoint")

    return Chosen([judge(decision) for decision in decisions], "the checkpoint's choice", set(saved))


def keep_faster(
    decisions: list[Decision], model: nn.Module, source: Source, tokens: int, compiled: bool | None = None
) -> list[Decision]:
    """Leave out the layers that FP8 would not make faster, each with its figure.

    Args:
        decisions: what could be converted.
        model: holds the layers.
        source: measured times.
        tokens: rows of the layers' inputs.
        compiled: whether layers run in compiled code; ``None``: those that lie in a module which is compiled.
    """
    layers, in_graphs = linear_layers(model), in_compiled(model)
    candidates = {d.name: layers[d.name] for d in decisions if d.converted and not is_lazy(layers[d.name].weight)}
    places = {
        name: Place(tokens, layer.in_features, layer.out_features, layer in in_graphs if compiled is None else compiled)
        for name, layer in candidates.items()
    }
    return keep_gaining(decisions, shares_of_step(source.times, source.variant, places))


def keep_gaining(decisions: list[Decision], shares: Mapping[str, Share]) -> list[Decision]:
    """Leave out the layers that do not gain enough, each with its figure; those without one stay as they are."""

    def judge(decision: Decision) -> Decision:
        share = shares.get(decision.name)
        if share is None:
            return decision
        gain = f"x{share.speedup:.2f} against bf16"
        if share.gains:
            return replace(decision, reason=f"{decision.reason}, {gain}")
        limit = "; the host's time to issue it counts too" if share.host_bound else ""
        return replace(decision, converted=False, reason=f"FP8 would not be faster: {gain}{limit}")

    return [judge(decision) for decision in decisions]


def times_on(device: torch.device, recipe: Recipe, backend: Backend) -> Source:
    """Measured times for a GPU: the shipped table, else measurements kept on disk.

    Args:
        device: the GPU.
        recipe: what will run.
        backend: what will multiply.
    """
    gpu = torch.cuda.get_device_name(device)
    table = shipped_tables().get(gpu)
    variant = variant_in(table, recipe) if table is not None and backend == NativeBackend() else None
    if table is not None and variant is not None:
        return Source(table, variant, f"the table shipped for {gpu} ({table.date}, torch {table.torch})")

    def measure(variant: str, tokens: int, in_features: int, out_features: int) -> float:
        with torch.cuda.device(device):
            return measure_layer(tokens, in_features, out_features, None if variant == "bf16" else recipe, backend)

    def host(variant: str, compiled: bool) -> float:
        with torch.cuda.device(device):
            return measure_host(None if variant == "bf16" else recipe, backend, compiled)

    times = MeasuredTimes(gpu, torch.__version__, measure, host)
    # Every setting, defaults too: the measurements outlive this version of the package.
    return Source(times, f"{backend!r} {recipe.to_dict()}", f"measurements on this machine, kept in {times.path}")


def variant_in(table: LayerTable, recipe: Recipe) -> str | None:
    """The recipe of ``table`` that does the same work as ``recipe``; ``None`` if none does."""
    known = (variant for variant in table.times if variant != "bf16")
    return next((variant for variant in known if _work(get_recipe(variant)) == _work(recipe)), None)


def _work(recipe: Recipe) -> list[object]:
    """What decides the time a recipe takes: where scales come from, whether foreseen, and which values share one."""
    from_data, pairs = recipe.source == "data", [(recipe.casts[r].straight, recipe.casts[r].transposed) for r in ROLES]
    granularities = [use and use.granularity for pair in pairs for use in pair]
    return [from_data, *granularities, *(from_data and are_foreseeable(*pair) for pair in pairs)]


def _from_rank_zero(choose: Callable[[], Chosen]) -> Chosen:
    """Every rank gets rank 0's choice, so that all convert the same layers; every rank must call.

    Raises:
        RuntimeError: rank 0 could not choose; there its own exception is raised.
    """
    if world_size() == 1:
        return choose()
    message: list[Chosen | None] = [None]
    try:
        if dist.get_rank() == 0:
            message = [choose()]
    finally:
        # Whatever happens on rank 0, the others must not wait for ever.
        dist.broadcast_object_list(message, src=0)
    if message[0] is None:
        raise RuntimeError("Rank 0 could not choose the layers for FP8: see its error.")
    return message[0]
