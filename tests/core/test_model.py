"""``convert_model``, ``step``, ``revert_model`` and the summary: settings, errors, state."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import remove_parametrizations

import lightning_fp8
from lightning_fp8 import DelayedScaling, LayerSelection, RowwiseScaling, convert_model, revert_model
from lightning_fp8.backends import NativeBackend, Support
from lightning_fp8.linear import MOST_UPDATES, Float8Linear
from lightning_fp8.model import Conversion, conversions
from lightning_fp8.statistics import LAST_AMAX


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 24))


def the(model: nn.Module) -> Conversion:
    (conversion,) = conversions(model)
    return conversion


def train(model: nn.Module, steps: int = 2) -> Tensor:
    for step in range(steps):
        y = model(torch.randn(16, 64, generator=torch.Generator().manual_seed(step)))
        y.square().mean().backward()
        lightning_fp8.step(model)
    return y.detach()


def traces(model: nn.Module) -> dict[str, Any]:
    """Everything by which a conversion could be told."""
    return {
        "classes": [type(m) for m in model.modules()],
        "attributes": [set(vars(m)) for m in model.modules()],
        "hooks": [list(m._forward_pre_hooks) for m in model.modules()],
        "conversions": [id(c) for c in conversions(model)],
        "states": [id(m.fp8) for m in model.modules() if isinstance(m, Float8Linear)],
        "scales": [c.runtime.table.data.clone().tolist() for c in conversions(model)],
        "parameters": [(id(p), p.dtype) for p in model.parameters()],
    }


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe", ["rowwise", {"name": "rowwise"}, RowwiseScaling(), {"name": "rowwise", "margin": 0.0}], ids=repr
)
def test_recipes_in_every_form(recipe: Any) -> None:
    model = convert_model(mlp(), recipe)
    assert the(model).recipe == RowwiseScaling() and the(model).converted == ["0", "2"]


def test_the_same_settings_change_nothing() -> None:
    model = convert_model(mlp(), "delayed", layers=LayerSelection(exclude=["2"]))
    train(model)
    before = traces(model)
    convert_model(model, DelayedScaling(), backend=NativeBackend(), layers=LayerSelection(exclude=["2"]))
    assert traces(model) == before


@pytest.mark.parametrize(
    "settings",
    [
        {"recipe": "tensorwise"},
        {"recipe": DelayedScaling(3)},
        {"layers": LayerSelection(exclude=["0"])},
        {"autocast_only": True},
    ],
    ids=repr,
)
def test_other_settings_convert_anew_and_say_so(settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    model = convert_model(mlp())
    train(model)
    old = the(model)
    with caplog.at_level(logging.INFO, "lightning_fp8"):
        convert_model(model, **settings)
    assert "onverting anew" in caplog.text
    assert the(model) is not old and the(model).runtime.table.data[..., 1].eq(0).all()
    fresh = convert_model(mlp(), **settings)
    assert [type(m) for m in model.modules()] == [type(m) for m in fresh.modules()]
    revert_model(model)
    assert not conversions(model) and type(model[0]) is nn.Linear


class NativeOn(NativeBackend):
    """A backend with tensor cores on one kind of device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.native_on = device

    def support(self, recipe: Any, device: torch.device) -> Support:
        return Support("native" if device.type == self.native_on else "emulated", f"on {device.type}")


def test_a_device_that_runs_the_recipe_otherwise_decides_anew() -> None:
    model, backend = mlp(), NativeOn("cuda")
    assert the(convert_model(model, backend=backend)).support == ("emulated", "on cpu")
    found = the(convert_model(model, backend=backend, device="cuda", layers=LayerSelection(head=True)))
    assert found.support == ("native", "on cuda")
    assert the(convert_model(model, backend=backend, device="cuda:1", layers=LayerSelection(head=True))) is found
    assert the(convert_model(model, backend=backend, layers=LayerSelection(head=True))) is not found


def test_a_part_converted_before_does_not_keep_the_rest_out() -> None:
    model = nn.ModuleDict({"a": mlp(), "b": mlp()})
    convert_model(model["a"])
    convert_model(model)
    assert the(model).converted == ["a.0", "a.2", "b.0", "b.2"]


def test_layers_that_came_later_are_converted() -> None:
    model = convert_model(mlp())
    model.append(nn.Linear(24, 48))
    model[2] = nn.Linear(128, 64)
    convert_model(model)
    assert [type(m) for m in model] == [Float8Linear, nn.GELU, Float8Linear, nn.Linear, nn.Linear]
    assert the(model).converted == ["0", "2"]


def resize(layer: nn.Linear, in_features: int, out_features: int) -> None:
    layer.weight = nn.Parameter(torch.randn(out_features, in_features) / in_features**0.5)
    layer.bias = nn.Parameter(torch.zeros(out_features))


