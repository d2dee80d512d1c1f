"""This package's own kernels and torch's scaled matrix products; emulated where there are no FP8 tensor cores."""

from __future__ import annotations

from typing import get_args

from torch import nn

from lightning_fp8.backends.base import Backend, Support, why_emulate
from lightning_fp8.checks import check_flag
from lightning_fp8.kernels import fbgemm
from lightning_fp8.kernels.capability import Hardware
from lightning_fp8.linear import Float8State
from lightning_fp8.ops import GemmLibrary
from lightning_fp8.recipes import Recipe
from lightning_fp8.scaling import ScalingState


class NativeBackend(Backend):
    """The default backend.

    Every recipe runs everywhere: on tensor cores where the device has them for the recipe, else with the same
    quantised operands in fp32 (CPU) or bf16 (GPU) arithmetic.

    Args:
        gemm: what multiplies the quantised operands: ``"torch"`` (cuBLASLt and CUTLASS, the faster one on an H200), or
            ``"fbgemm"`` for the products that FBGEMM's kernels take (torch's multiply the others).
        recompute_weight_cast: cast weights again in backward instead of keeping their transposed FP8 copies from
            forward, one byte a parameter. Same results, one more read of the weights. Sharded models always do.

    Raises:
        ValueError: another word.
    """

    name = "native"

    def __init__(self, gemm: GemmLibrary = "torch", recompute_weight_cast: bool = False) -> None:
        if gemm not in get_args(GemmLibrary):
            raise ValueError(f"gemm must be one of {', '.join(map(repr, get_args(GemmLibrary)))}, got {gemm!r}.")
        check_flag(recompute_weight_cast=recompute_weight_cast)
        self.gemm = gemm
        self.recompute_weight_cast = recompute_weight_cast

    def support_on(self, recipe: Recipe, hardware: Hardware) -> Support:
        if self.gemm == "fbgemm" and (against := fbgemm.why_not(recipe, hardware)) is not None:
            return Support("refused", against)
        if (reason := why_emulate(recipe, hardware)) is not None:
            return Support("emulated", reason)
        return Support("native", f"FP8 tensor cores, GEMMs by {self.gemm}")

    def why_not_installed(self, recipe: Recipe) -> str | None:
        return fbgemm.why_not_installed() if self.gemm == "fbgemm" else None

    def make_state(self, scaling: ScalingState, index: int, layer: nn.Linear, autocast_only: bool) -> Float8State:
        return Float8State(scaling, index, autocast_only, self.gemm, self.recompute_weight_cast)
