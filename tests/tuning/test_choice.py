"""``layers="auto"``: what is chosen, from which times, and what a checkpoint does to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.multiprocessing as mp
from lightning.fabric import Fabric
from lightning.pytorch.utilities.compile import from_compiled
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_fp8
from lightning_fp8 import (
    DelayedScaling,
    FP8Precision,
    LayerSelection,
    RowwiseScaling,
    TensorwiseScaling,
    convert_model,
)
from lightning_fp8.backends import NativeBackend
from lightning_fp8.callbacks import AmaxMonitor
from lightning_fp8.fabric import FP8Precision as FabricFP8Precision
from lightning_fp8.model import conversions
from lightning_fp8.recipes import get_recipe
from lightning_fp8.tuning import choice
from lightning_fp8.tuning.choice import Source, keep_faster, times_on, variant_in
from lightning_fp8.tuning.shares import Place, shares_of_step
from lightning_fp8.tuning.table import MeasuredTimes
from tests.tuning import choice_ranks
from tests.tuning.tables import Known, PretendNative, SlowHost, made_up_table

pytestmark = pytest.mark.filterwarnings("ignore")


class Net(pl.LightningModule):
    """A small layer, a large one and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(32, 32)
        self.large = nn.Linear(32, 512)
        self.head = nn.Linear(512, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.large(self.small(batch))).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The times that the machine is made to have; counts how often somebody asks."""
    state: dict[str, Any] = {"times": Known((32, 512)), "asked": 0}

    def times(*args: Any) -> Source:
        state["asked"] += 1
        return Source(state["times"], "delayed", "a made-up table")

    monkeypatch.setattr(choice, "times_on", times)
    return state


def trainer(plugin: FP8Precision, **settings: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        plugins=[plugin],
        **({"max_steps": 2} | settings),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def data() -> DataLoader[Tensor]:
    return DataLoader(torch.randn(64, 32), batch_size=4)


# --- what is chosen


def test_without_fp8_hardware_every_eligible_layer_is_converted() -> None:
    conversion = conversions(convert_model(Net()))[0]
    assert conversion.converted == ["small", "large"]
    assert "every eligible layer" in conversion.summary()


def test_only_layers_that_gain_are_converted_and_the_summary_says_why(measured: dict[str, Any]) -> None:
    conversion = conversions(convert_model(Net(), backend=PretendNative(), tokens=512))[0]
    assert conversion.converted == ["large"]
    summary = conversion.summary()
    assert "at 512 tokens (by the tokens hint), times from a made-up table" in summary
    assert "FP8 would not be faster: x1.00 against bf16" in summary and "x2.00 against bf16" in summary


def test_the_summary_names_the_default_token_count(measured: dict[str, Any]) -> None:
    assert "8192 tokens (by default" in conversions(convert_model(Net(), backend=PretendNative()))[0].summary()


def test_a_selection_is_never_judged_by_speed(measured: dict[str, Any]) -> None:
    model = convert_model(Net(), backend=PretendNative(), layers=LayerSelection())
    assert conversions(model)[0].converted == ["small", "large"] and not measured["asked"]


@pytest.mark.parametrize(("tokens", "gains"), [(256, False), (2048, False), (65536, True)])
def test_a_layer_that_the_host_cannot_issue_in_time_stays_in_bf16(tokens: int, gains: bool) -> None:
    model = nn.Sequential(nn.Linear(768, 768), nn.Linear(768, 16))
    decisions = LayerSelection().decide(model, get_recipe("delayed"))
    # The GPU alone would be faster at 2048 tokens, were FP8 free of a floor; the host needs 0.1 ms.
    table = made_up_table(fp8_rate=1e15)
    table.times["delayed"] = {point: ms / 3 for point, ms in table.times["bf16"].items()}
    kept = keep_faster(decisions, model, Source(table, "delayed", ""), tokens)
    assert kept[0].converted == gains
    assert ("the host's time to issue it" in kept[0].reason) != gains


def whole(model: Net) -> nn.Module:
    return from_compiled(torch.compile(model))


def part(model: Net) -> nn.Module:
    model.small.compile()
    return model


def wrapped(model: Net) -> nn.Module:
    model.small = lightning_fp8.compile(model.small)
    return model


@pytest.mark.parametrize(
    ("compile", "gain"), [(None, [0.8, 0.8]), (part, [2.0, 0.8]), (wrapped, [2.0, 0.8]), (whole, [2.0, 2.0])]
)
def test_the_host_issues_compiled_layers_faster(compile: Any, gain: list[float], measured: dict[str, Any]) -> None:
    measured["times"] = SlowHost((32, 32), (32, 512))
    model = compile(Net()) if compile else Net()
    conversion = conversions(convert_model(model, backend=PretendNative()))[0]
    judged = [d for d in conversion.decisions if d.name in ("small", "large")]
    assert [d.converted for d in judged] == [g > 1 for g in gain]
    assert [f"x{g:.2f}" in d.reason for d, g in zip(judged, gain, strict=True)] == [True, True]


def test_the_caller_may_know_better_what_will_be_compiled(measured: dict[str, Any]) -> None:
    measured["times"] = SlowHost((32, 32))
    for compiled, converted in ((None, []), (False, []), (True, ["small"])):
        model = convert_model(Net(), backend=PretendNative(), compiled=compiled)
        assert conversions(model)[0].converted == converted


@pytest.mark.parametrize("wrap", [torch.compile, lightning_fp8.compile])
def test_converting_a_wrapped_model_again_keeps_its_scales(wrap: Any) -> None:
    model = wrap(Net())
    first = conversions(convert_model(model))
    assert len(first) == 1 and conversions(convert_model(model)) == first
    assert conversions(convert_model(model._orig_mod)) == first


def test_converting_again_measures_nothing_and_changes_nothing(measured: dict[str, Any]) -> None:
    model = convert_model(Net(), backend=PretendNative())
    first = conversions(model)[0]
    measured["times"] = Known((32, 32))
    assert conversions(convert_model(model, backend=PretendNative())) == [first]
    assert measured["asked"] == 1
    convert_model(model, backend=PretendNative(), tokens=4)
    assert conversions(model)[0].converted == ["small"] and measured["asked"] == 2


@pytest.mark.parametrize("tokens", [0, -1, 2.5, True, "many"])
def test_wrong_hints(tokens: Any) -> None:
    for make in (lambda: convert_model(Net(), tokens=tokens), lambda: FP8Precision(tokens=tokens)):
        with pytest.raises((ValueError, TypeError), match=r"^tokens must be (at least 1|a whole number)"):
            make()


@pytest.mark.parametrize("setting", [{"autocast_only": "no"}, {"compiled": 1}, {"compiled": "false"}])
def test_flags_are_true_or_false(setting: dict[str, Any]) -> None:
    model = Net()
    with pytest.raises(TypeError, match=f"{next(iter(setting))} must be true or false"):
        convert_model(model, **setting)
    assert not conversions(model)


# --- checkpoints


def test_a_resumed_run_uses_the_checkpoints_layers(tmp_path: Path, measured: dict[str, Any]) -> None:
    path = tmp_path / "run.ckpt"
    first = trainer(FP8Precision(backend=PretendNative()))
    first.fit(Net(), data())
    first.save_checkpoint(path)
    measured["times"] = Known((32, 32))
    measured["asked"] = 0
    monitor = AmaxMonitor()
    second = trainer(FP8Precision(backend=PretendNative()), max_steps=4, callbacks=[monitor])
    second.fit(Net(), data(), ckpt_path=path, weights_only=False)
    plugin = second.precision_plugin
    assert isinstance(plugin, FP8Precision)
    assert plugin.conversions[0].converted == ["large"]
    assert not measured["asked"] and "checkpoint's choice" in plugin.summary()
    # Its scales went on, too: four steps are in the history.
    state = plugin.conversions[0].state_dict()["runtime"]
    assert int(state["position"][0, 0]) == 3
    # Tested afterwards, the model stays what it is.
    plugin.convert_module(second.lightning_module)
    assert plugin.conversions[0].converted == ["large"] and not measured["asked"]


def test_a_sharded_model_refuses_other_layers_and_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, measured: dict[str, Any]
) -> None:
    plugin = FP8Precision(backend=PretendNative())
    trainer(plugin).fit(Net(), data())
    checkpoint: dict[str, Any] = {}
    plugin.on_save_checkpoint(checkpoint)
    measured["times"] = Known((32, 32))
    other = FP8Precision(backend=PretendNative())
    run = trainer(other)
    run.fit(Net(), data())
    monkeypatch.setattr(type(run.strategy), "restore_checkpoint_after_setup", True)
    with pytest.raises(ValueError, match=r"LayerSelection\(include=\['large'\], head=True\)"):
        other.on_load_checkpoint(checkpoint)
    given = FP8Precision(backend=PretendNative(), layers=LayerSelection(include=["large"], head=True))
    trainer(given).fit(Net(), data())
    given.on_load_checkpoint(checkpoint)
    assert given.conversions[0].converted == ["large"]


def test_a_model_converted_by_hand_is_put_right_when_the_checkpoint_is_loaded(measured: dict[str, Any]) -> None:
    plugin = FP8Precision(backend=PretendNative())
    run, model = trainer(plugin), Net()
    run.fit(model, data())
    checkpoint: dict[str, Any] = {}
    plugin.on_save_checkpoint(checkpoint)
    measured["times"] = Known((32, 32), (32, 512))
    other = Net()
    late = FP8Precision(backend=PretendNative())
    run = trainer(late)
    run.fit(other, data())
    parameters = list(other.parameters())
    assert late.conversions[0].converted == ["small", "large"]
    late.on_load_checkpoint(checkpoint)
    assert late.conversions == conversions(other) and late.conversions[0].converted == ["large"]
    assert all(a is b for a, b in zip(parameters, other.parameters(), strict=True))
    assert late.conversions[0].step_pending


def test_a_given_selection_overrides_the_checkpoint(measured: dict[str, Any]) -> None:
    source = FP8Precision(backend=PretendNative())
    trainer(source).fit(Net(), data())
    checkpoint: dict[str, Any] = {}
    source.on_save_checkpoint(checkpoint)
    plugin = FP8Precision(backend=PretendNative(), layers=LayerSelection())
    trainer(plugin).fit(Net(), data())
    plugin.on_load_checkpoint(checkpoint)
    assert plugin.conversions[0].converted == ["small", "large"]


def test_layers_that_cannot_run_in_fp8_here_do_not_convert_again_and_again(measured: dict[str, Any]) -> None:
    saved = ["large", "head", "gone"]
    model = convert_model(Net(), backend=PretendNative(), chosen=saved)
    first = conversions(model)[0]
    assert first.converted == ["large"]
    assert conversions(convert_model(model, backend=PretendNative(), chosen=saved)) == [first]


def test_fabric_uses_the_saved_layers(measured: dict[str, Any]) -> None:
    def setup() -> tuple[FabricFP8Precision, nn.Module]:
        precision = FabricFP8Precision(backend=PretendNative())
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[precision])
        return precision, fabric.setup(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 512), nn.Linear(512, 16)))

    precision, _first = setup()
    saved = precision.state_dict()
    measured["times"] = Known((32, 32))
    other, _second = setup()
    assert other.conversions[0].converted == ["0"]
    other.load_state_dict(saved)
    assert other.conversions[0].converted == ["1"]


# --- ranks


def test_rank_zero_chooses_for_all_and_its_failure_leaves_nobody_waiting(tmp_path: Path) -> None:
    # Forked, for they need nothing but a few objects: importing all anew would take most of the time.
    mp.start_processes(choice_ranks.main, (tmp_path,), nprocs=2, start_method="fork")
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == ["by rank 0", "ValueError: no memory"]
    assert found[1] == ["by rank 0", "RuntimeError: Rank 0 could not choose the layers for FP8: see its error."]


# --- where times come from


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(choice, "shipped_tables", lambda: {"NVIDIA H200": made_up_table()})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("recipe", ["delayed", "static", {"name": "delayed", "margin": 1, "format": "e4m3"}])
def test_the_shipped_table_serves_recipes_of_the_same_work(h200: None, recipe: Any) -> None:
    source = times_on(torch.device("cuda"), get_recipe(recipe), NativeBackend())
    assert source.variant == "delayed" and "shipped for NVIDIA H200 (2026-01-02, torch 2.11.0)" in source.origin


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [("tensorwise", NativeBackend()), ("rowwise", NativeBackend()), ("delayed", NativeBackend(gemm="fbgemm"))],
)
def test_what_it_does_not_know_is_measured_and_kept(
    h200: None, tmp_path: Path, recipe: str, backend: NativeBackend
) -> None:
    source = times_on(torch.device("cuda"), get_recipe(recipe), backend)
    assert isinstance(source.times, MeasuredTimes) and str(tmp_path) in source.origin
    assert str(get_recipe(recipe).to_dict()) in source.variant and repr(backend) in source.variant


def test_a_table_knows_a_recipe_by_its_work() -> None:
    table = made_up_table()
    table.times["tensorwise"] = table.times["delayed"]
    assert variant_in(table, TensorwiseScaling()) == "tensorwise"
    # A scale that is foreseen takes no pass of its own; one that is stored never does.
    assert variant_in(table, TensorwiseScaling(power_of_two=True)) is None
    assert variant_in(table, DelayedScaling(power_of_two=True)) == "delayed"
    assert variant_in(table, get_recipe("rowwise_gw_hp")) is None
    half = RowwiseScaling(grad_weight_high_precision=True, power_of_two=False)
    assert variant_in(table, half) is None
    table.times["rowwise"] = table.times["rowwise_gw_hp"] = table.times["delayed"]
    assert variant_in(table, get_recipe("rowwise_gw_hp")) == "rowwise_gw_hp"
    # One operand's scale is a power of two, its other's is not: nothing is foreseen.
    assert variant_in(table, half) == "rowwise_gw_hp"
    assert variant_in(table, get_recipe("rowwise")) == "rowwise"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_measuring_leaves_random_numbers_alone_and_its_times_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choice, "shipped_tables", dict)
    recipe = get_recipe("delayed")
    if NativeBackend().support(recipe, torch.device("cuda")).kind != "native":
        pytest.skip("needs FP8 tensor cores")
    widths = {"0": 4096, "1": 64}
    layers = [nn.Linear(width, width) for width in widths.values()]
    model = nn.Sequential(*layers, nn.Linear(64, 64)).to("cuda", torch.bfloat16)  # The last layer is the head.
    state = torch.cuda.get_rng_state()
    convert_model(model, recipe, tokens=8192)
    # What was measured is on disk. Which layers gain depends on what else runs on the GPU.
    source = times_on(torch.device("cuda"), recipe, NativeBackend())
    places = {name: Place(8192, width, width, compiled=False) for name, width in widths.items()}
    shares = shares_of_step(source.times, source.variant, places)
    assert conversions(model)[0].converted == [name for name, share in shares.items() if share.gains]
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert "measurements on this machine" in conversions(model)[0].summary()
