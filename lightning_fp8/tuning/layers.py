"""How long one linear layer takes, forward and backward, in bf16 and in FP8."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lightning_fp8.backends import Backend, get_backend
from lightning_fp8.recipes import Recipe


def measure_layer(
    tokens: int, in_features: int, out_features: int, recipe: Recipe | None, backend: Backend | str = "native"
) -> float:
    """Milliseconds that forward and backward take on the current GPU, without the host's part.

    The launches are replayed from a CUDA graph with a cold L2 cache, on random values.

    Args:
        tokens: rows of the input.
        in_features: of the layer.
        out_features: of the layer.
        recipe: how it runs in FP8; ``None`` is bf16.
        backend: what multiplies.
    """
    from triton.testing import do_bench

    with _one_layer(tokens, in_features, out_features, recipe, backend) as run:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return float(do_bench(graph.replay, warmup=4, rep=16, return_mode="median"))


def measure_host(recipe: Recipe | None, backend: Backend | str = "native", rounds: int = 20) -> float:
    """Milliseconds that the host needs to issue forward and backward of one layer in eager mode, whatever its size.

    Args:
        recipe: how it runs in FP8; ``None`` is bf16.
        backend: what multiplies.
        rounds: timed rounds of ten; the median counts.
    """
    with _one_layer(256, 256, 256, recipe, backend) as run:
        times = []
        for _ in range(rounds):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(10):
                run()
            times.append((time.perf_counter() - start) / 10 * 1e3)
    return statistics.median(times)


@contextmanager
def _one_layer(
    tokens: int, in_features: int, out_features: int, recipe: Recipe | None, backend: Backend | str
) -> Iterator[Callable[[], None]]:
    """A function that runs one layer forward and backward, warm; the caller's random numbers stay as they were."""
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.random.fork_rng([device]), torch.enable_grad(), torch.autocast("cuda", enabled=False):
        layer = nn.Linear(in_features, out_features, bias=False, device=device, dtype=torch.bfloat16)
        runtime = None if recipe is None else get_backend(backend).convert(layer, [""], recipe, autocast_only=False)
        x = torch.randn(tokens, in_features, device=device, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.randn(tokens, out_features, device=device, dtype=torch.bfloat16)

        def run() -> None:
            if runtime is None:
                y = layer(x)
            else:
                runtime.weights_changed()  # A training step casts the weight anew.
                with runtime.forward_context():
                    y = layer(x)
            y.backward(gradient)
            x.grad = layer.weight.grad = None

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # The first one takes stored scales from the data.
                run()
        torch.cuda.current_stream().wait_stream(stream)
        yield run