@pytest.mark.parametrize("width", [33, 48])
def test_weights_of_other_sizes_are_decided_on_anew(width: int) -> None:
    model = convert_model(mlp())
    train(model)
    resize(model[0], 64, width)
    resize(model[2], width, 64)
    convert_model(model)
    assert the(model).converted == (["0", "2"] if width == 48 else [])
    assert f"sizes 64 -> {width} are not multiples of 16" in the(model).summary() or width == 48
    assert train(model).isfinite().all()
    resize(model[0], 64, 128)
    resize(model[2], 128, 64)
    convert_model(model)
    assert the(model).converted == ["0", "2"]


def test_a_weight_that_is_no_longer_parametrized_is_decided_on_anew() -> None:
    model = mlp()
    weight_norm(model[2])
    convert_model(model)
    assert the(model).converted == ["0"]
    conversion = the(model)
    assert the(convert_model(model)) is conversion
    remove_parametrizations(model[2], "weight")
    assert the(convert_model(model)).converted == ["0", "2"]


def test_what_changes_no_decision_keeps_the_scales() -> None:
    """Other weights of the same sizes, a lazy layer that now has its sizes, a parametrization that came later."""
    model = nn.Sequential(nn.LazyLinear(64), nn.GELU(), nn.Linear(64, 64), nn.LazyLinear(16))
    convert_model(model)
    conversion = the(model)
    train(model)
    model[2].weight = nn.Parameter(torch.randn(64, 64))
    weight_norm(model[0])
    assert the(convert_model(model)) is conversion
    remove_parametrizations(model[0], "weight")
    assert the(convert_model(model)) is conversion


def test_part_of_a_converted_model_is_left_as_it_is() -> None:
    model = nn.ModuleDict({"a": mlp(), "b": mlp()})
    convert_model(model)
    states = traces(model)["states"]
    with pytest.warns(UserWarning, match=r"0: it already runs in FP8.*revert_model"):
        convert_model(model["a"], "tensorwise")
    assert traces(model)["states"] == states
    revert_model(model)
    convert_model(model["a"], "tensorwise")
    assert the(model).converted == ["0", "2"]


def test_parts_converted_by_hand_work_together() -> None:
    model = nn.Sequential(mlp()[:3], mlp()[:3])
    convert_model(model[0], "delayed")
    convert_model(model[1], "mxfp8")
    assert [c.recipe.name for c in conversions(model)] == ["delayed", "mxfp8"]
    train(model)
    assert conversions(model)[0].runtime.table.data[0, 0, 1] > 0
    revert_model(model)
    assert not conversions(model) and not any(isinstance(m, Float8Linear) for m in model.modules())


def test_revert_without_conversion_changes_nothing() -> None:
    model = mlp()
    before = traces(model)
    revert_model(model)
    assert traces(model) == before


# --- step ------------------------------------------------------------------------------------------------------------


def test_step_without_conversion_is_an_error() -> None:
    with pytest.raises(ValueError, match="convert_model"):
        lightning_fp8.step(mlp())


def test_step_moves_scales_once() -> None:
    model = convert_model(mlp(), DelayedScaling(1))
    model(10 * torch.randn(16, 64)).sum().backward()
    first = the(model).runtime.table.data[0, 1, 1].item()
    with torch.no_grad():
        model[0].weight.mul_(2)
    model(torch.randn(16, 64)).sum().backward()
    assert the(model).runtime.table.data[0, 1, 1].item() == first
    lightning_fp8.step(model)
    assert the(model).runtime.table.data[0, 1, 1].item() == pytest.approx(first / 2)
    before = the(model).runtime.table.data.clone()
    lightning_fp8.step(model)  # Nothing ran in between.
    assert torch.equal(the(model).runtime.table.data, before)


