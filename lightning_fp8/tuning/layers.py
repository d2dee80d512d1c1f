"""How long one linear layer takes, forward and backward, in bf16 and in FP8."""

from __future__ import annotations

import torch
from torch import nn

from lightning_fp8.backends import Backend
from lightning_fp8.model import convert_model
from lightning_fp8.recipes import Recipe
from lightning_fp8.selection import LayerSelection


def measure_layer(
    tokens: int, in_features: int, out_features: int, recipe: Recipe | None, backend: Backend | str = "native"
) -> float:
    """Milliseconds that forward and backward take on the current GPU, without the host's part.

    The launches are replayed from a CUDA graph with a cold L2 cache, on random values.

    Args:
        tokens: rows of the input.
        in_features, out_features: sizes of the layer.
        recipe: how it runs in FP8; ``None`` is bf16.
        backend: what multiplies.
    """
    from triton.testing import do_bench

    device = torch.device("cuda")
    layer = nn.Linear(in_features, out_features, bias=False, device=device, dtype=torch.bfloat16)
    if recipe is not None:
        convert_model(layer, recipe, backend=backend, layers=LayerSelection(head=True))
    x = torch.randn(tokens, in_features, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(tokens, out_features, device=device, dtype=torch.bfloat16)

    def run() -> None:
        layer(x).backward(gradient)
        x.grad = layer.weight.grad = None

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return float(do_bench(graph.replay, warmup=4, rep=16, return_mode="median"))
