"""Every backend with its real library on a CUDA device. Tests skip where a library is not installed."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fp8 import DelayedScaling, FP8Precision, LayerSelection, StaticScaling, convert_model
from lightning_fp8 import step as fp8_step
from lightning_fp8.backends import NAMED_BACKENDS, Backend, NativeBackend, TransformerEngineBackend
from lightning_fp8.casts import Cast
from lightning_fp8.kernels import fbgemm, reference
from lightning_fp8.model import conversions
from lightning_fp8.recipes import RECIPE_NAMES, ROLES, Recipe, get_recipe
from lightning_fp8.statistics import LAST_AMAX, SCALE
from tests.backends.models import ALL, FUSE, Block

pytestmark = pytest.mark.gpu

BACKENDS: dict[str, Backend] = {
    **NAMED_BACKENDS,
    "transformer_engine library amax": TransformerEngineBackend(amax="library"),
}
PAIRS = [(backend, recipe) for backend in BACKENDS for recipe in RECIPE_NAMES]


def usable(backend: Backend, recipe: Recipe) -> Backend:
    support = backend.support(recipe, torch.device("cuda"))
    if support.kind == "refused":
        pytest.skip(support.reason)
    return backend


def mlp(width: int = 256, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU("tanh"), nn.Linear(2 * width, width)).cuda()


def batch(seed: int, rows: int = 512, width: int = 256, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).cuda()


def converted(backend: Backend, recipe: Recipe | str, model: nn.Module | None = None) -> Any:
    model = mlp() if model is None else model
    convert_model(model, recipe, backend=usable(backend, get_recipe(recipe)), layers=ALL, autocast_only=True)
    return model


def runtime_of(model: nn.Module) -> Any:
    return conversions(model)[0].runtime


def forward(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return model(x)


def train_step(model: nn.Module, x: Tensor, lr: float = 0.05) -> Tensor:
    loss = forward(model, x).float().square().mean()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= lr * p.grad
            p.grad = None
    fp8_step(model)
    return loss.detach()


def sqnr(reference: Tensor, x: Tensor) -> float:
    """Signal to quantisation noise, dB."""
    noise = (reference - x.double()).square().sum()
    return 10 * math.log10(reference.square().sum() / noise)


# --- right


@pytest.mark.parametrize(("name", "recipe"), PAIRS)
def test_gradients_against_float64(name: str, recipe: str) -> None:
    model = mlp()
    exact = copy.deepcopy(model).double()
    converted(BACKENDS[name], recipe, model)
    x = batch(0)
    for m, y in ((model, forward(model, x).double()), (exact, exact(x.double()))):
        (y.square().mean()).backward()
        m.output = y.detach()
    assert sqnr(exact.output, model.output) > 22
    if recipe == "static":  # Scale 1: the gradients underflow, which is its purpose.
        return
    for (key, p), q in zip(exact.named_parameters(), model.parameters(), strict=True):
        assert q.grad.dtype is torch.float32 and sqnr(p.grad, q.grad) > 18, key


@pytest.mark.parametrize("name", BACKENDS)
def test_the_output_may_be_changed_in_place(name: str) -> None:
    recipe = "tensorwise" if name == "torchao" else "delayed"
    gradients = []
    for relu in (torch.relu, torch.relu_):
        layer = converted(BACKENDS[name], recipe)[0]
        relu(forward(layer, batch(0, 64))).float().sum().backward()
        gradients.append(layer.weight.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("rows", [0, 1, 24, 200])
@pytest.mark.parametrize("name", BACKENDS)
def test_any_number_of_tokens(name: str, rows: int) -> None:
    for recipe in ("delayed", "tensorwise"):
        if BACKENDS[name].support(get_recipe(recipe), torch.device("cuda")).kind == "refused":
            continue
        model = converted(BACKENDS[name], recipe)
        plain = mlp()
        x = batch(0, rows).view(1, rows, 256).requires_grad_()
        y = forward(model, x)
        y.float().sum().backward()
        assert y.shape == x.shape and y.dtype is torch.bfloat16 and x.grad.isfinite().all()
        if rows:
            assert sqnr(plain(x.detach()).double(), y) > 20


@pytest.mark.parametrize(("name", "recipe"), PAIRS)
def test_statistics_equal_the_native_ones(name: str, recipe: str) -> None:
    ours, native = converted(BACKENDS[name], recipe), converted(NativeBackend(), recipe)
    for number in range(4):
        for model in (ours, native):
            train_step(model, batch(number, scale=1.0 + number))
        tables = [runtime_of(m).table.data for m in (ours, native)]
        torch.testing.assert_close(tables[0][..., LAST_AMAX], tables[1][..., LAST_AMAX], rtol=0.05, atol=0)
        torch.testing.assert_close(tables[0][..., SCALE], tables[1][..., SCALE], rtol=0.05, atol=0)
    runtime_of(ours).set_enabled(["0"], False)
    x = batch(9)
    forward(ours, x)
    assert torch.equal(runtime_of(ours).table.amax[0, 0], x.abs().max())


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_operands_are_seen(name: str, value: float) -> None:
    for recipe in ("delayed", "tensorwise"):
        if BACKENDS[name].support(get_recipe(recipe), torch.device("cuda")).kind == "refused":
            continue
        model = converted(BACKENDS[name], recipe)
        train_step(model, batch(0))
        x = batch(1)
        x[3, 5] = value
        y = forward(model, x)
        # Transformer Engine's casts turn an Inf into the largest finite value: only the amax shows it.
        assert bool(y.isfinite().all()) is (name.startswith("transformer_engine") and math.isinf(value))
        sees = not runtime_of(model).table.amax[0, 0].isfinite()
        # Transformer Engine's own amaxes are taken with fmaxf, which drops NaN.
        assert bool(sees) is not (name.endswith("library amax") and math.isnan(value))


# --- state and modules


@pytest.mark.parametrize("name", BACKENDS)
def test_modules_copies_and_state(name: str) -> None:
    recipe = "tensorwise" if name == "torchao" else "delayed"
    model = mlp()
    before = (list(model.state_dict()), [id(p) for p in model.parameters()], [id(m) for m in model.modules()])
    generator = torch.get_rng_state(), torch.cuda.get_rng_state()
    converted(BACKENDS[name], recipe, model)
    losses = [train_step(model, batch(number)) for number in range(3)]
    assert all(map(torch.equal, generator, (torch.get_rng_state(), torch.cuda.get_rng_state())))
    after = (list(model.state_dict()), [id(p) for p in model.parameters()], [id(m) for m in model.modules()])
    assert after == before and losses[2] < losses[0]
    resumed = converted(BACKENDS[name], recipe, mlp(seed=3))
    resumed.load_state_dict(model.state_dict())
    assert runtime_of(resumed).load_state_dict(runtime_of(model).live_state()) == []
    twins = [model, resumed, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for number in range(3, 5):
        values = [train_step(twin, batch(number)) for twin in twins]
        assert all(torch.equal(value, values[0]) for value in values)
    model.eval()
    table = runtime_of(model).table.data.clone()
    forward(model, batch(7))
    assert torch.equal(runtime_of(model).table.data, table)


@pytest.mark.parametrize("name", ["native", "torchao", "transformer_engine"])
def test_compiled(name: str) -> None:
    model = converted(BACKENDS[name], "tensorwise")
    eager = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=name != "transformer_engine")
    values = [train_step(m, batch(0)) for m in (compiled, eager)]
    torch.testing.assert_close(*values, rtol=1e-2, atol=0)
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0.1, atol=1e-3)


@pytest.mark.parametrize("name", ["native", "torchao", "transformer_engine"])
def test_under_the_trainer(name: str, tmp_path: Any) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Model(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 2))

    usable(BACKENDS[name], get_recipe("tensorwise"))
    # "auto" would leave layers of this size in bf16.
    plugin = FP8Precision("tensorwise", backend=BACKENDS[name], layers=LayerSelection())
    Trainer(
        max_steps=3,
        limit_val_batches=1,
        accelerator="gpu",
        devices=1,
        plugins=[plugin],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    ).fit(Model())
    assert plugin.conversions[0].converted and plugin.conversions[0].support.kind == "native"


# --- torchao


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torchao_operands_agree_bit_for_bit(recipe: str) -> None:
    pytest.importorskip("torchao")
    from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic

    from lightning_fp8 import kernels
    from lightning_fp8.backends.torchao import Float8Product

    product = Float8Product(get_recipe(recipe), emulate=False)
    for role in ROLES:
        x = batch(1) * torch.logspace(-4, 2, 512).cuda()[:, None]
        casts = get_recipe(recipe).casts[role]
        codes = kernels.cast(x, casts.straight, casts.transposed, None, False)[0]
        config = getattr(product.config, f"cast_config_{role}")
        theirs = hp_tensor_to_float8_dynamic(
            x,
            config.target_dtype,
            product.products,
            scaling_granularity=config.scaling_granularity,
            axiswise_dim=get_maybe_axiswise_dim(-1, config.scaling_granularity),
            round_scales_to_power_of_2=product.config.round_scales_to_power_of_2,
        )
        assert torch.equal(theirs._data.view(torch.uint8), codes.view(torch.uint8)), role


# --- FBGEMM


@pytest.mark.parametrize("granularities", [("tensorwise",) * 2, ("rowwise",) * 2, ("1x128", "128x128")])
@pytest.mark.parametrize("fast_accum", [True, False])
def test_fbgemm_products(granularities: tuple[Any, Any], fast_accum: bool) -> None:
    if (against := fbgemm.why_not_installed()) is not None:
        pytest.skip(against)
    from lightning_fp8 import kernels
    from lightning_fp8.formats import E4M3

    casts = Cast(E4M3, granularities[0]), Cast(E4M3, granularities[1])
    a, decode_a, *_ = kernels.cast(batch(0, 384, 512), casts[0], None, None, False)
    b, decode_b, *_ = kernels.cast(batch(1, 256, 512), casts[1], None, None, False)
    assert fbgemm.takes(a, casts, torch.bfloat16) and not fbgemm.takes(a, casts, torch.float32)
    got = fbgemm.scaled_mm(a, b, decode_a, decode_b, casts, fast_accum)
    expected = reference.scaled_mm(a, b, decode_a, decode_b, torch.float32)
    assert got.dtype is torch.bfloat16 and sqnr(expected.double(), got) > 35


# --- Transformer Engine


@pytest.fixture
def te() -> Any:
    usable(TransformerEngineBackend(), get_recipe("delayed"))
    import transformer_engine.pytorch

    return transformer_engine.pytorch


def test_casts_read_our_scales_and_nothing_is_global(te: Any) -> None:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    model = converted(TransformerEngineBackend(), StaticScaling(scale=2.0**-30, format="hybrid"))
    y = forward(model[0], batch(0))
    assert (y == model[0].bias.bfloat16()).all()  # Every value underflows.
    train_step(converted(TransformerEngineBackend(), "delayed"), batch(0))
    assert not any(FP8GlobalStateManager.quantization_state.global_amax_buffer.values())


def test_cached_weights(te: Any) -> None:
    models = [converted(TransformerEngineBackend(cache_weights=cache), "delayed") for cache in (True, False)]
    for model in models:
        for window in range(3):
            for micro in range(2):
                forward(model, batch(2 * window + micro)).float().square().mean().backward()
            train_step(model, batch(100 + window))
    assert models[0][0].fp8.engine.module._fp8_workspaces and not models[1][0].fp8.engine.module._fp8_workspaces
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("bias", [True, False])
def test_fused_modules(te: Any, norm: type[nn.Module], bias: bool) -> None:
    torch.manual_seed(0)
    fused = Block(norm, bias).cuda()
    plain = copy.deepcopy(fused)
    converted(TransformerEngineBackend(fuse=FUSE), DelayedScaling(amax_history_len=4), fused)
    converted(TransformerEngineBackend(), DelayedScaling(amax_history_len=4), plain)
    names = list(plain.state_dict())
    for number in range(5):
        values = [train_step(m, batch(number, 72, 32).view(2, 36, 32)) for m in (fused, plain)]
        torch.testing.assert_close(*values, rtol=0.02, atol=0)
    assert fused.mlp[2].fp8.fused_engine is not None and list(fused.state_dict()) == names
    tables = [runtime_of(m).table.data[..., LAST_AMAX] for m in (fused, plain)]
    torch.testing.assert_close(*tables, rtol=0.1, atol=0)
    for p, q in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0.05, atol=2e-3)


def test_attention(te: Any) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(256, 768)
            self.attention = te.DotProductAttention(2, 128, attention_dropout=0.0, attn_mask_type="causal")
            self.out = nn.Linear(256, 256)

        def forward(self, x: Tensor) -> Tensor:  # [time, batch, 256]
            q, k, v = (part.unflatten(-1, (2, 128)) for part in self.qkv(x).chunk(3, -1))
            return self.out(self.attention(q, k, v))

    outputs = []
    x = batch(0, 1024).view(512, 2, 256)
    for fp8_dpa in (True, False):
        torch.manual_seed(0)
        model = Attention().cuda()
        convert_model(
            model, "delayed", backend=TransformerEngineBackend(fp8_dpa=fp8_dpa), layers=ALL, autocast_only=True
        )
        for _ in range(2):  # Attention's scales are the library's own: the first region begins at 1.
            with runtime_of(model).forward_context():
                y = forward(model, x)
            F.mse_loss(y.float(), x).backward()
            fp8_step(model)
        outputs.append(y.double())
    assert not torch.equal(*outputs) and sqnr(outputs[1], outputs[0]) > 15
