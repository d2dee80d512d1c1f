"""Values that casts compute: for each a function of fresh inputs whose last operation is cast."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Case = tuple[Callable[..., Tensor], list[tuple[int, ...]]]
ROWS, COLUMNS = 128, 256


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_gradient(gate_up: Tensor, gradient: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    g, u, d = gate.float(), up, gradient
    s = torch.sigmoid(g)
    d_gate = ((d * u).float() * (s * (1 + g * (1 - s)))).to(gate_up.dtype)
    return torch.cat([d_gate, d * F.silu(gate)], -1).view(-1, gate_up.shape[-1])


def quotient_and_reciprocal(gate: Tensor, gradient: Tensor) -> Tensor:
    divisor = 0.5 + torch.exp(-gate.float())
    halves = [gradient * (gate / divisor), gradient * divisor.reciprocal()]
    return torch.cat([half.to(gate.dtype) for half in halves], -1)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5).view(-1, x.shape[-1])


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias).view(-1, x.shape[-1])


#: By name: the function and the shapes of its inputs.
CASES: dict[str, Case] = {
    "swiglu": (swiglu, [(ROWS, 2 * COLUMNS)]),
    "swiglu gradient": (swiglu_gradient, [(2, ROWS // 2, 2 * COLUMNS), (2, ROWS // 2, COLUMNS)]),
    "quotient and reciprocal": (quotient_and_reciprocal, [(ROWS, COLUMNS)] * 2),
    "sigmoid far out": (lambda x: torch.sigmoid(x * 60), [(ROWS, COLUMNS)]),
    "gelu": (F.gelu, [(ROWS, COLUMNS)]),
    "gelu of few columns": (F.gelu, [(ROWS, 192)]),
    "gelu by tanh": (lambda x: F.gelu(x, approximate="tanh"), [(ROWS, COLUMNS)]),
    "tanh": (torch.tanh, [(ROWS, COLUMNS)]),
    "squared relu": (lambda x: F.relu(x).square(), [(ROWS, COLUMNS)]),
    "relu's gradient": (lambda x, d: torch.where(x <= 0, 0.0, d), [(ROWS, COLUMNS)] * 2),
    "rms norm": (rms_norm, [(2, ROWS // 2, COLUMNS), (COLUMNS,)]),
    "layer norm": (layer_norm, [(2, ROWS // 2, COLUMNS), (COLUMNS,), (COLUMNS,)]),
    "residual": (lambda x, y: x + y, [(ROWS, COLUMNS)] * 2),
    "bias, mask and scale": (lambda x, b, m, s: (x + b) * m / s, [(ROWS, COLUMNS), (COLUMNS,), (ROWS, 1), ()]),
    "columns from before the first": (lambda x: x[:, -5 * COLUMNS : COLUMNS] * 2, [(ROWS, 3 * COLUMNS)]),
    "columns from the end": (lambda x: x[:, -COLUMNS:] * 2, [(ROWS, 3 * COLUMNS)]),
    "columns of a wider matrix": (lambda x: x[:, 128 : 128 + COLUMNS] * 2, [(ROWS, 3 * COLUMNS)]),
    "matrices side by side": (lambda x, y, z: torch.cat([x, y, z], 1), [(ROWS, 256), (ROWS, 128), (ROWS, 128)]),
}


def inputs_of(name: str, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Random inputs, the same each time."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator) * 2).to(device, dtype) for shape in CASES[name][1]]
