"""Tables of made-up times that behave like a GPU's: a floor, and a rate."""

from __future__ import annotations

import torch

from lightning_fp8.backends import NativeBackend, Support
from lightning_fp8.recipes import Recipe
from lightning_fp8.tuning.table import LayerTable, grid


def made_up_table(gpu: str = "NVIDIA H200", fp8_rate: float = 1250e9, fp8_host: float = 0.1) -> LayerTable:
    """In bf16 a layer takes 0.02 ms and its FLOPs at 690 TFLOP/s, in FP8 0.05 ms and those at ``fp8_rate`` a ms.

    The host needs a quarter as long in compiled models.
    """
    host = {"bf16": 0.04, "delayed": fp8_host}
    table = LayerTable(gpu, "2.11.0", "2026-01-02", {}, host, {name: ms / 4 for name, ms in host.items()})
    table.times["bf16"] = {(t, i, o): 0.02 + 6 * t * i * o / 690e9 for t, i, o in grid()}
    table.times["delayed"] = {(t, i, o): 0.05 + 6 * t * i * o / fp8_rate for t, i, o in grid()}
    return table


class PretendNative(NativeBackend):
    """A backend that takes the CPU for a GPU with FP8 tensor cores."""

    def support(self, recipe: Recipe, device: torch.device) -> Support:
        return Support("native", "for this test")


class Known:
    """Times that say which layers gain; everything else takes as long in FP8."""

    def __init__(self, *fast: tuple[int, int]) -> None:
        self.fast = fast

    def milliseconds(self, variant: str, tokens: int, in_features: int, out_features: int) -> float:
        return 1.0 if variant != "bf16" and (in_features, out_features) in self.fast else 2.0

    def host_milliseconds(self, variant: str, compiled: bool) -> float:
        return 0.1


class SlowHost(Known):
    """The host issues a layer sooner than the GPU runs it in compiled code only, or in bf16."""

    def host_milliseconds(self, variant: str, compiled: bool) -> float:
        return 0.1 if compiled else 2.5 if variant != "bf16" else 1.0
