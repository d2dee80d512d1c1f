"""Small models, and a backend that runs the stand-in of Transformer Engine on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_fp8 import LayerSelection, convert_model
from lightning_fp8.backends import Backend, Support
from lightning_fp8.backends.transformer_engine import TransformerEngineBackend
from lightning_fp8.kernels.capability import Hardware
from lightning_fp8.model import Conversion, conversions
from lightning_fp8.recipes import Recipe

ALL = LayerSelection(head=True)


class StandIn(TransformerEngineBackend):
    """Transformer Engine's backend, its requirement of a CUDA device aside."""

    def support_on(self, recipe: Recipe, hardware: Hardware) -> Support:
        against = self.why_not_recipe(recipe)
        return Support("refused", against) if against else Support("emulated", "a stand-in")

    def why_not_installed(self, recipe: Recipe) -> str | None:
        return None


class Block(nn.Module):
    """Norm, linear layer, norm and MLP, with a residual."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm, bias: bool = True) -> None:
        super().__init__()
        self.ln_1 = norm(32, eps=1e-5)
        self.attention = nn.Linear(32, 32, bias=bias)
        self.ln_2 = norm(32, eps=1e-5)
        self.mlp = nn.Sequential(nn.Linear(32, 64, bias=bias), nn.GELU("tanh"), nn.Linear(64, 32, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


FUSE = (("ln_1", "attention"), ("ln_2", "mlp.0", "mlp.1", "mlp.2"))


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))


def convert(model: nn.Module, recipe: Recipe | str, backend: Backend | str, **options: bool) -> Conversion:
    convert_model(model, recipe, backend=backend, layers=ALL, **options)
    return conversions(model)[0]


def batch(step: int, rows: int = 16, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(rows, 32, generator=torch.Generator().manual_seed(step))
