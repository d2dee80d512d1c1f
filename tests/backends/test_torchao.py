"""torchao's products on layers that stay what they are: the same operands as the native backend's, and no defects."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import DelayedScaling, FP8Precision, RowwiseScaling, TensorwiseScaling, revert_model
from lightning_fp8.backends import TorchaoBackend
from lightning_fp8.backends.torchao import Float8Product, TorchaoLinear
from lightning_fp8.kernels import reference
from lightning_fp8.recipes import ROLES, MXFP8Scaling, Recipe, get_recipe
from lightning_fp8.statistics import NOT_SEEN
from tests.backends.models import batch, convert, mlp

torchao = pytest.importorskip("torchao")

SHARED = {
    "tensorwise": TensorwiseScaling(),
    "tensorwise e4m3 pow2": TensorwiseScaling(format="e4m3", power_of_two=True),
    "rowwise": RowwiseScaling(),
    "rowwise hybrid": RowwiseScaling(format="hybrid", power_of_two=False),
    "rowwise_gw_hp": get_recipe("rowwise_gw_hp"),
    "mxfp8": MXFP8Scaling(),
}
RECIPES = [pytest.param(recipe, id=name) for name, recipe in SHARED.items()]


def operand(seed: int) -> Tensor:
    """Values over many binades, some rows large, some zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 96, generator=generator) * 2.0 ** torch.randint(-12, 8, (64, 1), generator=generator)
    x[5] = 0
    return x


# --- the quantised operands