@pytest.mark.parametrize(
    ("recipe", "step", "warned"), [("delayed", False, 1), ("delayed", True, 0), ("rowwise", False, 0)]
)
def test_a_step_that_nobody_tells_of_is_missed(recipe: str, step: bool, warned: int) -> None:
    """Scales that never move spoil training in silence; loading weights, or accumulating, is no step."""
    model = convert_model(mlp(), recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for number in range(MOST_UPDATES + 10):
            for _ in range(2):
                model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step and number % 5 == 4:  # A few updates without one are none to speak of, as where weights are loaded.
                lightning_fp8.step(model)
    messages = [str(warning.message) for warning in found if "lightning_fp8.step(model)" in str(warning.message)]
    assert len(messages) == warned, messages


def test_training_without_a_trainer_learns() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 64)
    target = x @ torch.randn(64, 64) / 8
    losses = {}
    for recipe in (None, "delayed", "mxfp8"):
        model: nn.Module = mlp()[:3]
        if recipe:
            convert_model(model, recipe, layers=LayerSelection(head=True))
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(60):
            loss = (model(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if recipe:
                lightning_fp8.step(model)
        losses[recipe] = loss.item()
    assert losses[None] < 0.5
    assert all(loss == pytest.approx(losses[None], rel=0.1) for loss in losses.values())


# --- summary ---------------------------------------------------------------------------------------------------------


def test_summary_tells_what_runs_how_and_why_not() -> None:
    model = nn.Sequential(*mlp(), nn.MultiheadAttention(32, 2), nn.Linear(64, 64))
    convert_model(model, "rowwise", layers=LayerSelection(exclude=["2"]))
    lines = the(model).summary().splitlines()
    assert lines[0].startswith("FP8: 1 of 5 linear layers, RowwiseScaling(")
    assert "native backend (" in lines[0] and lines[0].endswith(f"({the(model).support.reason})")
    rows = {line.split()[0]: line for line in lines[2:]}
    assert list(rows) == ["0", "2", "3", "4.out_proj", "5"]
    assert "FP8" in rows["0"] and "rowwise" in rows["0"]
    assert "high precision" in rows["2"] and "exclude pattern" in rows["2"]
    assert "64 -> 24 are not multiples of 16" in rows["3"]
    assert "subclass" in rows["4.out_proj"] and "head" in rows["5"]


def test_what_might_be_a_linear_layer_is_named_where_there_is_none() -> None:
    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(64, 64))

    with pytest.warns(UserWarning, match="it has no nn.Linear; Conv1D has a matrix of weights and is no nn.Linear"):
        convert_model(nn.Sequential(nn.Embedding(8, 64), Conv1D(), nn.LayerNorm(64)))


def test_a_model_without_fp8_layers_is_warned_of() -> None:
    for model, reason in [(nn.LayerNorm(8), "it has no nn.Linear"), (nn.Linear(3, 5), "3 -> 5 are not multiples")]:
        with pytest.warns(UserWarning, match=f"No layer of {type(model).__name__} runs in FP8.*{reason}"):
            convert_model(model)
        lightning_fp8.step(model)
        revert_model(model)


# --- errors: nothing half converted ----------------------------------------------------------------------------------


class Refusing(NativeBackend):
    name = "refusing"

    def support(self, recipe: Any, device: torch.device) -> Support:
        return Support("refused", "it runs on toasters only: take another backend.")


class Choking(NativeBackend):
    name = "choking"

    def make_state(self, scaling: Any, index: int, layer: nn.Linear, autocast_only: bool) -> Any:
        if index == 1:
            raise ValueError("cannot run this layer")
        return super().make_state(scaling, index, layer, autocast_only)


def raising_filter(module: nn.Module, name: str) -> bool:
    raise KeyError(name)


ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"recipe": "fp4"}, ValueError, "choose one of delayed"),
    ({"recipe": {"name": "delayed", "amax_history_len": 0}}, ValueError, "at least 1"),
    ({"recipe": {"name": "delayed", "format": {"input": "e5m2", "weight": "e5m2"}}}, ValueError, "E5M2 by E5M2"),
    ({"recipe": 7}, TypeError, "A recipe is"),
    ({"backend": "cublas"}, ValueError, "Unknown backend 'cublas': choose one of auto, native"),
    ({"backend": 7}, TypeError, "A backend is"),
    ({"backend": Refusing()}, ValueError, "refusing backend cannot run the delayed recipe on cpu: .*another backend"),
    ({"backend": Choking()}, ValueError, "cannot run this layer"),
    ({"layers": "all"}, ValueError, "'auto' or a LayerSelection"),
    ({"layers": None}, ValueError, "'auto' or a LayerSelection"),
    ({"layers": LayerSelection(include=["*.moe"])}, ValueError, "matches no linear layer"),
    ({"layers": LayerSelection(exclude=["0", "lm_head"])}, ValueError, "'lm_head' matches no linear layer"),
    ({"layers": LayerSelection(filter=raising_filter)}, KeyError, "0"),
]


@pytest.mark.parametrize("converted", [False, True], ids=["fresh", "converted"])
@pytest.mark.parametrize(("settings", "error", "remedy"), ERRORS, ids=lambda value: str(value)[:50])
def test_errors_change_nothing(settings: dict[str, Any], error: type[Exception], remedy: str, converted: bool) -> None:
    model = mlp()
    if converted:
        convert_model(model, "tensorwise")
        train(model)
    before = traces(model)
    with pytest.raises(error, match=remedy):
        convert_model(model, **settings)
    assert traces(model) == before
    if converted:
        train(model, 1)


