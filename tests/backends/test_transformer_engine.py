"""The Transformer Engine backend's conversion, naming and state logic, on a stand-in with the library's interface."""

from __future__ import annotations

import copy
import io
import pickle
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import DelayedScaling, StaticScaling, revert_model
from lightning_fp8 import step as fp8_step
from lightning_fp8.backends.transformer_engine import TransformerEngineBackend, TransformerEngineLinear
from lightning_fp8.kernels.capability import Hardware
from lightning_fp8.operand_statistics import OperandStatistics
from lightning_fp8.recipes import RECIPE_NAMES, BlockwiseScaling, TensorwiseScaling, get_recipe
from lightning_fp8.statistics import AMAX, LAST_AMAX, NOT_SEEN, SCALE
from lightning_fp8.telemetry import Telemetry
from lightning_fp8.tuning.flops import StepFlops
from tests.backends.models import FUSE, Block, StandIn, batch, convert, mlp

CPU = torch.device("cpu")
HOPPER = Hardware("cuda", (9, 0), (13, 0))


def train_step(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    fp8_step(model)
    return loss.detach()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


# --- conversion and names


def test_layers_stay_what_they_are(library: ModuleType) -> None:
    model = mlp()
    model[2].weight.requires_grad_(False)
    model[0].eval()
    calls: list[int] = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    before = (list(model.state_dict()), [id(p) for p in model.parameters()], [id(m) for m in model.modules()])
    state = torch.get_rng_state()
    convert(model, "delayed", StandIn())
    model(batch(0))
    after = (list(model.state_dict()), [id(p) for p in model.parameters()], [id(m) for m in model.modules()])
    assert after == before
    assert calls == [1] and not model[0].training and not model[2].weight.requires_grad
    assert torch.equal(torch.get_rng_state(), state)
    assert type(model[0]) is TransformerEngineLinear and isinstance(model[0], nn.Linear)
    revert_model(model)
    assert type(model[0]) is nn.Linear and not hasattr(model[0], "fp8")


def test_tied_weights_and_subclasses(library: ModuleType) -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), Own(32, 32))
    model[1].weight = model[0].weight
    convert(model, "delayed", StandIn())
    assert model[1].weight is model[0].weight and type(model[2]) is Own
    model(batch(0)).sum().backward()
    assert model[0].weight.grad is not None


# --- scales: the same as the native backend's, which a test of its own compares with an oracle


