"""The three GEMMs of a scaled linear layer, and what its operators promise to autograd and the compiler."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from core import oracle
from lightning_fp8.casts import Cast
from lightning_fp8.ops import LinearCasts, cast, scaled_linear, scaled_mm
from lightning_fp8.recipes import (
    RECIPE_NAMES,
    ROLES,
    BlockwiseScaling,
    DelayedScaling,
    MXFP8Scaling,
    Recipe,
    RowwiseScaling,
    StaticScaling,
    TensorwiseScaling,
    get_recipe,
)
from lightning_fp8.statistics import SCALE, SCALE_TRANSPOSED, StatisticsTable

RECIPES = [
    *(get_recipe(name) for name in RECIPE_NAMES if name != "static"),
    DelayedScaling(format="e5m2_grad_weight", margin=0.263, power_of_two=True),
    StaticScaling(8.0, "hybrid"),
    TensorwiseScaling({"input": "e5m2", "grad_weight.grad_output": "e4m3"}, margin=1.0),
    RowwiseScaling("hybrid", power_of_two=False),
    BlockwiseScaling("hybrid", power_of_two=True, tiled_inputs=True),
    MXFP8Scaling("e5m2_grad_weight"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def operands(tokens: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 256, generator=generator)
    weight = torch.randn(128, 256, generator=generator) / 16
    grad = torch.randn(tokens, 128, generator=generator) * 0.1
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), grad.to(dtype)


def quantised(recipe: Recipe, role: str, x: Tensor) -> tuple[np.ndarray | None, np.ndarray | None]:
    """float64 values of the straight and the transposed operand, from the oracle; ``None`` in high precision."""
    casts = recipe.casts[role]  # type: ignore[index]
    scale = recipe.scale_of(role) if isinstance(recipe, StaticScaling) else None  # type: ignore[arg-type]
    straight = oracle.operand(x, casts.straight, scale) if casts.straight else None
    return straight, oracle.operand(x.t(), casts.transposed, scale) if casts.transposed else None


def assert_gemms(recipe: Recipe, x: Tensor, w: Tensor, g: Tensor, y: Tensor, grad_x: Tensor, grad_w: Tensor) -> None:
    """All three products lie within accumulated rounding of float64 products of the same quantised operands."""
    (xq, xt), (wq, wt), (gq, gt) = (quantised(recipe, r, v) for r, v in zip(ROLES, (x, w, g), strict=True))
    oracle.assert_product(y, xq, wq)
    oracle.assert_product(grad_x, gq, wt)
    if gt is None or xt is None:
        gt, xt = g.t().double().numpy(), x.detach().to(y.dtype).t().double().numpy()
    oracle.assert_product(grad_w, gt, xt)


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_gemms_are_within_accumulated_rounding(recipe: Recipe, dtype: torch.dtype) -> None:
    tokens = {torch.float32: 17, torch.bfloat16: 130, torch.float16: 1}[dtype]
    x, w, g = operands(tokens, dtype)
    stored = recipe.source != "data"
    table = StatisticsTable(["layer"])
    if isinstance(recipe, StaticScaling):
        table.data[..., [SCALE, SCALE_TRANSPOSED]] = 8.0
    slots: Any = tuple(table.slot(0, role) for role in ROLES)
    y = scaled_linear(x, w, LinearCasts.of(recipe, stored), slots)
    grad_x, grad_w = torch.autograd.grad(y, (x, w), g)
    assert y.dtype == grad_x.dtype == grad_w.dtype == dtype
    assert_gemms(recipe, x, w, g, y, grad_x, grad_w)
    assert table.amax.tolist() == [[v.abs().max().item() for v in (x, w, g)]]


@pytest.mark.parametrize("name", ["delayed", "rowwise", "rowwise_gw_hp", "blockwise"])
def test_master_weights_in_fp32(name: str) -> None:
    """fp32 weights and bf16 results: the weight's gradient comes from the fp32 accumulator, unrounded."""
    x, _, g = operands(33, torch.bfloat16)
    w = operands(1, torch.float32)[1]
    recipe = get_recipe(name)
    y = scaled_linear(x, w, LinearCasts.of(recipe, False), None, torch.bfloat16)
    grad_x, grad_w = torch.autograd.grad(y, (x, w), g)
    assert (y.dtype, grad_x.dtype, grad_w.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    if name == "rowwise_gw_hp":  # Computed in the layer's own precision, bf16.
        grad_w = grad_w.bfloat16()
    assert_gemms(recipe, x, w, g, y, grad_x, grad_w)


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_no_tokens(name: str) -> None:
    x, w, g = operands(0, torch.float32)
    table = StatisticsTable(["layer"])
    slots: Any = tuple(table.slot(0, role) for role in ROLES)
    recipe = get_recipe(name)
    y = scaled_linear(x, w, LinearCasts.of(recipe, recipe.source != "data"), slots)
    grad_x, grad_w = torch.autograd.grad(y, (x, w), g)
    assert y.shape == (0, 128) and grad_x.shape == (0, 256)
    assert grad_w.shape == w.shape and grad_w.eq(0).all()
    assert table.data.isfinite().all()


@pytest.mark.parametrize("format", ["hybrid", "e5m2_grad_weight"])
def test_stored_scales_are_used_by_every_gemm(format: str) -> None:
    x, w, g = operands(20, torch.float32)
    table = StatisticsTable(["layer"])
    # Casts that are alike have scales that are alike; only the gradient's may differ.
    table.data[0, :, SCALE] = torch.tensor([3.0, 5.0, 7.0])
    table.data[0, :, SCALE_TRANSPOSED] = torch.tensor([3.0, 5.0, 7.0 if format == "hybrid" else 11.0])
    slots: Any = tuple(table.slot(0, role) for role in ROLES)
    casts = DelayedScaling(format=format).casts
    y = scaled_linear(x, w, LinearCasts.of(DelayedScaling(format=format), True), slots)
    grad_x, grad_w = torch.autograd.grad(y, (x, w), g)

    def operand(role: Any, v: Tensor, scale: float) -> np.ndarray:
        return oracle.operand(v, casts[role].straight, scale)

    oracle.assert_product(y, operand("input", x, 3.0), operand("weight", w, 5.0))
    oracle.assert_product(grad_x, operand("grad_output", g, 7.0), operand("weight", w.t(), 5.0))
    gt = oracle.operand(g.t(), casts["grad_output"].transposed, 7.0 if format == "hybrid" else 11.0)  # type: ignore[arg-type]
    oracle.assert_product(grad_w, gt, operand("input", x.t(), 3.0))


def test_casts_that_are_alike_store_both_scales() -> None:
    """The transposed operand may be wanted alone later, when the layer or its input is frozen."""
    x, w, g = operands(20, torch.float32)
    table = StatisticsTable(["layer"])
    slots: Any = tuple(table.slot(0, role) for role in ROLES)
    scaled_linear(x, w, LinearCasts.of(DelayedScaling(), True), slots).backward(g)
    assert table.data[..., SCALE].gt(0).all()
    assert torch.equal(table.data[..., SCALE], table.data[..., SCALE_TRANSPOSED])


@pytest.mark.parametrize("frozen", ["input", "weight", "both"])
@pytest.mark.parametrize("name", ["delayed", "rowwise_gw_hp", "mxfp8"])
def test_frozen_operands(name: str, frozen: str) -> None:
    recipe = get_recipe(name)
    x, w, g = operands(40, torch.float32)
    casts = LinearCasts.of(recipe, False)
    y = scaled_linear(x, w, casts)
    grad_x, grad_w = torch.autograd.grad(y, (x, w), g)
    x2 = x.detach().requires_grad_(frozen == "weight")
    w2 = w.detach().requires_grad_(frozen == "input")
    again = scaled_linear(x2, w2, casts)
    assert torch.equal(again, y)
    assert again.requires_grad == (frozen != "both")
    if frozen == "weight":
        assert torch.equal(torch.autograd.grad(again, x2, g)[0], grad_x)
    if frozen == "input":
        assert torch.equal(torch.autograd.grad(again, w2, g)[0], grad_w)


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_layout_of_operands_does_not_matter(name: str) -> None:
    casts = LinearCasts.of(get_recipe(name), False)
    x, w, g = operands(48, torch.float32)
    y = scaled_linear(x, w, casts)
    expected = (y, *torch.autograd.grad(y, (x, w), g))
    x2 = x.detach().t().contiguous().t().requires_grad_()
    w2 = w.detach().t().contiguous().t().requires_grad_()
    y2 = scaled_linear(x2, w2, casts)
    actual = (y2, *torch.autograd.grad(y2, (x2, w2), g.t().contiguous().t()))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    # An expanded gradient, as sum() makes it.
    ones = torch.autograd.grad(scaled_linear(x, w, casts).sum(), (x, w))
    dense = torch.autograd.grad(scaled_linear(x, w, casts), (x, w), torch.ones(48, 128))
    assert all(torch.equal(a, b) for a, b in zip(ones, dense, strict=True))


def test_double_backward_is_refused_loudly() -> None:
    x, w, _ = operands(16, torch.float32)
    y = scaled_linear(x, w, LinearCasts.of(get_recipe("tensorwise"), False))
    # The gradient of y.sum() does not depend on y: autograd's own check would stay silent.
    for loss in (y.sum(), y.square().sum()):
        with pytest.raises(RuntimeError, match=r"differentiable once.*LayerSelection"):
            torch.autograd.grad(loss, x, create_graph=True)


def test_nothing_is_saved_without_grad() -> None:
    x, w, _ = operands(16, torch.float32)
    with torch.no_grad():
        y = scaled_linear(x, w, LinearCasts.of(get_recipe("delayed"), False))
    assert not y.requires_grad
    with torch.inference_mode():
        assert torch.equal(scaled_linear(x, w, LinearCasts.of(get_recipe("delayed"), False)), y)


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_what_is_saved_for_backward_is_fp8(name: str) -> None:
    recipe = get_recipe(name)
    x, w, g = operands(128, torch.bfloat16)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = scaled_linear(x, w, LinearCasts.of(recipe, False))
    sizes = [t.numel() * t.element_size() for t in saved]
    scales = [t for t in saved if t.dtype == torch.float32]
    assert sum(t.numel() for t in scales) <= (x.numel() + w.numel()) // 32
    if name == "rowwise_gw_hp":  # The input is kept for a weight gradient in high precision.
        assert sum(sizes) <= 2 * x.numel() + w.numel() + 4 * sum(t.numel() for t in scales)
    else:
        assert sum(sizes) == x.numel() + w.numel() + 4 * sum(t.numel() for t in scales)
    assert not any(t.data_ptr() == v.data_ptr() for t in saved for v in (x, w) if t.numel()) or name == "rowwise_gw_hp"
    y.backward(g)


@pytest.mark.parametrize("name", RECIPE_NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ROLES)
def test_non_finite_values_reach_results_and_statistics(name: str, bad: float, where: str) -> None:
    recipe = get_recipe(name)
    x, w, g = operands(32, torch.float32)
    index = {"input": (3, 200), "weight": (100, 200), "grad_output": (3, 100)}[where]
    with torch.no_grad():
        {"input": x, "weight": w, "grad_output": g}[where][index] = bad
    table = StatisticsTable(["layer"])
    table.data[..., [SCALE, SCALE_TRANSPOSED]] = 1.0
    slots: Any = tuple(table.slot(0, role) for role in ROLES)
    y = scaled_linear(x, w, LinearCasts.of(recipe, recipe.source != "data"), slots)
    grad_x, grad_w = torch.autograd.grad(y, (x, w), g)
    if where == "input":
        assert not y[3].isfinite().any() and not grad_w[:, 200].isfinite().any()
    if where == "weight":
        assert not y[:, 100].isfinite().any() and not grad_x[:, 200].isfinite().any()
    if where == "grad_output":
        assert not grad_x[3].isfinite().any() and not grad_w[100].isfinite().any()
        assert y.isfinite().all()
    row = table.amax[0].isfinite().tolist()
    assert row == [role != where for role in ROLES]


# --- operators -------------------------------------------------------------------------------------------------------

CASTS = [
    ("e4m3/tensorwise", "e5m2/tensorwise/pow2"),
    ("e4m3/rowwise", ""),
    ("", "e4m3/rowwise/pow2/margin=1.0"),
    ("e4m3/1x128", "e4m3/1x128"),
    ("e4m3/128x128", "e4m3/128x128"),
    ("e5m2/1x32", "e4m3/1x32"),
]


@pytest.mark.parametrize(("straight", "transposed"), CASTS)
def test_cast_operator_is_well_made(straight: str, transposed: str) -> None:
    """Schema, fake implementation (shapes, strides, dtypes) and what it changes."""
    table = StatisticsTable(["layer"])
    for rows in (128, 17):
        x = torch.randn(rows, 128)
        for slot in (None, table.slot(0, "input")):
            torch.library.opcheck(
                torch.ops.lightning_fp8.cast.default,
                (x, straight, transposed, slot, True),
                test_utils=("test_schema", "test_faketensor"),
            )


def test_scaled_mm_operator_is_well_made() -> None:
    a, b = Cast.parse("e4m3/rowwise"), Cast.parse("e5m2/rowwise")
    assert a and b
    aq, a_decode, *_ = cast(torch.randn(32, 64), a, None)
    bq, b_decode, *_ = cast(torch.randn(48, 64), b, None)
    torch.library.opcheck(
        torch.ops.lightning_fp8.scaled_mm.default,
        (aq, bq, a_decode, b_decode, str(a), str(b), torch.bfloat16, False, "torch"),
        test_utils="test_faketensor",
    )
    operator = torch.ops.lightning_fp8.scaled_mm(
        aq, bq, a_decode, b_decode, str(a), str(b), torch.float32, False, "torch"
    )
    assert torch.equal(operator, scaled_mm(aq, bq, a_decode, b_decode, (a, b), torch.float32))
