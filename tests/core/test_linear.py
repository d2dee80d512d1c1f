"""``Float8Linear`` as a layer: shapes, dtypes, autocast, cold start, evaluation, checkpointing, accumulation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import lightning_fp8
from core import oracle
from lightning_fp8.linear import Float8Linear
from lightning_fp8.model import conversions
from lightning_fp8.recipes import RECIPE_NAMES, ROLES, DelayedScaling, get_recipe
from lightning_fp8.statistics import AMAX, LAST_AMAX, NOT_SEEN, SCALE, StatisticsTable


def layer(recipe: Any = "delayed", bias: bool = True, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Linear:
    torch.manual_seed(0)
    module = nn.Linear(256, 128, bias, dtype=dtype)
    return lightning_fp8.convert_model(module, recipe, **settings)  # type: ignore[return-value]


def table_of(model: nn.Module) -> StatisticsTable:
    return conversions(model)[0].runtime.table


def data(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("name", RECIPE_NAMES)
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients(name: str, bias: bool) -> None:
    model, recipe = layer(name, bias), get_recipe(name)
    x = data(4, 20, 256).requires_grad_()
    g = data(4, 20, 128, seed=2)
    y = model(x)
    y.backward(g)
    x2, g2 = x.detach().flatten(0, 1), g.flatten(0, 1)
    scale = 1.0 if name == "static" else None
    a = oracle.operand(x2, recipe.casts["input"].straight, scale)  # type: ignore[arg-type]
    b = oracle.operand(model.weight, recipe.casts["weight"].straight, scale)  # type: ignore[arg-type]
    extra = model.bias.detach().double().numpy() if bias else None
    oracle.assert_product(y.flatten(0, 1), a, b, extra=extra)
    ga = oracle.operand(g2, recipe.casts["grad_output"].straight, scale)  # type: ignore[arg-type]
    wt = oracle.operand(model.weight.t(), recipe.casts["weight"].transposed, scale)  # type: ignore[arg-type]
    assert x.grad is not None
    oracle.assert_product(x.grad.flatten(0, 1), ga, wt)
    if bias:
        torch.testing.assert_close(model.bias.grad, g2.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(256,), (1, 256), (3, 256), (17, 256), (130, 256), (0, 256), (2, 0, 256),
                                   (2, 3, 256), (2, 5, 13, 256)], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["delayed", "rowwise", "blockwise", "mxfp8"])
def test_any_rank_and_token_count(name: str, shape: tuple[int, ...]) -> None:
    model = layer(name)
    x = data(*shape).requires_grad_()
    y = model(x)
    assert y.shape == (*shape[:-1], 128)
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape and x.grad.isfinite().all()
    flat = layer(name)(x.detach().reshape(-1, 256))
    assert torch.equal(y.reshape(-1, 128), flat)
    reference = nn.functional.linear(x, model.weight, model.bias)
    assert (y - reference).norm() <= 0.1 * reference.norm()


@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize("name", ["rowwise", "blockwise", "mxfp8", "tensorwise"])
def test_padding_leaks_into_nothing(name: str, tokens: int) -> None:
    """The first rows of a long batch and the short batch alone give the same, where scales do not depend on others."""
    model = layer(name)
    x = data(tokens, 256)
    if name == "tensorwise":
        x[0, 0] = 10.0  # The largest, so that both batches have one scale.
    padded = torch.cat([x, torch.zeros(128 - tokens, 256)])
    y, y_padded = model(x), model(padded)
    assert torch.equal(y, y_padded[:tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_are_those_of_a_linear_layer(dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    results = []
    for model in (layer(dtype=dtype), nn.Linear(256, 128, dtype=dtype)):
        x = data(16, 256, dtype=dtype).requires_grad_()
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            y = model(x)
        y.float().sum().backward()
        assert x.grad is not None and model.weight.grad is not None and model.bias.grad is not None
        results.append([t.dtype for t in (y, x.grad, model.weight.grad, model.bias.grad)])
    assert results[0] == results[1]


def test_mistakes_raise_and_record_nothing() -> None:
    model = layer()
    before = table_of(model).data.clone()
    for bad in (data(4, 128), data(4, 255), torch.ones(4, 256, dtype=torch.int64), data(8, 512)):
        with pytest.raises(RuntimeError):
            model(bad)
    assert torch.equal(table_of(model).data, before)


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_layout_of_input_and_gradient_does_not_matter(name: str) -> None:
    def run(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        model = layer(name)
        x = x.detach().requires_grad_()
        y = model(x)
        y.backward(g)
        return y, x.grad, model.weight.grad, model.bias.grad  # type: ignore[return-value]

    x, g = data(6, 8, 256), data(6, 8, 128, seed=2)
    expected = run(x, g)
    transposed = run(x.transpose(0, 1).contiguous().transpose(0, 1), g.transpose(1, 2).contiguous().transpose(1, 2))
    strided = run(torch.cat([x, x], -1)[..., :256], torch.stack([g, g], -1)[..., 0])
    for other in (transposed, strided):
        assert all(torch.equal(a, b) for a, b in zip(expected, other, strict=True))
    one_row = data(1, 1, 256)
    expanded = run(one_row.expand(6, 8, 256), torch.ones(()).expand(6, 8, 128))
    dense = run(one_row.repeat(6, 8, 1), torch.ones(6, 8, 128))
    assert all(torch.equal(a, b) for a, b in zip(expanded, dense, strict=True))


def test_frozen_parts() -> None:
    model = layer(bias=False)
    y = model(data(16, 256))  # An input without gradient: no input gradient is computed.
    y.backward(data(16, 128))
    assert model.weight.grad is not None
    frozen = layer()
    frozen.requires_grad_(False)
    x = data(16, 256).requires_grad_()
    frozen(x).sum().backward()
    assert x.grad is not None and frozen.weight.grad is None and frozen.bias.grad is None
    assert not frozen(data(16, 256)).requires_grad


# --- autocast --------------------------------------------------------------------------------------------------------


def test_autocast_only_respects_regions_where_it_is_off() -> None:
    model, plain = layer(autocast_only=True), layer()
    x = data(16, 256)
    exact = nn.functional.linear(x, model.weight, model.bias)
    assert torch.equal(model(x), exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = model(x)
        assert inside.dtype == torch.bfloat16 and not torch.equal(inside, exact.bfloat16())
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(model(x), exact)
            assert not torch.equal(plain(x), exact)  # Without autocast_only FP8 is asked for everywhere.
    assert not torch.equal(plain(x), exact)


def test_switched_off_layers_are_exact_and_still_watched() -> None:
    model = layer()
    conversions(model)[0].runtime.set_enabled([""], False)
    x = data(16, 256).requires_grad_()
    y = model(x)
    assert torch.equal(y, nn.functional.linear(x, model.weight, model.bias))
    g = data(16, 128)
    y.backward(g)
    assert table_of(model).amax[0].tolist() == [t.abs().max().item() for t in (x, model.weight, g)]
    conversions(model)[0].runtime.set_enabled([""], True)
    assert not torch.equal(model(x), y)


# --- scales ----------------------------------------------------------------------------------------------------------


def train_step(model: nn.Module, x: Tensor, g: Tensor) -> Tensor:
    y = model(x)
    y.backward(g)
    return y.detach()


def test_the_first_step_scales_from_its_data() -> None:
    delayed, current = layer("delayed"), layer("tensorwise")
    x, g = 1e-4 * data(32, 256), 1e-7 * data(32, 128, seed=2)
    for model in (delayed, current):
        model.x = x.clone().requires_grad_()  # type: ignore[assignment]
    outputs = [train_step(m, m.x, g) for m in (delayed, current)]  # type: ignore[arg-type]
    assert torch.equal(*outputs)
    assert torch.equal(delayed.x.grad, current.x.grad)  # type: ignore[union-attr, arg-type]
    assert torch.equal(delayed.weight.grad, current.weight.grad)  # type: ignore[arg-type]


def test_scales_follow_the_data_one_step_behind() -> None:
    model = layer(DelayedScaling(amax_history_len=1))
    x, g = data(32, 256).requires_grad_(), data(32, 128, seed=2)
    train_step(model, x, g)
    first = table_of(model).data[0, :, SCALE].clone()
    train_step(model, 100 * x, g)  # Still the old scale: saturates.
    assert torch.equal(table_of(model).data[0, :, SCALE], first)
    lightning_fp8.step(model)
    torch.testing.assert_close(table_of(model).data[0, 0, SCALE], first[0] / 100)
    torch.testing.assert_close(table_of(model).data[0, 1:, SCALE], first[1:])


def test_accumulation_takes_the_maximum_over_the_window() -> None:
    model = layer(DelayedScaling(amax_history_len=4))
    x, g = data(32, 256), data(32, 128, seed=2)
    for factor in (1.0, 5.0, 2.0):
        train_step(model, factor * x, factor * g)
    amax = table_of(model).amax[0].clone()
    assert amax.tolist() == [(5 * x).abs().max().item(), model.weight.abs().max().item(), (5 * g).abs().max().item()]
    lightning_fp8.step(model)
    history = conversions(model)[0].runtime.scaling.history.values
    assert torch.equal(history[0, :, 0], amax) and history[..., 1:].eq(0).all()  # One step, not three.


def test_two_forwards_before_the_first_backward() -> None:
    """As in manual optimization with two losses: each backward has the operands and scales of its own forward."""
    x1, x2, g1, g2 = data(16, 256), 3 * data(48, 256, seed=2), data(16, 128, seed=3), data(48, 128, seed=4)
    for name in ("delayed", "tensorwise", "blockwise"):
        interleaved, apart = layer(name), layer(name)
        for model in (interleaved, apart):  # The same scales for both, whatever the order later.
            train_step(model, x1, g1)
            model.zero_grad()
        y1, y2 = interleaved(x1), interleaved(x2)
        y2.backward(g2, retain_graph=True)
        second = interleaved.weight.grad.clone()  # type: ignore[union-attr]
        interleaved.zero_grad()
        y1.backward(g1)
        first = interleaved.weight.grad.clone()  # type: ignore[union-attr]
        train_step(apart, x1, g1)
        assert torch.equal(apart.weight.grad, first)  # type: ignore[arg-type]
        apart.zero_grad()
        train_step(apart, x2, g2)
        assert torch.equal(apart.weight.grad, second)  # type: ignore[arg-type]


def test_backward_twice_through_one_graph() -> None:
    model = layer()
    y, g = model(data(16, 256)), data(16, 128)
    y.backward(g, retain_graph=True)
    first = model.weight.grad.clone()  # type: ignore[union-attr]
    y.backward(g)
    assert torch.equal(model.weight.grad, 2 * first)  # type: ignore[arg-type]


def test_one_layer_used_twice_in_a_forward() -> None:
    torch.manual_seed(0)
    model = lightning_fp8.convert_model(nn.Linear(64, 64))
    x = data(16, 64)
    y = model(model(x))
    y.sum().backward()
    amax = table_of(model).amax[0]
    assert amax[0] == max(x.abs().max(), model(x).abs().max()) and model.weight.grad.isfinite().all()  # type: ignore[union-attr, operator]


def test_evaluation_scales_from_its_data_and_records_nothing() -> None:
    model, current = layer("delayed"), layer("tensorwise")
    train_step(model, data(32, 256), data(32, 128))
    lightning_fp8.step(model)
    before = table_of(model).data.clone()
    model.eval(), current.eval()
    x = 1000 * data(32, 256, seed=5)
    assert torch.equal(model(x), current(x))  # No trace of the much smaller training data.
    with torch.no_grad():
        assert torch.equal(model(x), current(x))
    with torch.inference_mode():
        assert torch.equal(model(x), current(x))
    model(x).sum().backward()  # Gradients in eval mode (attributions, frozen norms) record nothing either.
    assert torch.equal(table_of(model).data, before)
    assert model(torch.full((3, 256), math.nan)).isnan().all()
    static = layer("static").eval()
    assert torch.equal(static(x), lightning_fp8.convert_model(layer(), "tensorwise", ).eval()(x))  # fmt: skip


def test_training_after_inference_mode() -> None:
    """Lightning's sanity check runs before the first step, in inference mode."""
    model = layer()
    model.eval()
    with torch.inference_mode():
        model(data(16, 256))
    model.train()
    train_step(model, data(16, 256), data(16, 128))
    with torch.inference_mode():
        model(data(16, 256))  # In training mode still: statistics are written.
    train_step(model, data(16, 256), data(16, 128))
    lightning_fp8.step(model)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["delayed", "tensorwise", "mxfp8"])