@pytest.mark.parametrize("recipe", [p for p in RECIPES if p.id != "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operands_agree_bit_for_bit(recipe: Recipe, dtype: torch.dtype) -> None:
    from torchao.float8.config import ScalingType
    from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic

    product = Float8Product(recipe, emulate=True)
    compared = 0
    for seed, role in enumerate(ROLES):
        x = operand(seed).to(dtype)
        casts = recipe.casts[role]
        codes, decode, codes_t, decode_t = reference.cast(x, casts.straight, casts.transposed, None, False)
        other = {"input": "grad_weight", "weight": "grad_input", "grad_output": "grad_weight"}[role]
        for config, ours, ours_decode, transposed in (
            (getattr(product.config, f"cast_config_{role}"), codes, decode, False),
            (getattr(product.config, f"cast_config_{role}_for_{other}"), codes_t.t(), decode_t.t(), True),
        ):
            if config.scaling_type is ScalingType.DISABLED:
                assert ours.numel() == 0
                continue
            theirs = hp_tensor_to_float8_dynamic(
                x,
                config.target_dtype,
                product.products,
                scaling_granularity=config.scaling_granularity,
                axiswise_dim=get_maybe_axiswise_dim(0 if transposed else -1, config.scaling_granularity),
                round_scales_to_power_of_2=product.config.round_scales_to_power_of_2,
            )
            assert torch.equal(theirs._data.view(torch.uint8), ours.view(torch.uint8)), role
            # Where all values are zero, torchao's scale is the largest that it knows and ours is 1.
            used = theirs._scale.reciprocal().expand(x.shape)
            known = (x.abs().amax(0 if transposed else -1, keepdim=True) > 0).expand(x.shape)
            assert torch.equal(used[known], ours_decode.expand(x.shape)[known]), role
            compared += 1
    assert compared == (4 if recipe == get_recipe("rowwise_gw_hp") else 6)


def test_mx_operands_agree_bit_for_bit() -> None:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    cast = MXFP8Scaling().casts["input"].straight
    x = operand(0)
    codes, decode, _, _ = reference.cast(x, cast, None, None, False)
    theirs = MXTensor.to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL, KernelPreference.EMULATED)
    assert torch.equal(theirs.qdata.view(torch.uint8), codes.view(torch.uint8))
    known = x.view(64, 3, 32).abs().amax(-1) > 0
    assert torch.equal(theirs.scale.float()[known], decode[known])


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_agrees_with_the_native_backend(recipe: Recipe) -> None:
    models = mlp(), mlp()
    # mxfp8 asks for multiples of 32, rowwise and tensorwise for 16: 64 -> 32 suits both.
    for model in models:
        torch.manual_seed(1)
        model[2] = nn.Linear(64, 32)
    tables = [convert(m, recipe, b).runtime.table for m, b in zip(models, ("torchao", "native"), strict=True)]
    for number in range(3):
        for model in models:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.zero_grad()
            model(batch(number, rows=13)).square().mean().backward()
            optimizer.step()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(*(t.data for t in tables), rtol=1e-4, atol=1e-7)
    assert (tables[0].amax >= 0).all()


# --- the defects of torchao's own swap


def test_layers_stay_what_they_are() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), Own(32, 32))
    model[1].weight = model[0].weight
    model[0].eval()
    calls: list[int] = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    before = (list(model.state_dict()), [id(p) for p in model.parameters()], [id(m) for m in model.modules()])
    convert(model, "rowwise", "torchao")
    model(batch(0)).sum().backward()
    after = (list(model.state_dict()), [id(p) for p in model.parameters()], [id(m) for m in model.modules()])
    assert after == before and calls == [1] and not model[0].training
    assert [type(m) for m in model] == [TorchaoLinear, TorchaoLinear, Own]
    revert_model(model)
    assert [type(m) for m in model] == [nn.Linear, nn.Linear, Own]


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
@pytest.mark.parametrize("rows", [0, 1, 17])
def test_any_number_of_tokens(rows: int, recipe: str) -> None:
    model = nn.Linear(32, 32)
    table = convert(model, recipe, "torchao").runtime.table
    x = batch(0, rows=rows).view(1, rows, 32).requires_grad_()
    y = model(x)
    y.sum().backward()
    assert y.shape == (1, rows, 32) and x.grad is not None and x.grad.shape == x.shape
    assert model.weight.grad is not None and model.weight.grad.isfinite().all()
    assert (table.amax[0] != NOT_SEEN).tolist() == [rows > 0, True, rows > 0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_cpu_autocast_is_honoured(recipe: Recipe) -> None:
    model = nn.Linear(32, 64)
    plain = copy.deepcopy(model)
    convert(model, recipe, "torchao", autocast_only=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(batch(0))
        y.float().sum().backward()  # In manual optimization backward runs inside the region too.
    assert y.dtype is torch.bfloat16 and model.weight.grad is not None and model.weight.grad.dtype is torch.float32
    assert torch.equal(model(batch(0)), plain(batch(0)))


def test_evaluation_records_nothing_and_high_precision_is_watched() -> None:
    model = mlp()
    runtime = convert(model, "tensorwise", "torchao").runtime
    model.eval()(batch(0))
    assert (runtime.table.amax < 0).all()
    runtime.set_enabled(["0"], False)
    x = batch(0)
    assert torch.equal(model.train()[0](x), nn.functional.linear(x, model[0].weight, model[0].bias))
    assert torch.equal(runtime.table.amax[0, 0], x.abs().max())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_operands_are_seen(value: float) -> None:
    model = mlp()
    table = convert(model, "tensorwise", "torchao").runtime.table
    x = batch(0)
    x[3, 5] = value
    y = model(x)
    assert not table.amax[0, 0].isfinite() and not y.isfinite().all()


def test_copies_work() -> None:
    model = mlp()
    convert(model, "rowwise", "torchao")
    expected = model(batch(0))
    assert torch.equal(copy.deepcopy(model)(batch(0)), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(batch(0)), expected)


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_compiled_whole(recipe: str) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    table = convert(model, recipe, "torchao").runtime.table
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for m in (compiled, eager):
        m(batch(0, rows=13)).square().mean().backward()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert (table.amax >= 0).all()


# --- what it cannot do

REFUSED: dict[str, tuple[Any, str]] = {
    "delayed": ("delayed", "from the data"),
    "static": ("static", "from the data"),
    "blockwise": ("blockwise", "from the data"),
    "history": (DelayedScaling(), "from the data"),
    "margin": (TensorwiseScaling(margin=0.5), "margin"),
    "two formats": (RowwiseScaling(format="e5m2_grad_weight"), "one format"),
    "mx e5m2": (MXFP8Scaling(format="hybrid"), "E4M3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_recipes(case: str) -> None:
    recipe, words = REFUSED[case]
    support = TorchaoBackend().support(get_recipe(recipe), torch.device("cpu"))
    assert support.kind == "refused" and words in support.reason and "use " in support.reason
    model = mlp()
    with pytest.raises(ValueError, match="torchao backend cannot run"):
        convert(model, recipe, "torchao")
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(
    ("recipe", "lacking", "words"),
    [
        ("rowwise", ["torchao"], "not installed"),
        ("rowwise", ["torchao.float8.float8_linear"], "lacks"),
        ("mxfp8", ["torchao.prototype.moe_training.mxfp8_linear", "torchao.prototype.mx_formats.mx_linear"], "lacks"),
    ],
)
def test_what_the_library_lacks_is_told_at_construction(
    recipe: str, lacking: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in lacking:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=words) as caught:
        FP8Precision(recipe, backend="torchao")
    assert "pip install 'torchao>=0.17'" in str(caught.value) and "\n" not in str(caught.value)


def test_a_library_too_old_is_told_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fp8.backends.torchao.version", lambda name: "0.9.0+git1234")
    with pytest.raises(ValueError, match=r"torchao 0\.9\.0\+git1234 is too old: pip install"):
        FP8Precision("rowwise", backend="torchao")


@pytest.mark.parametrize("recipe", RECIPES)
def test_shared_recipes_are_emulated_on_the_cpu(recipe: Recipe) -> None:
    assert TorchaoBackend().support(recipe, torch.device("cpu")).kind == "emulated"
