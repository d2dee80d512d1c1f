"""torchao's float8 and MX matrix products on layers that stay what they are.

Used are torchao's autograd functions (``float8.float8_linear.matmul_with_hp_or_float8_args``, and ``mx_mm`` of
``prototype.moe_training.mxfp8_linear``, in 0.17 of ``prototype.mx_formats.mx_linear``), never its module swap: that one
drops hooks and the training flag, replaces subclasses and un-ties weights, and its forward knows no CPU autocast, no
empty batch and no token count that is not a multiple of 16.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8.amaxes import record_amax, record_gradient
from lightning_fp8.backends.base import Backend, Support, why_emulate
from lightning_fp8.casts import Cast
from lightning_fp8.checks import first_line
from lightning_fp8.kernels.capability import Hardware
from lightning_fp8.kernels.reference import pad_rows
from lightning_fp8.linear import Float8Linear, Float8State
from lightning_fp8.recipes import ROLES, MXFP8Scaling, Recipe, RowwiseScaling, TensorwiseScaling
from lightning_fp8.scaling import ScalingState

OLDEST = (0, 17)


class TorchaoBackend(Backend):
    """torchao multiplies: scales from the data at hand, per tensor, per row or per 32 values.

    Meant for models compiled by ``torch.compile``: torchao's casts are plain torch operations, slow one by one. On
    devices without the tensor cores torchao emulates them with the same operands.
    """

    name = "torchao"

    def support_on(self, recipe: Recipe, hardware: Hardware) -> Support:
        if (against := _why_not_recipe(recipe)) is not None:
            return Support("refused", against)
        if (reason := why_emulate(recipe, hardware)) is not None:
            return Support("emulated", f"{reason}: emulated by torchao")
        return Support("native", "FP8 tensor cores, by torchao")

    def why_not_installed(self, recipe: Recipe) -> str | None:
        remedy = f"pip install 'torchao>={'.'.join(map(str, OLDEST))}'."
        if importlib.util.find_spec("torchao") is None:
            return f"torchao is not installed: {remedy}"
        installed = version("torchao")
        if tuple(int(part) for part in installed.split(".")[:2]) < OLDEST:
            return f"torchao {installed} is too old: {remedy}"
        try:
            _mx_product() if isinstance(recipe, MXFP8Scaling) else _float8_product()
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            return f"torchao {installed} lacks what is needed here ({first_line(error)}): {remedy}"
        return None

    def make_state(self, scaling: ScalingState, index: int, layer: nn.Linear, autocast_only: bool) -> Float8State:
        return TorchaoState(scaling, index, autocast_only)


class TorchaoState(Float8State):
    """What a :class:`TorchaoLinear` needs beside its parameters.

    Attributes:
        product: multiplies an input by a weight.
        row_multiple: what the number of rows is padded to.
    """

    def link(self) -> None:
        super().link()
        recipe = self.scaling.recipe
        emulate = why_emulate(recipe, self.scaling.table.device) is not None
        mx = isinstance(recipe, MXFP8Scaling)
        self.product: Float8Product | MXProduct = MXProduct(emulate) if mx else Float8Product(recipe, emulate)
        self.row_multiple = recipe.size_multiple

    @property
    def layer_class(self) -> type[Float8Linear]:
        return TorchaoLinear


class TorchaoLinear(Float8Linear):
    """A linear layer that multiplies in FP8 with torchao."""

    fp8: TorchaoState

    def multiply(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        fp8, rows = self.fp8, x.shape[0]
        # torchao gives the result the dtype of the input.
        x = x.to(out_dtype)
        bias = None if self.bias is None else self.bias.to(out_dtype)
        if rows == 0:
            return self.multiply_uncast(x, self.weight.to(out_dtype), bias)
        if self.training:
            record_amax(x, fp8.slots[0])
            record_amax(self.weight, fp8.slots[1])
        y = fp8.product(pad_rows(x, fp8.row_multiple), self.weight).narrow(0, 0, rows)
        if self.training:
            y = record_gradient(y, fp8.slots[2])
        return y if bias is None else y + bias


class Float8Product:
    """``x @ weight^T`` by torchao's float8 autograd function.

    Args:
        recipe: tensorwise or rowwise.
        emulate: multiply in fp32 instead of on tensor cores.
    """

    def __init__(self, recipe: Recipe, emulate: bool) -> None:
        from torchao.float8.config import CastConfig, Float8LinearConfig, ScalingGranularity, ScalingType
        from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

        def cast_config(cast: Cast | None, other: Cast | None) -> Any:
            if cast is None:
                # The format is that of the other use: torchao asks for one per operand.
                return CastConfig(ScalingType.DISABLED, target_dtype=other.format.dtype if other else None)
            granularity = ScalingGranularity.AXISWISE if cast.granularity == "rowwise" else None
            return CastConfig(
                scaling_granularity=granularity or ScalingGranularity.TENSORWISE, target_dtype=cast.format.dtype
            )

        casts = [recipe.casts[role] for role in ROLES]
        straight = [cast_config(use.straight, use.transposed) for use in casts]
        transposed = [cast_config(use.transposed, use.straight) for use in casts]
        self.config = Float8LinearConfig(
            cast_config_input=straight[0],
            cast_config_input_for_grad_weight=transposed[0],
            cast_config_weight=straight[1],
            cast_config_weight_for_grad_input=transposed[1],
            cast_config_grad_output=straight[2],
            cast_config_grad_output_for_grad_weight=transposed[2],
            emulate=emulate,
            round_scales_to_power_of_2=_power_of_two(recipe),
        )
        gemms = (
            self.config.gemm_config_output,
            self.config.gemm_config_grad_input,
            self.config.gemm_config_grad_weight,
        )
        self.function = _float8_product()
        self.products = LinearMMConfig(*(ScaledMMConfig(emulate, gemm.use_fast_accum, False, False) for gemm in gemms))

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """``[rows, in]`` times ``[out, in]`` transposed, in the dtype of ``x``."""
        return self.function.apply(x, weight.t(), self.products, self.config)


class MXProduct:
    """``x @ weight^T`` by torchao's MX autograd function; the weight is rounded to the dtype of ``x`` first.

    Args:
        emulate: multiply the dequantised operands instead of on tensor cores.
    """

    def __init__(self, emulate: bool) -> None:
        self.emulate = emulate
        self.function = _mx_product()

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """``[rows, in]`` times ``[out, in]`` transposed, in the dtype of ``x``."""
        from torchao.prototype.mx_formats.config import (
            MXFP8Dim0CastKernelChoice,
            MXFP8Dim1CastKernelChoice,
            ScaleCalculationMode,
        )
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        e4m3 = torch.float8_e4m3fn
        kernels: tuple[Any, ...] = (
            (KernelPreference.EMULATED, MXFP8Dim0CastKernelChoice.TORCH, MXFP8Dim1CastKernelChoice.TORCH)
            if self.emulate
            else (KernelPreference.AUTO, MXFP8Dim0CastKernelChoice.TRITON, MXFP8Dim1CastKernelChoice.CUDA)
        )
        # RCEIL rounds the shared scale up, as this package's recipe does.
        return self.function.apply(
            x, weight.to(x.dtype), e4m3, e4m3, e4m3, 32, *kernels, ScaleCalculationMode.RCEIL, False
        )


def _float8_product() -> Any:
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    return matmul_with_hp_or_float8_args


def _mx_product() -> Any:
    try:
        from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    except ImportError:  # torchao 0.17
        from torchao.prototype.mx_formats.mx_linear import mx_mm
    return mx_mm


def _why_not_recipe(recipe: Recipe) -> str | None:
    """Why torchao cannot cast as ``recipe`` says, with the remedy."""
    if not isinstance(recipe, (TensorwiseScaling, RowwiseScaling, MXFP8Scaling)):
        return (
            "torchao takes scales from the data, one for a tensor, a row or 32 values: use the tensorwise, "
            "tensorwise_pow2, rowwise, rowwise_gw_hp or mxfp8 recipe, or backend='native'."
        )
    for role in ROLES:
        casts = recipe.casts[role].uses
        if len({cast.format for cast in casts}) > 1:
            return f"torchao casts {role} to one format for both of its GEMMs: use another format or backend='native'."
        for cast in casts:
            if cast.margin:
                return "torchao knows no margin: use margin=0 or backend='native'."
            if cast.granularity == "1x32" and cast.format.name != "e4m3":
                return "torchao casts MX operands to E4M3 alone: use format='e4m3' or backend='native'."
    return None


def _power_of_two(recipe: Recipe) -> bool:
    straight = recipe.casts["input"].straight
    return straight is not None and straight.power_of_two
