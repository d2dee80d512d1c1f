"""Elementwise operations folded into the casts that follow them, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_fp8
from lightning_fp8.compiling import module_arguments

ROOT = Path(__file__).parents[2]
FORESEEN = ["cast_stored 1", "cast_again 1"]
FROM_DATA = ["amax_partials 1", "cast_from_amaxes 1"]
ROWWISE = ["row_and_column_scales 1", "cast_from_amaxes 1"]


def computed(kernels: list[str], reads: str) -> list[str]:
    return [kernel.replace(" 1", f" of {reads}") for kernel in kernels]


def run(module: str, *arguments: str, **environment: str) -> str:
    """A process of its own: Triton's interpreter, and its device, are chosen once."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_computed_values_are_those_of_torch() -> None:
    """Activations, norms, broadcasts, slices and concatenations in Triton's interpreter; an unset scale's path too."""
    pytest.importorskip("triton")
    assert "checked" in run("tests.kernels.folded", TRITON_INTERPRET="1")


def test_graphs_keep_only_what_someone_else_reads() -> None:
    """Which casts are folded and how many arrays each then reads; strides, writes and sources are checked there."""
    pytest.importorskip("triton")
    plain = "cast_stored 1"  # A weight's, but where another reason is told.
    values = "cast_stored of values"
    gated = "columns 2, two tiles a program"
    printed = json.loads(run("tests.kernels.folded_graphs"))
    # The numbers of programs, and of tiles that each takes, are no reason to trace a graph anew.
    assert printed["traced"] == {"e4m3/tensorwise": 1, "e4m3/tensorwise/pow2": 1, "e4m3/rowwise": 1}
    found = printed["folded"]
    assert found.pop("block") == [
        # The norms and the activation; the attention's output is nothing elementwise.
        [f"{values} 3", *[plain] * 3, f"{values} 3", plain, f"{values} 1", plain, "11 matrices less"],
        # Gate and up; query, key and value. The gradient of the block's output is an input, and that of the
        # attention's is added to another.
        [plain, f"cast_stored of {gated}", plain, "cast_stored of columns 3", "14 matrices less"],
    ]
    # With scales from the data, both passes compute all of that.
    for name, passes in (
        ("block, tensorwise", FROM_DATA), ("block, foreseen", FORESEEN), ("block, rowwise", ROWWISE),
    ):  # fmt: skip
        norm = computed(passes, "values 3")
        # Those that go through any number of tiles.
        many = ("cast_again", "amax_partials")
        two_at_once = [
            kernel.removesuffix(", two tiles a program") if kernel.startswith(many) else kernel
            for kernel in computed(passes, gated)
        ]
        assert found.pop(name) == [
            [*norm, *passes * 3, *norm, *passes, *computed(passes, "values 1"), *passes, "11 matrices less"],
            [*passes, *two_at_once, *passes, *computed(passes, "columns 3"), "14 matrices less"],
        ]
    # With scales of blocks, only what lies side by side is computed.
    forward, backward = found.pop("block, blockwise")
    plain_blocks = "cast_blocks_128 1"
    assert forward == [plain_blocks] * 8 + ["0 matrices less"]
    assert backward == [
        plain_blocks, f"cast_blocks_128 of {gated}", plain_blocks, "cast_blocks_128 of columns 3", "14 matrices less",
    ]  # fmt: skip
    forward, backward = found.pop("separate projections")
    # One norm for three layers, one sum for two.
    assert [kernel for kernel in forward if kernel != plain] == [
        *[f"{values} 3"] * 5, f"{values} 2", "19 matrices less",
    ]  # fmt: skip
    assert backward == [plain, *(f"{values} {count}" for count in (2, 3, 2, 4, 3)), "30 matrices less"]
    # Narrower tiles than usual divide them.
    assert found.pop("few columns") == [[f"{values} 1", plain, "3 matrices less"], [plain, "0 matrices less"]]
    assert set(found) == {"nothing to fold", "ragged rows", "dynamic"}
    for name, (forward, backward) in found.items():
        layers = 5 if name == "nothing to fold" else 1
        assert forward == [plain] * 2 * layers + ["0 matrices less"], name
        assert backward == [plain] * layers + ["0 matrices less"], name