@pytest.mark.parametrize("converted", [False, True], ids=["fresh", "converted"])
def test_layers_on_several_devices_are_refused(converted: bool) -> None:
    model = mlp()
    if converted:
        convert_model(model, "tensorwise")
    model[2].to("meta")
    before = traces(model)
    with pytest.raises(ValueError, match="several devices"):
        convert_model(model)
    assert traces(model) == before


def test_layers_put_on_several_devices_afterwards_are_refused_as_the_step_ends() -> None:
    model = convert_model(mlp())
    train(model)
    state = the(model).runtime.states[0]
    state.slots = tuple(slot.to("meta") for slot in state.slots)  # type: ignore[assignment]  # As on another GPU.
    with pytest.raises(RuntimeError, match=r"several devices \(meta besides cpu\): convert each part by itself"):
        lightning_fp8.step(model)


def test_sharded_weights_are_refused(tmp_path: Path) -> None:
    from torch.distributed.tensor import DeviceMesh, distribute_module

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = mlp()
        distribute_module(model[2], DeviceMesh("cpu", [0]))
        before = traces(model)
        with pytest.raises(ValueError, match=r"'2' is already sharded: convert before sharding"):
            convert_model(model)
        assert traces(model) == before
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_warned_of(bad: float) -> None:
    model = mlp()
    with torch.no_grad():
        model[2].weight[3, 4] = bad
    with pytest.warns(UserWarning, match="'2' holds NaN or Inf before training begins.*initialisation"):
        convert_model(model)
    revert_model(model)
    before = traces(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            convert_model(model)
    assert traces(model) == before


# --- state -----------------------------------------------------------------------------------------------------------


def test_resuming_is_bit_identical(tmp_path: Path) -> None:
    model = convert_model(mlp(), DelayedScaling(2, smoothing=0.5))
    train(model, 3)
    torch.save({"model": model.state_dict(), "fp8": the(model).state_dict()}, tmp_path / "checkpoint.pt")
    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    other = convert_model(mlp(), DelayedScaling(2, smoothing=0.5))
    other.load_state_dict(loaded["model"])
    the(other).load_state_dict(loaded["fp8"])
    assert torch.equal(train(model, 3), train(other, 3))
    assert torch.equal(the(model).runtime.table.data, the(other).runtime.table.data)


def test_another_recipes_state_warns_and_starts_from_the_data() -> None:
    saved = the(convert_model(mlp(), DelayedScaling(3))).state_dict()
    model = convert_model(mlp(), "delayed")
    before = traces(model)
    with pytest.warns(UserWarning, match=r"Scales start from the data.*checkpoint's recipe"):
        the(model).load_state_dict(saved)
    assert traces(model) == before


def test_layers_missing_in_a_state_are_named() -> None:
    saved = the(convert_model(mlp(), layers=LayerSelection(exclude=["0"]))).state_dict()
    with pytest.warns(UserWarning, match="no FP8 state for 0: scales start from the data"):
        the(convert_model(mlp())).load_state_dict(saved)


def test_two_models_do_not_meet() -> None:
    one, two = convert_model(mlp()), convert_model(mlp())
    train(one)
    assert the(two).runtime.table.data[..., 1].eq(0).all()
    assert copy.deepcopy(the(one)).runtime.table.data is not the(one).runtime.table.data


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_scales_are_fp32_under_another_default_dtype(dtype: torch.dtype) -> None:
    """Lightning sets one while it calls ``configure_model`` in true precision."""
    model = mlp()
    torch.set_default_dtype(dtype)
    try:
        convert_model(model)
    finally:
        torch.set_default_dtype(torch.float32)
    scaling = the(model).runtime.scaling
    assert (
        scaling.table.data.dtype == scaling.history.values.dtype == scaling.history.format_maxima.dtype == torch.float32
    )
    expected = convert_model(mlp())
    train(model), train(expected)
    assert torch.equal(scaling.table.data, the(expected).runtime.table.data)


@pytest.mark.parametrize("where", ["convert", "move", "lazy", "train"])
def test_what_happens_in_inference_mode_does_not_hinder_training(where: str) -> None:
    first = nn.LazyLinear(128) if where == "lazy" else nn.Linear(64, 128)
    model = nn.Sequential(first, nn.Linear(128, 64), nn.Linear(64, 24))
    if where != "convert":
        convert_model(model)
    with torch.inference_mode():
        if where == "convert":
            convert_model(model)
        elif where == "move":
            model.to("cpu")
        else:
            model(torch.randn(16, 64))
    if where == "lazy":
        # Its parameters are inference tensors, as without FP8: they cannot be trained, the layer's state can.
        model[0].weight, model[0].bias = (nn.Parameter(p.clone()) for p in (model[0].weight, model[0].bias))
    train(model)
    assert (the(model).runtime.table.data[..., LAST_AMAX] > 0).all()
