"""Compiled FP8 layers: one graph, the same bits, compiled once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import lightning_fp8
from lightning_fp8.model import conversions
from lightning_fp8.recipes import RECIPE_NAMES
from lightning_fp8.statistics import AMAX, NOT_SEEN


class Block(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, depth: int, width: int = 128) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make(recipe: Any = "delayed", depth: int = 1, **settings: Any) -> Net:
    torch.manual_seed(0)
    return lightning_fp8.convert_model(Net(depth), recipe, **settings)  # type: ignore[return-value]


def train(model: Net, steps: int = 3, tokens: int = 48, autocast: bool = False) -> list[Tensor]:
    """Everything that a few steps leave behind."""
    found: list[Tensor] = []
    for step in range(steps):
        x = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(step)).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = model(x * (step + 1))
        y.float().square().mean().backward()
        found += [y.detach(), x.grad, conversions(model)[0].runtime.table.data.clone()]  # type: ignore[list-item]
        found += [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
        model.zero_grad()
        lightning_fp8.step(model)
    return found


def assert_same(actual: list[Tensor], expected: list[Tensor], exact: bool = True) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0 if exact else 2e-2, atol=0 if exact else 2e-2, equal_nan=True)


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_one_graph_with_the_same_bits(name: str) -> None:
    eager, compiled = make(name), make(name)
    compiled.compile(backend="aot_eager", fullgraph=True)
    assert_same(train(compiled), train(eager))


def test_autocast_compiles_with_the_same_bits() -> None:
    eager, compiled = make(autocast_only=True), make(autocast_only=True)
    compiled.compile(backend="aot_eager", fullgraph=True)
    assert_same(train(compiled, autocast=True), train(eager, autocast=True))


def test_inductor_gives_the_same_bits() -> None:
    """Layers alone: between them the compiler may fuse what eager code rounds."""

    def layers() -> nn.Module:
        torch.manual_seed(0)
        return lightning_fp8.convert_model(nn.Sequential(nn.Linear(128, 64, bias=False), nn.Linear(64, 32)), "delayed")

    def run(model: nn.Module) -> list[Tensor]:
        found = []
        for step in range(2):
            x = torch.randn(17, 128, generator=torch.Generator().manual_seed(step)).requires_grad_()
            y = model[0](x)  # type: ignore[index]
            y.backward(torch.ones_like(y))
            found += [y.detach(), x.grad, model[0].weight.grad.clone()]  # type: ignore[index]
            found.append(conversions(model)[0].runtime.table.data.clone())
            lightning_fp8.step(model)
        return found

    eager, compiled = layers(), layers()
    compiled[0].compile(backend="inductor", fullgraph=True)  # type: ignore[index]
    assert_same(run(compiled), run(eager))  # type: ignore[arg-type]


def test_identical_blocks_compile_once_and_steps_never_recompile() -> None:
    model = make(depth=4)
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    eager = make(depth=4)
    assert_same(train(model), train(eager))
    assert counter.frame_count == 1
    train(model, steps=2)
    assert counter.frame_count == 1
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            expected = eager.eval()(torch.ones(48, 128))
            assert torch.equal(model(torch.ones(48, 128)), expected)
    assert counter.frame_count == 2  # One more, for evaluation.
    model.train()
    train(model, steps=1)
    assert counter.frame_count == 2


def test_any_token_count_with_dynamic_shapes() -> None:
    model, eager = make(), make()
    counter = CompileCounterWithBackend("aot_eager")
    model.compile(backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for tokens in (48, 17, 33, 130):
        assert_same(train(model, 1, tokens), train(eager, 1, tokens))
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1  # All within the first step.


@pytest.mark.parametrize("enabled", [True, False])
def test_compiled_layers_do_not_see_batches_without_rows(enabled: bool) -> None:
    outcomes = []
    for compiled in (False, True):
        torch.manual_seed(0)
        expert = lightning_fp8.convert_model(nn.Linear(128, 128), "delayed")
        conversions(expert)[0].runtime.set_enabled([""], enabled)
        if compiled:
            expert.compile(backend="aot_eager", fullgraph=True, dynamic=True)
        for tokens in (48, 0, 17):
            x = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(tokens)).requires_grad_()
            expert(x).sum().backward()
            statistics = conversions(expert)[0].runtime.table.data
            assert (statistics[0, [0, 2], AMAX] == NOT_SEEN).all() == (tokens == 0)
            lightning_fp8.step(expert)
            outcomes.append([x.grad, expert.weight.grad.clone(), statistics.clone()])
    for eager, other in zip(outcomes[:3], outcomes[3:], strict=True):
        assert_same(other, eager)  # type: ignore[arg-type]


def test_switching_a_layer_off_reaches_compiled_code() -> None:
    model = make()
    model.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(16, 128)
    fp8 = model(x)
    runtime = conversions(model)[0].runtime
    runtime.set_enabled(["blocks.0.up", "blocks.0.down"], False)
    high = model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(high, Net(1)(x))
    assert not torch.equal(fp8, high)


def test_checkpointed_blocks_compile() -> None:
    def forward(model: Net, x: Tensor) -> Tensor:
        return checkpoint(model.blocks[0], x, use_reentrant=False)  # type: ignore[return-value]

    results = []
    for compiled in (False, True):
        model = make()
        function = torch.compile(forward, backend="aot_eager", fullgraph=True) if compiled else forward
        x = torch.randn(16, 128, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = function(model, x)
        y.sum().backward()
        results.append([y.detach(), x.grad, conversions(model)[0].runtime.table.data])
    assert_same(results[1], results[0])  # type: ignore[arg-type]


def test_conversion_after_compile_is_seen() -> None:
    torch.manual_seed(0)
    model = Net(1)
    model.compile(backend="aot_eager")
    x = torch.randn(16, 128)
    before = model(x)
    lightning_fp8.convert_model(model, "tensorwise")
    after = model(x)
    assert not torch.equal(before, after)
    lightning_fp8.revert_model(model)
    assert torch.equal(model(x), before)


def test_export_of_layers_that_run_in_fp8_under_autocast() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    lightning_fp8.convert_model(model, layers=lightning_fp8.LayerSelection(head=True), autocast_only=True).eval()
    x = torch.randn(8, 16)

    def has_fp8(program: torch.export.ExportedProgram) -> bool:
        return any("lightning_fp8" in f"{node.target} {node.args}" for node in program.graph.nodes)

    with torch.no_grad():
        assert not has_fp8(torch.export.export(model, (x,)))
        with torch.autocast("cpu", torch.bfloat16):
            program = torch.export.export(model, (x,))
            assert has_fp8(program) and torch.equal(program.module()(x), model(x))


@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
def test_export(name: str) -> None:
    model = make(name).eval()
    train(model, 1)
    x = torch.randn(16, 128)
    exported = torch.export.export(model, (x,))
    assert set(exported.state_dict) == set(model.state_dict())
    with torch.no_grad():
        assert torch.equal(exported.module()(x), model(x))
