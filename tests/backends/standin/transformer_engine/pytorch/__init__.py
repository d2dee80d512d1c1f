from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_engine.pytorch.quantization import FP8GlobalStateManager, RecipeState, autocast, make_quantizers

__all__ = ["DotProductAttention", "LayerNormLinear", "LayerNormMLP", "Linear", "autocast"]


def is_fp8_available(return_reason: bool = False) -> Any:
    return (True, "") if return_reason else True


def is_fp8_block_scaling_available(return_reason: bool = False) -> Any:
    return (True, "") if return_reason else True


def is_mxfp8_available(return_reason: bool = False) -> Any:
    reason = "Device compute capability 10.0 or higher required for MXFP8 execution."
    return (False, reason) if return_reason else False


class _Product(torch.autograd.Function):
    """``x @ w^T + b`` of cast operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, xq: Tensor, w: Tensor, wq: Tensor, b: Tensor | None, grad: Any) -> Tensor:
        ctx.save_for_backward(xq, wq)
        ctx.grad, ctx.dtypes = grad, (x.dtype, w.dtype, None if b is None else b.dtype)
        y = xq @ wq.t()
        # A view, like the real one's: autograd lets nobody change it in place.
        return (y if b is None else y + b).to(x.dtype).view(y.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        xq, wq = ctx.saved_tensors
        gq = ctx.grad(gradient)
        bias = None if ctx.dtypes[2] is None else gradient.sum(0).to(ctx.dtypes[2])
        return (gq @ wq).to(ctx.dtypes[0]), None, (gq.t() @ xq).to(ctx.dtypes[1]), None, bias, None


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {}
        self.quantizers: dict[str, list[Any]] = {"scaling_fwd": [], "scaling_bwd": []}
        self._fp8_workspaces: dict[str, Tensor] = {}

    def _parameter(self, name: str, *shape: int | None, device: Any) -> None:
        if None in shape:
            setattr(self, name, None)
            return
        parameter = nn.Parameter(torch.empty(*shape, device=device))
        if parameter.device.type != "meta":
            nn.init.normal_(parameter)
        self.register_parameter(name, parameter)

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        recipe = FP8GlobalStateManager.recipe
        if not FP8GlobalStateManager.enabled or "scaling_fwd" in self.fp8_meta:
            return
        for key, count in (("scaling_fwd", 3 * num_gemms), ("scaling_bwd", 2 * num_gemms)):
            self.fp8_meta[key] = RecipeState(recipe, key == "scaling_fwd", count)
            self.quantizers[key] = make_quantizers(self.fp8_meta[key], recipe)

    def _prepare(self, x: Tensor, num_gemms: int = 1) -> Tensor:
        assert FP8GlobalStateManager.enabled
        assert math.prod(x.shape[:-1]) % 8 == 0 and x.shape[-1] % 16 == 0
        self.init_fp8_metadata(num_gemms)
        FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(self.fp8_meta)
        device = x.device.type
        return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x

    def _multiply(self, x: Tensor, name: str, gemm: int, is_first_microbatch: bool | None) -> Tensor:
        weight, bias = getattr(self, f"{name}weight"), getattr(self, f"{name}bias")
        forward, backward = self.quantizers["scaling_fwd"], self.quantizers["scaling_bwd"]
        if is_first_microbatch is False:
            cast = self._fp8_workspaces[name]
        else:
            cast = forward[3 * gemm + 1](weight)
            if is_first_microbatch:
                self._fp8_workspaces[name] = cast
        with torch.autocast(x.device.type, enabled=False):
            return _Product.apply(x, forward[3 * gemm](x), weight, cast, bias, backward[2 * gemm])

    def _normalize(self, x: Tensor) -> Tensor:
        shape = (x.shape[-1],)
        if self.normalization == "RMSNorm":
            return F.rms_norm(x, shape, self.layer_norm_weight, self.eps)
        return F.layer_norm(x, shape, self.layer_norm_weight, self.layer_norm_bias, self.eps)

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        pass


class Linear(_Base):
    def __init__(self, in_features: int, out_features: int, bias: bool = True, device: Any = "cuda") -> None:
        super().__init__()
        self._parameter("weight", out_features, in_features, device=device)
        self._parameter("bias", out_features if bias else None, device=device)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        return self._multiply(self._prepare(inp), "", 0, is_first_microbatch)


class LayerNormLinear(_Base):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        self.eps, self.normalization = eps, normalization
        self._parameter("layer_norm_weight", in_features, device=device)
        self._parameter("layer_norm_bias", in_features if normalization == "LayerNorm" else None, device=device)
        self._parameter("weight", out_features, in_features, device=device)
        self._parameter("bias", out_features if bias else None, device=device)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        return self._multiply(self._normalize(self._prepare(inp)), "", 0, is_first_microbatch)


class LayerNormMLP(_Base):
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        self.eps, self.normalization, self.activation = eps, normalization, activation
        self._parameter("layer_norm_weight", hidden_size, device=device)
        self._parameter("layer_norm_bias", hidden_size if normalization == "LayerNorm" else None, device=device)
        self._parameter("fc1_weight", ffn_hidden_size, hidden_size, device=device)
        self._parameter("fc2_weight", hidden_size, ffn_hidden_size, device=device)
        self._parameter("fc1_bias", ffn_hidden_size if bias else None, device=device)
        self._parameter("fc2_bias", hidden_size if bias else None, device=device)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        x = self._normalize(self._prepare(inp, num_gemms=2))
        x = self._multiply(x, "fc1_", 0, is_first_microbatch)
        gelu = {"gelu": lambda y: F.gelu(y, approximate="tanh"), "relu": F.relu, "silu": F.silu}[self.activation]
        return self._multiply(gelu(x), "fc2_", 1, is_first_microbatch)


class DotProductAttention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.fp8_dpa = bool(FP8GlobalStateManager.enabled and getattr(FP8GlobalStateManager.recipe, "fp8_dpa", False))
        return F.scaled_dot_product_attention(q, k, v)