def test_activation_checkpointing_recomputes_the_same(name: str, reentrant: bool) -> None:
    def run(checkpoint: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        lightning_fp8.convert_model(model, name, layers=lightning_fp8.LayerSelection(head=True))
        found: list[Any] = []
        for step in range(3):
            x = ((step + 1) * data(48, 64, seed=step)).requires_grad_()
            y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant) if checkpoint else model(x)
            (y.square().mean() * 1e-3).backward()
            found += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]
            found.append(table_of(model).data.clone())
            lightning_fp8.step(model)
        return found

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_layers_that_did_not_run_keep_theirs() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(32, 32), "rare": nn.Linear(32, 32), "head": nn.Linear(32, 32)})
    lightning_fp8.convert_model(model, DelayedScaling(amax_history_len=2))
    for name in ("used", "rare"):
        train_step(model[name], data(16, 32), data(16, 32))
    lightning_fp8.step(model)
    kept = table_of(model).data[1].clone()
    for _ in range(4):
        train_step(model["used"], 7 * data(16, 32), data(16, 32))
        lightning_fp8.step(model)
    assert torch.equal(table_of(model).data[1], kept)
    assert table_of(model).names == ["used", "rare"]


@pytest.mark.parametrize("name", RECIPE_NAMES)
@pytest.mark.parametrize("enabled", [True, False])
def test_a_batch_without_rows_is_not_seen(name: str, enabled: bool) -> None:
    """As of an expert that got no tokens: zeros in the window would make the next values a jump."""
    model = layer(name)
    runtime = conversions(model)[0].runtime
    runtime.set_enabled(table_of(model).names, enabled)
    train_step(model, data(16, 256), data(16, 128))
    lightning_fp8.step(model)
    kept = {key: value.clone() for key, value in runtime.live_state().items() if isinstance(value, Tensor)}
    statistics = table_of(model).data.clone()
    for _ in range(3):
        model.zero_grad()
        x = data(0, 256).requires_grad_()
        model(x).sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
        assert all(p.grad is not None and p.grad.eq(0).all() for p in model.parameters())
        assert table_of(model).amax[0].tolist() == [NOT_SEEN, statistics[0, 1, LAST_AMAX].item(), NOT_SEEN]
        lightning_fp8.step(model)
    assert torch.equal(table_of(model).data, statistics)
    for key, value in kept.items():  # The weight was there: its history goes on.
        assert torch.equal(runtime.live_state()[key][:, [0, 2]], value[:, [0, 2]])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_values_pass_through_the_layer(bad: float) -> None:
    model = layer()
    x = data(16, 256)
    x[2, 3] = bad
    y = model(x)
    assert y[2].isnan().all() and y[[0, 1, *range(3, 16)]].isfinite().all()
    g = data(16, 128)
    y.backward(g)
    assert not model.weight.grad[:, 3].isfinite().any()  # type: ignore[index]
    assert not table_of(model).amax[0, 0].isfinite()
    assert table_of(model).data[0, 0, SCALE] == 0  # It took no scale from such data.
    conversions(model)[0].runtime.discard()
    assert table_of(model).data[..., AMAX].eq(NOT_SEEN).all()
    assert model(data(16, 256)).isfinite().all()


