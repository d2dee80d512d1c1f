"""This package's own kernels and torch's scaled matrix products; emulated where there are no FP8 tensor cores."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fp8.backends.base import Backend, Runtime, Support
from lightning_fp8.convert import to_float8, to_linear
from lightning_fp8.kernels.capability import supports
from lightning_fp8.linear import Float8State
from lightning_fp8.recipes import ROLES, Recipe
from lightning_fp8.scaling import ScalingState
from lightning_fp8.selection import linear_layers
from lightning_fp8.statistics import StatisticsTable


class NativeBackend(Backend):
    """The default backend.

    Every recipe runs everywhere: on tensor cores where the device has them for the recipe, else with the same
    quantised operands in fp32 (CPU) or bf16 (GPU) arithmetic.
    """

    name = "native"

    def support(self, recipe: Recipe, device: torch.device) -> Support:
        casts = [recipe.casts[role] for role in ROLES]
        granularities = {use.granularity for pair in casts for use in (pair.straight, pair.transposed) if use}
        for granularity in sorted(granularities):
            native, reason = supports(granularity, device)
            if not native:
                return Support("emulated", reason)
        return Support("native", "FP8 tensor cores")

    def convert(self, model: nn.Module, names: list[str], recipe: Recipe, autocast_only: bool) -> Runtime:
        table = StatisticsTable(names, _device_of(model, names))
        scaling = ScalingState(recipe, table)
        to_float8(model, names, scaling, autocast_only)
        return NativeRuntime(scaling, [linear_layers(model)[name].__dict__["fp8"] for name in names])

    def revert(self, model: nn.Module) -> None:
        to_linear(model)


class NativeRuntime(Runtime):
    """The native layers of one model.

    Args:
        scaling: their scale state.
        states: each layer's own state, in the order of the table.
    """

    def __init__(self, scaling: ScalingState, states: list[Float8State]) -> None:
        self.scaling = scaling
        self.states = states

    @property
    def table(self) -> StatisticsTable:  # type: ignore[override]
        return self.scaling.table

    def step(self, group: dist.ProcessGroup | None = None) -> None:
        self.scaling.step(group)

    def discard(self, rejected: Tensor | bool = True) -> None:
        self.scaling.discard(rejected)

    def set_enabled(self, names: list[str], enabled: bool) -> None:
        for name in names:
            self.states[self.table.names.index(name)].enabled = enabled

    def state_dict(self) -> dict[str, Any]:
        return self.scaling.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        return self.scaling.load_state_dict(state)


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
