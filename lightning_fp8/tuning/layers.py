"""How long one linear layer takes, forward and backward, in bf16 and in FP8."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_fp8.backends import Backend, get_backend
from lightning_fp8.compiling import compile_options
from lightning_fp8.recipes import Recipe

#: Layers of a block that are compiled together, more or less.
_COMPILED_TOGETHER = 8
#: Timed rounds, of ten each, of which the median counts.
_ROUNDS = 20


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

    with _layers(1, tokens, in_features, out_features, recipe, backend) as run:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return float(do_bench(graph.replay, warmup=4, rep=16, return_mode="median"))


def measure_host(recipe: Recipe | None, backend: Backend | str = "native", compiled: bool = False) -> float:
    """Milliseconds that the host needs to issue forward and backward of one layer, whatever its size.

    Args:
        recipe: how it runs in FP8; ``None`` is bf16.
        backend: what multiplies.
        compiled: whether it is one of several that are compiled together, as in a block of a model, or runs in eager
            mode.
    """
    count = _COMPILED_TOGETHER if compiled else 1
    with _layers(count, 256, 256, 256, recipe, backend, compiled) as run:
        times = []
        for _ in range(_ROUNDS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(10):
                run()
            times.append((time.perf_counter() - start) / 10 * 1e3)
    return statistics.median(times) / count


@contextmanager
def _layers(
    count: int,
    tokens: int,
    in_features: int,
    out_features: int,
    recipe: Recipe | None,
    backend: Backend | str,
    compiled: bool = False,
) -> Iterator[Callable[[], None]]:
    """A function that runs layers forward and backward, warm; the caller's random numbers stay as they were."""
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.random.fork_rng([device]), torch.enable_grad(), torch.autocast("cuda", enabled=False):
        settings: dict[str, Any] = {"bias": False, "device": device, "dtype": torch.bfloat16}
        layers = nn.Sequential(*(nn.Linear(in_features, out_features, **settings) for _ in range(count)))
        names = [str(index) for index in range(count)]
        runtime = None if recipe is None else get_backend(backend).convert(layers, names, recipe, autocast_only=False)
        if compiled:
            layers.compile(dynamic=False, options=compile_options())
        x = torch.randn(tokens, in_features, device=device, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.randn(tokens, out_features, device=device, dtype=torch.bfloat16)

        def run() -> None:
            if runtime is None:
                y = layers(x)
            else:
                runtime.weights_changed()  # A training step casts the weight anew.
                with runtime.forward_context():
                    y = layers(x)
            y.backward(gradient)
            x.grad = None
            layers.zero_grad()

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # The first one takes stored scales from the data.
                run()
        torch.cuda.current_stream().wait_stream(stream)
        yield run
