"""``torch.ops.lightning_fp8.scaled_linear`` on its own: values, gradients, compile, export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8.operators import casts_text
from lightning_fp8.ops import LinearCasts, scaled_linear
from lightning_fp8.recipes import RECIPE_NAMES, RowwiseScaling, TensorwiseScaling, get_recipe

TENSORWISE, BLOCKS = "e4m3/tensorwise", "e4m3/1x128"
FROM_DATA = [name for name in RECIPE_NAMES if get_recipe(name).source == "data"]


def operands(dtype: torch.dtype = torch.float32, rows: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, rows, 128, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(256, 128, generator=generator).requires_grad_()
    return x, weight, torch.randn(256, generator=generator).requires_grad_()


class Own(nn.Module):
    """A module as its users write it."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(256, 128) / 16)
        self.bias = nn.Parameter(torch.zeros(256))
        self.recipe = recipe

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.ops.lightning_fp8.scaled_linear(x, self.weight, self.bias, self.recipe))


@pytest.mark.parametrize("recipe", FROM_DATA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_the_layers(recipe: str, dtype: torch.dtype) -> None:
    x, weight, bias = operands(dtype)
    y = torch.ops.lightning_fp8.scaled_linear(x, weight, bias, recipe)
    y.square().sum().backward()
    got = [t.grad for t in (x, weight, bias)]
    x2, weight2, bias2 = operands(dtype)
    casts = LinearCasts.of(get_recipe(recipe), stored=False)
    expected = (scaled_linear(x2.view(-1, 128), weight2, casts) + bias2.to(dtype)).view(2, 9, 256)
    expected.square().sum().backward()
    assert torch.equal(y, expected)
    for gradient, other in zip(got, (x2, weight2, bias2), strict=True):
        assert torch.equal(gradient, other.grad) and gradient.dtype == other.dtype


@pytest.mark.parametrize(
    "arguments", [(), (None,), (None, "tensorwise"), (None, "tensorwise", None), (None, "rowwise")]
)
def test_gradients_where_the_last_arguments_are_left_out(arguments: tuple[Any, ...]) -> None:
    """Torch then hands fewer of them to backward."""
    x, weight, _ = operands()
    torch.ops.lightning_fp8.scaled_linear(x, weight, *arguments).square().sum().backward()
    x2, weight2, bias = operands()
    recipe = arguments[1] if len(arguments) > 1 else "tensorwise"
    y = torch.ops.lightning_fp8.scaled_linear(x2, weight2, torch.zeros_like(bias), recipe, torch.float32)
    y.square().sum().backward()
    assert torch.equal(x.grad, x2.grad) and torch.equal(weight.grad, weight2.grad)


@pytest.mark.parametrize("recipe", [TensorwiseScaling(format="e4m3", margin=1.0), RowwiseScaling(power_of_two=False)])
def test_recipes_with_settings(recipe: Any) -> None:
    x, weight, _ = operands()
    y = torch.ops.lightning_fp8.scaled_linear(x, weight, None, casts_text(recipe), torch.bfloat16)
    expected = scaled_linear(x.view(-1, 128), weight, LinearCasts.of(recipe, stored=False), out_dtype=torch.bfloat16)
    assert torch.equal(y.view(-1, 256), expected)


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_operands(frozen: int) -> None:
    tensors = list(operands())
    tensors[frozen] = tensors[frozen].detach()
    torch.ops.lightning_fp8.scaled_linear(*tensors, "rowwise").sum().backward()
    assert [t.grad is not None for t in tensors] == [i != frozen for i in range(3)]


def test_registration() -> None:
    for recipe in ("tensorwise", "rowwise_gw_hp"):
        for rows in (0, 9):
            torch.library.opcheck(torch.ops.lightning_fp8.scaled_linear.default, (*operands(rows=rows), recipe))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_gw_hp"])
def test_compiled_whole(recipe: str) -> None:
    eager, other = Own(recipe), Own(recipe)
    compiled = torch.compile(other, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 9):
        x, _, _ = operands(rows=rows)
        torch.testing.assert_close(compiled(x), eager(x))
        compiled(x).sum().backward(), eager(x).sum().backward()
    torch.testing.assert_close(other.weight.grad, eager.weight.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", FROM_DATA)
def test_compiled_by_inductor(recipe: str) -> None:
    x = operands(torch.bfloat16)[0].detach().cuda()
    compiled, eager = torch.compile(Own(recipe).cuda(), fullgraph=True), Own(recipe).cuda()
    torch.testing.assert_close(compiled(x), eager(x))
    compiled(x).float().sum().backward(), eager(x).float().sum().backward()
    torch.testing.assert_close(compiled.weight.grad, eager.weight.grad)


def test_exported(tmp_path: Any) -> None:
    model = Own("rowwise").eval()
    rows = torch.export.Dim("rows", min=1, max=64)
    program = torch.export.export(model, (operands()[0].detach(),), dynamic_shapes={"x": {1: rows}})
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    assert any("lightning_fp8.scaled_linear" in str(node.target) for node in program.graph.nodes)
    for count in (3, 20):
        x = operands(rows=count)[0].detach()
        torch.testing.assert_close(loaded(x), model(x))


@pytest.mark.parametrize(
    ("recipe", "sizes", "words"),
    [
        ("delayed", (128, 256), "keeps no scales"),
        ("fastest", (128, 256), "Unknown FP8 recipe"),
        ("e4m3/tensorwise", (128, 256), "six casts"),
        (f",,{TENSORWISE},{TENSORWISE},{TENSORWISE},{TENSORWISE}", (128, 256), "all six casts"),
        (
            f"{TENSORWISE},,{TENSORWISE},{TENSORWISE},{TENSORWISE},{TENSORWISE}",
            (128, 256),
            "both operands of grad_weight",
        ),
        (f"{BLOCKS},{BLOCKS},{BLOCKS},{BLOCKS},{TENSORWISE},{TENSORWISE}", (128, 256), r"multiples of \[16, 128\]"),
        (f"{BLOCKS},{TENSORWISE},{BLOCKS},{BLOCKS},{BLOCKS},{TENSORWISE}", (128, 256), r"multiples of \[16, 128\]"),
        ("blockwise", (128, 192), "multiples of 128"),
        ("tensorwise", (64, 256), r"x \[..., in\]"),
    ],
)
def test_mistakes(recipe: str, sizes: tuple[int, int], words: str) -> None:
    x, weight = torch.randn(4, 128), torch.randn(sizes[1], sizes[0])
    with pytest.raises(ValueError, match=words):
        torch.ops.lightning_fp8.scaled_linear(x, weight, None, recipe)


def test_mistakes_in_dtype_and_bias() -> None:
    x, weight = torch.randn(4, 128), torch.randn(256, 128)
    with pytest.raises(ValueError, match="fp32, bf16 or fp16, got"):
        torch.ops.lightning_fp8.scaled_linear(x.long(), weight)
    with pytest.raises(ValueError, match="out_dtype must be"):
        torch.ops.lightning_fp8.scaled_linear(x, weight, None, "rowwise", torch.int8)
    with pytest.raises(ValueError, match=r"bias must be \[out\] = \[256\]"):
        torch.ops.lightning_fp8.scaled_linear(x, weight, torch.zeros(3))
