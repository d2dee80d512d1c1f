"""Casts in compiled graphs: the compiler must see what they write, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from lightning_fp8 import ops
from lightning_fp8.recipes import ROLES, get_recipe
from lightning_fp8.statistics import StatisticsTable

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
BOTH = ["codes", "codes_t", "decode", "decode_t"]


def test_a_compiler_finds_exactly_the_outputs_and_the_slot_written() -> None:
    """Else it would copy the input of every cast, or miss a change of the statistics."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.traced"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {
        "stored": [["cast_stored", *BOTH, "slot"]],
        "stored, ragged": [["cast_stored", *BOTH, "slot"]],
        "stored, straight": [["cast_stored", "codes", "decode", "slot"]],
        "stored, transposed": [["cast_stored", "codes_t", "decode_t", "slot"]],
        "foreseen": [
            ["foresee", "foreseen"],
            ["cast_stored", *BOTH, "slot"],
            ["cast_again", *BOTH, "slot"],
        ],
        "foreseen, ragged, transposed": [
            ["foresee", "foreseen"],
            ["cast_stored", "codes_t", "decode_t", "slot"],
            ["cast_again", "codes_t", "decode_t", "slot"],
        ],
        "tensorwise": [["amax_partials", "partials"], ["cast_from_amaxes", *BOTH, "slot"]],
        "tensorwise, unnoted": [["amax_partials", "partials"], ["cast_from_amaxes", *BOTH]],
        "rowwise": [
            ["row_and_column_scales", "decode", "decode_t", "scratch", "slot"],
            ["cast_from_amaxes", "codes", "codes_t"],
        ],
        "rowwise, straight": [["cast_rows", "codes", "decode", "slot"]],
        "mixed": [
            ["row_and_column_scales", "decode", "scratch", "slot"],
            ["cast_from_amaxes", "codes", "codes_t", "decode_t"],
        ],
        "1x128": [["cast_blocks_128", *BOTH, "slot"]],
        "1x128, ragged, straight": [["cast_blocks_128", "codes", "decode", "slot"]],
        "1x128, transposed, unnoted": [["cast_blocks_128", "codes_t", "decode_t"]],
        "128x128": [["cast_blocks_128", *BOTH, "slot"]],
        "128x128, unnoted": [["cast_blocks_128", *BOTH]],
        "1x128 and 128x128": [["cast_blocks_128", *BOTH, "slot"]],
        "1x32": [["cast_blocks_32", *BOTH, "slot"]],
    }


def test_torch_knows_the_kernels_of_the_operator() -> None:
    """Their code is part of the keys of compiled graphs on disk, and torch has no public way to be told of them."""
    from torch._library.triton import get_triton_kernels_for_op  # What makes the keys asks this.

    from lightning_fp8.kernels import triton_op  # noqa: F401 (registers the operator)

    known = get_triton_kernels_for_op(torch.ops.lightning_fp8.triton_cast.default._name)
    assert {kernel.__name__ for kernel in known} == {
        "cast_stored",
        "foresee",
        "cast_again",
        "amax_partials",
        "row_and_column_scales",
        "cast_from_amaxes",
        "cast_rows",
        "cast_blocks_128",
        "cast_blocks_32",
    }


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize(
    "name", ["delayed", "tensorwise", "tensorwise_pow2", "rowwise", "blockwise", "blockwise_tiled", "mxfp8"]
)
def test_compiled_layers_give_the_bits_of_eager_ones(name: str, mode: str) -> None:
    recipe = get_recipe(name)
    casts = ops.LinearCasts.of(recipe, stored=recipe.source != "data")
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    weights = [random(256, 384).requires_grad_() for _ in range(2)]
    inputs = [random(rows, 384).requires_grad_() for rows in (512, 512, 512)]
    counters["inductor"].clear()
    torch._dynamo.reset()  # Other cases' graphs of the same function would make this one's a recompile.
    compiled = torch.compile(ops.scaled_linear, fullgraph=True, mode=mode, dynamic=False)
    outcomes = []
    for multiply in (ops.scaled_linear, compiled):
        results = []
        table = StatisticsTable(["a", "b"], "cuda")
        all_slots = [tuple(table.slot(layer, role) for role in ROLES) for layer in range(2)]
        with torch._dynamo.config.patch(error_on_recompile=True):
            for x in inputs:
                for weight, slots in zip(weights, all_slots, strict=True):
                    torch.compiler.cudagraph_mark_step_begin()
                    y = multiply(x, weight, casts, slots)
                    y.backward(torch.ones_like(y))
                    results += [y.detach().clone(), x.grad.clone(), weight.grad.clone()]
                    x.grad = weight.grad = None
        outcomes.append([*results, table.data])
    for eager, graph in zip(*outcomes, strict=True):
        assert torch.equal(eager, graph)
    assert counters["inductor"]["cudagraph_skips"] == 0