def test_a_class_of_its_own_that_is_a_linear_layer() -> None:
    model = layer()
    assert isinstance(model, nn.Linear) and isinstance(model, Float8Linear)
    assert not list(model.buffers()) and [name for name, _ in model.named_parameters()] == ["weight", "bias"]
    assert np.all([t.dtype == torch.float32 and t.data_ptr() % 16 == 0 for t in model.fp8.slots])  # type: ignore[union-attr]
    assert len(model.fp8.slots) == len(ROLES)  # type: ignore[union-attr, arg-type]


def test_flops_can_be_counted_on_the_meta_device() -> None:
    """As Lightning's ``measure_flops`` does."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        model = lightning_fp8.convert_model(nn.Linear(32, 16))
        x = torch.randn(8, 32, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 8 * 32 * 16


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_inputs(layout: torch.layout) -> None:
    parts = [data(n, 256, seed=n) for n in (5, 1, 12)]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    model = layer("rowwise")
    y = model(nested)
    assert y.is_nested and y.layout == layout
    for actual, part in zip(y.unbind(), parts, strict=True):
        assert torch.equal(actual, model(part))
    (y + y).unbind()[0].sum().backward()  # Two nested results of one layer still fit each other.
    assert model.weight.grad is not None and model.weight.grad.isfinite().all()
    before = table_of(model).amax[0, 0].item()
    assert before == max(part.abs().max().item() for part in parts)
    conversions(model)[0].runtime.set_enabled([""], False)
    table_of(model).data[..., AMAX] = NOT_SEEN
    exact = model(nested).unbind()[0]
    torch.testing.assert_close(exact, nn.functional.linear(parts[0], model.weight, model.bias))
    assert table_of(model).amax[0, 0].item() == before