def test_options_are_those_of_the_mode_and_one_pass() -> None:
    plain, graphs = lightning_fp8.compile_options(), lightning_fp8.compile_options("reduce-overhead")
    (name, folding), *others = plain.items()
    assert not others and graphs == {"triton.cudagraphs": True, name: folding}
    # The compiler compares options by value: blocks that were compiled one after the other share their graphs.
    assert lightning_fp8.compile_options()[name] is folding
    assert lightning_fp8.compile_options(options={"max_autotune": True})["max_autotune"] is True
    with pytest.raises(ValueError, match="post_grad_custom_post_pass"):
        lightning_fp8.compile_options(options={name: lambda graph: None})
    # Its own pass is none of the user's: options may be given on.
    assert lightning_fp8.compile_options(options=plain) == plain
    assert isinstance(folding.uuid(), bytes) and folding.uuid() == folding.uuid()


def test_a_change_of_any_kernel_is_a_change_of_the_pass() -> None:
    """Graphs on the disk must not outlive the kernels that they hold."""
    pytest.importorskip("triton")
    from lightning_fp8.kernels import (
        folding,
        triton_block,
        triton_common,
        triton_data,
        triton_foreseen,
        triton_stored,
    )

    written = triton_block, triton_common, triton_data, triton_foreseen, triton_stored
    kernels = [vars(module) for module in written]
    modules = {function.fn.__module__ for names in kernels for function in names.values() if hasattr(function, "fn")}
    assert len(modules) == len(kernels)
    assert {f"{module.rpartition('.')[2]}.py" for module in modules} <= set(folding.FILES)
    assert all(Path(path).exists() for path in folding.paths(folding.FILES))


def test_module_arguments_leave_other_compilers_alone() -> None:
    assert module_arguments({"backend": "aot_eager", "mode": None}) == {"backend": "aot_eager", "mode": None}
    arguments = module_arguments({"mode": "reduce-overhead", "fullgraph": True})
    assert arguments == {"fullgraph": True, "options": lightning_fp8.compile_options("reduce-overhead")}


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16, bias=False)  # Products need no C++ to be compiled.

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_both_graphs_of_an_inductor_model_go_through_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU there is nothing to fold, and nothing is compiled twice."""
    folding = lightning_fp8.compile_options()["post_grad_custom_pre_pass"]
    seen: list[int] = []
    original = type(folding).__call__
    monkeypatch.setattr(type(folding), "__call__", lambda self, g: (seen.append(len(g.nodes)), original(self, g))[1])
    torch._dynamo.reset()
    layers = [Layer(), Layer()]
    for layer in layers:
        layer.compile(fullgraph=True, options=lightning_fp8.compile_options())
    x = torch.randn(4, 16, requires_grad=True)
    with torch._inductor.config.patch(force_disable_caches=True), torch._dynamo.config.patch(error_on_recompile=True):
        for layer in layers:
            layer(x).sum().backward()
        lightning_fp8.compile(lambda y: y @ y.t(), fullgraph=True)(x.detach())

        @lightning_fp8.compile(fullgraph=True)
        def decorated(y: torch.Tensor) -> torch.Tensor:
            return y.t() @ y

        decorated(x.detach())
    assert len(seen) == 4, "forward and backward of the layers, and the two functions"


@pytest.mark.parametrize("model", [torch.nn.Linear(16, 16), None])
def test_another_compiler_is_refused_with_the_way_out(model: torch.nn.Module | None) -> None:
    compile: Any = lightning_fp8.compile
    with pytest.raises(TypeError, match=r"takes no backend: it always compiles by Inductor.*use torch\.compile"):
        compile(model, backend="aot_eager")