@pytest.mark.parametrize(
    "recipe",
    [
        DelayedScaling(amax_history_len=4),
        DelayedScaling(amax_history_len=3, margin=0.5, smoothing=0.5, format="e4m3"),
        DelayedScaling(amax_compute_algo="most_recent", power_of_two=True, max_scale=64.0),
        StaticScaling(scale=8.0),
    ],
    ids=["hybrid", "smooth", "bounded", "static"],
)
def test_steps_equal_the_native_ones(library: ModuleType, recipe: Any) -> None:
    ours, native = mlp(), mlp()
    a, b = convert(ours, recipe, StandIn()), convert(native, recipe, "native")
    optimizers = sgd(ours), sgd(native)
    for number in range(6):
        x = batch(number, rows=13, scale=1.0 + number)
        losses = [train_step(m, x, o) for m, o in zip((ours, native), optimizers, strict=True)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(a.runtime.table.data, b.runtime.table.data, rtol=1e-4, atol=1e-7)
    for p, q in zip(ours.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    ours.eval(), native.eval()
    before = a.runtime.table.data.clone()
    torch.testing.assert_close(ours(batch(99)), native(batch(99)), rtol=1e-4, atol=1e-5)
    assert torch.equal(a.runtime.table.data, before)


def test_library_amaxes_equal_measured_ones(library: ModuleType) -> None:
    models = [mlp(), mlp()]
    backends = StandIn(amax="measured"), StandIn(amax="library")
    tables = [convert(m, "delayed", b).runtime.table for m, b in zip(models, backends, strict=True)]
    optimizers = [sgd(m) for m in models]
    for number in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            train_step(model, batch(number), optimizer)
        torch.testing.assert_close(*(t.data for t in tables), rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_operands_are_seen(library: ModuleType, value: float) -> None:
    for source, sees in (("measured", True), ("library", value == float("inf"))):
        model = mlp()
        table = convert(model, "delayed", StandIn(amax=source)).runtime.table  # type: ignore[arg-type]
        train_step(model, batch(0), sgd(model))
        x = batch(1)
        x[3, 5] = value
        model(x)
        assert bool(table.amax[0, 0].isfinite()) is not sees, source


def test_own_buffers_of_the_library_stay_empty(library: ModuleType) -> None:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    model = mlp()
    convert(model, "delayed", StandIn())
    train_step(model, batch(0), sgd(model))
    assert FP8GlobalStateManager.registered == []
    # A module of the user's own in an outer region goes on as the library does it.
    own = library.Linear(32, 32, device="cpu")
    with library.autocast(enabled=True, recipe=_library_delayed()):
        own(model[0](batch(1))[:, :32].contiguous()).sum()
    assert len(FP8GlobalStateManager.registered) == 1
    assert own.fp8_meta["scaling_fwd"].scale[0] != 1


def _library_delayed() -> Any:
    from transformer_engine.common.recipe import DelayedScaling as LibraryDelayed

    return LibraryDelayed()


def test_rejected_step_leaves_no_trace(library: ModuleType) -> None:
    model = mlp()
    runtime = convert(model, "delayed", StandIn()).runtime
    train_step(model, batch(0), sgd(model))
    before = runtime.table.data.clone()
    model(batch(1, scale=1e6)).sum().backward()
    runtime.discard(torch.tensor(True))
    assert torch.equal(runtime.table.data, before)


# --- recipes that scale from the data


@pytest.mark.parametrize(
    ("recipe", "name", "power_of_two"),
    [
        (TensorwiseScaling(), "Float8CurrentScaling", False),
        (TensorwiseScaling(power_of_two=True), "Float8CurrentScaling", True),
        (BlockwiseScaling(), "Float8BlockScaling", False),
        (get_recipe("mxfp8"), "MXFP8BlockScaling", None),
    ],
    ids=repr,
)
def test_recipes_of_the_library(library: ModuleType, recipe: Any, name: str, power_of_two: bool | None) -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    table = convert(model, recipe, StandIn()).runtime.table
    x = torch.randn(128, 128)
    model(x).sum().backward()
    entered = library.autocast.entered[-1]
    assert type(entered).__name__ == name
    if power_of_two is not None:
        assert entered.fp8_quant_fwd_inp.power_2_scale is power_of_two
        assert entered.fp8_quant_bwd_grad.power_2_scale is power_of_two
    assert torch.equal(table.amax[0, 0], x.abs().max())
    assert torch.equal(table.amax[1, 1], model[1].weight.abs().max())
    assert table.amax[1, 2] == 1


REFUSED = {
    "rowwise": ("rowwise", {}, "no such recipe"),
    "e5m2 inputs": (DelayedScaling(format={"input": "e5m2", "grad_output": "e4m3"}), {}, "E4M3"),
    "two gradient formats": (DelayedScaling(format="e5m2_grad_weight"), {}, "one format"),
    "margin": (TensorwiseScaling(margin=1), {}, "margin"),
    "attention": ("tensorwise", {"fp8_dpa": True}, "delayed"),
    "fuse": ("blockwise", {"fuse": [("a", "b")]}, "delayed or static"),
    "library amax": ("mxfp8", {"amax": "library"}, "delayed or static"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_recipes(case: str) -> None:
    recipe, options, words = REFUSED[case]
    support = TransformerEngineBackend(**options).support_on(get_recipe(recipe), HOPPER)
    assert support.kind == "refused" and words in support.reason and "use " in support.reason


@pytest.mark.parametrize("options", [{"amax": "guessed"}, {"fuse": ["ln"]}, {"fuse": [("a", "b", "c")]}])
def test_unknown_options(options: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        TransformerEngineBackend(**options)


def test_missing_library_names_what_to_install() -> None:
    against = TransformerEngineBackend().why_not_installed(get_recipe("delayed"))
    assert against is not None and "pip install" in against and "\n" not in against


def test_hardware(library: ModuleType) -> None:
    backend = TransformerEngineBackend()
    support = backend.support(get_recipe("delayed"), CPU)
    assert support.kind == "refused" and "backend='native'" in support.reason
    assert backend.why_not_installed(get_recipe("delayed")) is None
    assert "10.0" in str(backend.why_not_installed(get_recipe("mxfp8")))  # The library has the last word.
    kinds = {name: backend.support_on(get_recipe(name), HOPPER).kind for name in RECIPE_NAMES}
    assert kinds["delayed"] == kinds["blockwise"] == kinds["static"] == "native"
    assert kinds["tensorwise"] == kinds["tensorwise_pow2"] == "native"
    assert kinds["rowwise"] == kinds["rowwise_gw_hp"] == kinds["mxfp8"] == kinds["blockwise_tiled"] == "refused"
    assert "tiled_inputs=False" in backend.support_on(get_recipe("blockwise_tiled"), HOPPER).reason


# --- weights kept over micro-batches


def _weight_casts(layer: Any) -> int:
    return layer.fp8.engine.module.quantizers["scaling_fwd"][1].calls


def test_weights_are_cast_once_for_all_micro_batches(library: ModuleType) -> None:
    cached, plain = mlp(), mlp()
    convert(cached, "delayed", StandIn(cache_weights=True))
    convert(plain, "delayed", StandIn())
    for model in (cached, plain):
        optimizer = sgd(model)
        for window in range(2):
            for micro in range(3):
                model(batch(3 * window + micro)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            fp8_step(model)
    assert (_weight_casts(cached[0]), _weight_casts(plain[0])) == (2, 6)
    for p, q in zip(cached.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("fused", [False, True])
def test_changed_weights_are_cast_anew(library: ModuleType, fused: bool) -> None:
    model = mlp()
    runtime = convert(model, "delayed", StandIn(cache_weights=True)).runtime
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    model(batch(0)).sum().backward()
    # The scales do not move yet: manual optimization steps more than once in a training step.
    optimizer.step()
    runtime.weights_changed()
    for _ in range(2):
        model(batch(0))
        assert _weight_casts(model[0]) == 2
    with torch.no_grad():
        model[0].weight.mul_(2)
    expected = copy.deepcopy(model)(batch(1))
    assert torch.equal(model(batch(1)), expected) and _weight_casts(model[0]) == 3


def test_a_new_window_casts_weights_anew(library: ModuleType) -> None:
    """Also those that a forward has cast since the optimizer step."""
    model = mlp()
    conversion = convert(model, "delayed", StandIn(cache_weights=True))
    model(batch(0))
    conversion.optimizer_stepped()
    model(batch(1))
    conversion.step()
    model(batch(2))
    assert conversion.runtime.table.amax[0, 1] == model[0].weight.abs().max()


def test_evaluation_casts_its_own_weights(library: ModuleType) -> None:
    model = mlp()
    convert(model, "delayed", StandIn(cache_weights=True))
    model(batch(0))
    model[0].weight.data.mul_(2)
    torch.testing.assert_close(model.eval()(batch(0)), copy.deepcopy(model)(batch(0)))


# --- state


def test_resuming_is_bit_identical(library: ModuleType) -> None:
    straight = mlp()
    runtime = convert(straight, DelayedScaling(amax_history_len=4), StandIn()).runtime
    optimizer = sgd(straight)
    for number in range(3):
        train_step(straight, batch(number), optimizer)
    file = io.BytesIO()
    torch.save({"model": straight.state_dict(), "fp8": runtime.live_state()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = mlp(seed=1)
    again = convert(resumed, DelayedScaling(amax_history_len=4), StandIn()).runtime
    resumed.load_state_dict(saved["model"])
    assert again.load_state_dict(saved["fp8"]) == []
    other = sgd(resumed)
    for number in range(3, 6):
        assert torch.equal(train_step(straight, batch(number), optimizer), train_step(resumed, batch(number), other))
    assert torch.equal(runtime.table.data, again.table.data)


def test_copies_have_scales_of_their_own(library: ModuleType) -> None:
    model = mlp()
    table = convert(model, "delayed", StandIn()).runtime.table
    train_step(model, batch(0), sgd(model))
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    before = table.data.clone()
    for twin in copies:
        assert torch.equal(twin.eval()(batch(1)), copy.deepcopy(model).eval()(batch(1)))
        twin.train()(batch(1, scale=100.0)).sum().backward()
    assert torch.equal(table.data, before)


def test_two_models_do_not_meet(library: ModuleType) -> None:
    alone, first, second = mlp(), mlp(), mlp(seed=5)
    for model in (alone, first, second):
        convert(model, "delayed", StandIn())
    optimizers = [sgd(m) for m in (alone, first, second)]
    for number in range(3):
        expected = train_step(alone, batch(number), optimizers[0])
        assert torch.equal(train_step(first, batch(number), optimizers[1]), expected)
        train_step(second, batch(number, scale=50.0), optimizers[2])


# --- shapes, precision, switches


@pytest.mark.parametrize("rows", [0, 1, 8, 17])
def test_any_number_of_tokens(library: ModuleType, rows: int) -> None:
    model = mlp()
    table = convert(model, "delayed", StandIn()).runtime.table
    x = batch(0, rows=rows).view(1, rows, 32).requires_grad_()
    y = model(x)
    y.sum().backward()
    assert y.shape == (1, rows, 16) and x.grad is not None and x.grad.shape == x.shape
    assert model[0].weight.grad is not None
    assert (table.amax != NOT_SEEN).tolist() == [[rows > 0, True, rows > 0]] * 2


def test_the_output_may_be_changed_in_place(library: ModuleType) -> None:
    model = mlp()
    convert(model, "delayed", StandIn())
    copy_of = copy.deepcopy(model)
    x = batch(0, rows=16)
    torch.relu(model[0](x)).sum().backward()
    torch.relu_(copy_of[0](x)).sum().backward()
    assert torch.equal(model[0].weight.grad, copy_of[0].weight.grad)


def test_autocast(library: ModuleType) -> None:
    model = mlp()
    table = convert(model, "delayed", StandIn(), autocast_only=True).runtime.table
    with torch.autocast("cpu", torch.bfloat16):
        y = model(batch(0))
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert model[0].weight.grad is not None and model[0].weight.grad.dtype is torch.float32
    assert (table.data[..., SCALE] > 0).all()
    scales = table.data[..., SCALE].clone()
    assert torch.equal(model(batch(1)), mlp()(batch(1)))  # Without autocast: in full precision.
    assert torch.equal(table.data[..., SCALE], scales)


def test_a_layer_in_high_precision_is_still_watched(library: ModuleType) -> None:
    model = mlp()
    runtime = convert(model, "delayed", StandIn()).runtime
    train_step(model, batch(0), sgd(model))
    runtime.set_enabled(["0"], False)
    x = batch(1)
    assert torch.equal(model[0](x), nn.functional.linear(x, model[0].weight, model[0].bias))
    model(x).sum().backward()
    assert torch.equal(runtime.table.amax[0, 0], x.abs().max())
    runtime.set_enabled(["0"], True)
    assert not torch.equal(model[0](x), nn.functional.linear(x, model[0].weight, model[0].bias))


def test_a_layer_that_runs_late_takes_its_first_scale_from_the_data(library: ModuleType) -> None:
    models = mlp(), mlp()
    tables = [convert(m, "delayed", b).runtime.table for m, b in zip(models, (StandIn(), "native"), strict=True)]
    for model in models:
        model[0](batch(0)).sum().backward()
        fp8_step(model)
        model(batch(1, scale=0.01)).sum().backward()
    torch.testing.assert_close(*(t.data for t in tables), rtol=1e-5, atol=0)
    assert (tables[0].data[1, :, SCALE] > 0).all()


def test_compiled(library: ModuleType) -> None:
    model = mlp()
    convert(model, "delayed", StandIn())
    expected = model.eval()(batch(0))
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(batch(0)), expected)
    compiled.train()(batch(0)).sum().backward()


# --- attention


def test_attention(library: ModuleType) -> None:
    with pytest.raises(ValueError, match="DotProductAttention"):
        convert(mlp(), "delayed", StandIn(fp8_dpa=True))
    model = nn.ModuleDict({"linear": nn.Linear(32, 32), "attention": library.DotProductAttention()})
    recipe = DelayedScaling(amax_history_len=7, margin=1.0)
    runtime = convert(model, recipe, StandIn(fp8_dpa=True)).runtime
    q = torch.randn(1, 1, 4, 8)
    with runtime.forward_context():
        model["attention"](q, q, q)
    entered = library.autocast.entered[-1]
    assert model["attention"].fp8_dpa and (entered.amax_history_len, entered.margin) == (7, 1.0)
    with convert(nn.ModuleList([nn.Linear(32, 32)]), "delayed", StandIn()).runtime.forward_context():
        model["attention"](q, q, q)
    assert not model["attention"].fp8_dpa


# --- fusions


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("bias", [True, False])
def test_fused_modules(library: ModuleType, norm: type[nn.Module], bias: bool) -> None:
    torch.manual_seed(0)
    fused = Block(norm, bias)
    plain = copy.deepcopy(fused)
    names = list(fused.state_dict())
    a = convert(fused, "delayed", StandIn(fuse=FUSE)).runtime
    b = convert(plain, "delayed", StandIn()).runtime
    optimizers = sgd(fused), sgd(plain)
    for number in range(4):
        x = batch(number, rows=12).view(2, 6, 32)
        losses = [train_step(m, x, o) for m, o in zip((fused, plain), optimizers, strict=True)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(a.table.data, b.table.data, rtol=1e-4, atol=1e-7)
    engine = fused.mlp[2].fp8.fused_engine
    assert type(engine.module).__name__ == "LayerNormMLP" and engine.module.activation == "gelu"
    assert type(fused.attention.fp8.fused_engine.module).__name__ == "LayerNormLinear"
    assert list(fused.state_dict()) == names
    assert (a.table.data[..., LAST_AMAX] > 0).all()
    torch.testing.assert_close(fused.eval()(batch(9)), plain.eval()(batch(9)))
    revert_model(fused)
    assert [type(m) for m in fused.modules()] == [type(m) for m in Block(norm, bias).modules()]


def test_fused_modules_follow_set_enabled(library: ModuleType) -> None:
    torch.manual_seed(0)
    model = Block()
    runtime = convert(model, "delayed", StandIn(fuse=FUSE)).runtime
    train_step(model, batch(0), sgd(model))
    runtime.set_enabled(["mlp.0"], False)
    x = batch(1)
    model(x).sum().backward()
    assert model.mlp[2].fp8.fused_engine is None and model.attention.fp8.fused_engine is not None
    assert (runtime.table.data[..., AMAX] >= 0).all()
    runtime.set_enabled(["mlp.0"], True)
    model(x)
    assert model.mlp[2].fp8.fused_engine is not None


def test_flops_and_statistics_of_fused_modules(library: ModuleType) -> None:
    """What a fused layer is called with is its group's: FLOPs are those of its own sizes, statistics of its weight."""
    model = Block()
    convert(model, "delayed", StandIn(fuse=FUSE))
    layers = [model.attention, model.mlp[0], model.mlp[2]]
    for number in range(2):  # Module by module in the first step, as one in the second.
        x = batch(number).requires_grad_()
        with StepFlops(layers) as counter:
            loss = model(x).square().mean()
        assert counter.flops == (3 * 2 * 16 * (32 * 32 + 2 * 32 * 64), 0)
        loss.backward()
        fp8_step(model)
    telemetry = Telemetry.attach(model)
    statistics = OperandStatistics(model, telemetry, range(3), [], None)
    statistics.begin()
    model(batch(2)).sum().backward()
    statistics.end()
    seen = ~statistics.values[:, :, 0].isnan().all(-1)
    assert seen.tolist() == [[False, True, False]] * 3


class _Wrong(Block):
    def __init__(self) -> None:
        super().__init__()
        self.exact = nn.GELU()
        self.narrow = nn.LayerNorm(16)
        self.own = nn.Dropout()


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (("nowhere", "attention"), "does not have"),
        (("mlp.1", "attention"), "not an nn.LayerNorm"),
        (("narrow", "attention"), "in_features"),
        (("ln_1", "ln_2"), "does not run in FP8"),
        (("ln_2", "mlp.0", "exact", "mlp.2"), "tanh"),
        (("ln_2", "mlp.0", "own", "mlp.2"), "none of"),
        (("ln_2", "mlp.0", "mlp.1", "attention"), "come back"),
    ],
)
def test_wrong_fusions_change_nothing(library: ModuleType, group: tuple[str, ...], words: str) -> None:
    model = _Wrong()
    with pytest.raises(ValueError, match=words):
        convert(model, "delayed", StandIn(fuse=(group,)))
    assert [type(m) for m in model.modules()] == [type(m) for m in _Wrong().modules()]


def test_a_module_in_two_groups(library: ModuleType) -> None:
    with pytest.raises(ValueError, match="two groups"):
        convert(Block(), "delayed", StandIn(fuse=(("ln_1", "attention"), ("ln_2", "attention"))))
