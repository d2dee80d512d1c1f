"""``lightning-fp8 doctor``, ``advise`` and ``bench``, and what they are made of."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from examples.gpt.model import GPT
from lightning_fp8 import support_table
from lightning_fp8.cli import main
from lightning_fp8.recipes import RECIPE_NAMES, get_recipe
from lightning_fp8.tuning import commands
from lightning_fp8.tuning.advice import advise, observe
from lightning_fp8.tuning.bench import RECIPES, Measurement, _by_kind, format_row, measure
from lightning_fp8.tuning.choice import Source
from lightning_fp8.tuning.decoder import SHAPES, DecoderShape, parse_shape
from lightning_fp8.tuning.peaks import peak_of
from lightning_fp8.tuning.picture import draw
from tests.tuning.tables import made_up_table

pytestmark = pytest.mark.filterwarnings("ignore")
TINY = "32,64,1,1,16"
GPT_WORDS = ["--model", "examples.gpt.model.GPT", "--model.width", "1024", "--model.layers", "1"]


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = tmp_path / "table.json"
    path.write_text(made_up_table().to_json())
    return str(path)


def error_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a mistake gets."""
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and "error: " in text
    return text


# --- doctor


def test_doctor_says_what_every_backend_does_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    here = {(row["backend"], row["recipe"]): row["kind"] for row in found["support"]}
    assert set(here) == {(row.backend, row.recipe) for row in support_table.support_by_generation()}
    assert all(here["native", recipe] in ("native", "emulated") for recipe in RECIPE_NAMES)
    assert found["versions"]["torch"] == torch.__version__ and len(found["gpus"]) == torch.cuda.device_count()
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert torch.__version__ in text and "matplotlib" in text and "transformer_engine" in text


# --- advise


def test_advice_names_the_layers_that_gain_and_a_step(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["advise", *GPT_WORDS, "--table", table, "--model.length", "2048", "--input-shape", "8,2048", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    layers = {layer["name"]: layer for layer in found["layers"]}
    assert layers["blocks.0.up"]["fp8"] and layers["blocks.0.up"]["tokens"] == 8 * 2048
    assert not layers["head"]["fp8"] and layers["head"]["fp8_ms"] is None
    point = (8 * 2048, 1024, 4096)
    assert layers["blocks.0.up"]["bf16_ms"] == pytest.approx(made_up_table().milliseconds("bf16", *point), rel=1e-4)
    saved = sum(layer["bf16_ms"] - layer["fp8_ms"] for layer in layers.values() if layer["fp8"])
    assert found["fp8_ms"] == pytest.approx(found["bf16_ms"] - saved)
    assert found["speedup"] == pytest.approx(found["bf16_ms"] / found["fp8_ms"]) and found["speedup"] > 1
    assert found["rest_ms"].pop("other products") == 0
    assert set(found["rest_ms"]) == {"attention", "pointwise", "optimizer"} and min(found["rest_ms"].values()) > 0


def test_advice_as_text_from_a_runs_file(table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    content = {
        "model": {"class_path": "examples.gpt.model.GPT", "init_args": {"width": 64, "layers": 1}},
        "trainer": {"max_steps": 3},
    }
    config.write_text(yaml.safe_dump(content))
    assert main(["advise", "--config", str(config), "--model.layers", "2", "--table", table, "--tokens", "512"]) == 0
    text = capsys.readouterr().out
    assert "0 of 9 linear layers gain" in text and "x1.00" in text and "given 512 tokens" in text


def test_a_measured_step_makes_the_advice_exact(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *GPT_WORDS, "--table", table, "--tokens", "16384", "--step-ms", "100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bf16_ms"] == pytest.approx(100)


def test_shipped_tables_are_found_by_a_part_of_the_gpus_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = {name: made_up_table(name) for name in ("NVIDIA H200", "NVIDIA B200")}
    monkeypatch.setattr(commands, "shipped_tables", lambda: tables)
    assert main(["advise", *GPT_WORDS, "--gpu", "b200"]) == 0
    assert "delayed on NVIDIA B200" in capsys.readouterr().out
    assert "must name one of the shipped tables: NVIDIA H200, NVIDIA B200" in error_of(
        ["advise", *GPT_WORDS, "--gpu", "V100"], capsys
    )


def test_advice_names_the_recipe_that_was_asked_for(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = made_up_table()
    measured.times["rowwise_gw_hp"] = measured.times.pop("delayed")
    for host in (measured.host, measured.host_compiled):
        host["rowwise_gw_hp"] = host.pop("delayed")
    path = tmp_path / "rowwise.json"
    path.write_text(measured.to_json())
    words = ["advise", *GPT_WORDS, "--recipe", "rowwise_gw_hp", "--table"]
    assert main([*words, str(path)]) == 0
    assert capsys.readouterr().out.startswith("rowwise_gw_hp on NVIDIA H200")
    assert "no times of the rowwise_gw_hp recipe" in error_of([*words, table], capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Name the model"),
        (["--model", "examples.gpt.model.Missing"], "Missing"),
        (["--model", "examples.gpt.model.GPT", "--model.widht", "3"], "widht"),
        (["--model", "examples.gpt.model.GPT", "--model.width", "7"], "width must be a multiple of 16"),
        (["--config", "missing.yaml"], "missing.yaml"),
        ([*GPT_WORDS, "--recipe", "fp7"], "Unknown FP8 recipe 'fp7'"),
        ([*GPT_WORDS, "--recipe", "blockwise"], "holds no times of the blockwise recipe"),
        ([*GPT_WORDS, "--tokens", "0"], "--tokens"),
        ([*GPT_WORDS, "--tokens", "many"], "--tokens"),
        ([*GPT_WORDS, "--input-shape", "2,x"], "--input-shape"),
        ([*GPT_WORDS, "--input-shape", "2,0"], "--input-shape"),
        ([*GPT_WORDS, "--input-shape", "2,4096"], "does not take an input of shape (2, 4096)"),
        (
            ["--model", "tests.tuning.test_commands.Two", "--input-shape", "2,64"],
            "set example_input_array for a forward",
        ),
        (["--model", "tests.tuning.test_commands.Two", "--model.form", "wrong"], "take its example_input_array"),
    ],
)
def test_mistakes_in_one_line(words: list[str], message: str, table: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in error_of(["advise", *words, "--table", table], capsys)


def test_a_table_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none.json").write_text("{}")
    assert "holds no table" in error_of(["advise", *GPT_WORDS, "--table", str(tmp_path / "none.json")], capsys)


def test_a_forward_shows_rows_of_each_layer_and_causal_attention() -> None:
    with torch.device("meta"):
        model = GPT(width=64, layers=2, heads=2, length=32)
    seen = observe(model, torch.zeros(3, 32, dtype=torch.int64, device="meta"))
    assert seen.rows["blocks.1.down"] == seen.rows["head"] == 96
    # Two products of 2 x 32 x 32 x 64 FLOPs, for 3 sequences in 2 layers; half of them behind the mask.
    assert seen.attention_flops == 2 * (2 * 32 * 32 * 64) * 3 * 2 / 2 and seen.product_flops == 0
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in model.modules())


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("train", [True, False])
def test_products_of_torchs_own_attention_are_counted(device: str, train: bool) -> None:
    with torch.device(device):
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        model = nn.TransformerEncoder(layer, 2).train(train)
        seen = observe(model, torch.zeros(3, 32, 64))
    # In and out projections, and both products of attention; torch calls them out of reach of hooks.
    assert seen.product_flops == 2 * 3 * 32 * (2 * 4 * 64 * 64 + 2 * 2 * 32 * 64)
    assert seen.attention_flops == 0 and seen.rows["layers.1.linear1"] == 96


def test_products_by_hand_take_time_in_a_step() -> None:
    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv1d(64, 64, 2, stride=2)
            self.fc = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.fc(self.patches(x).mT)
            return torch.compile(lambda z: z @ z.mT)(y)

    seen = observe(ByHand(), torch.zeros(3, 64, 32))
    assert seen.product_flops == 2 * 3 * (16 * 64 * 128 + 16 * 64 * 16)
    source, peak = Source(made_up_table(), "delayed", "made up"), peak_of("H200")
    advice = advise(ByHand(), get_recipe("delayed"), source, "H200", peak, 1, torch.zeros(3, 64, 32))
    assert advice.rest_ms["other products"] > 0


def test_flex_attention_does_not_stop_the_count() -> None:
    class Flex(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return flex_attention(x, x @ x.mT @ x, x)

    assert observe(Flex(), torch.zeros(1, 2, 16, 16)).product_flops == 2 * 2 * 2 * 16**3


def test_a_layer_that_is_never_called_says_why_it_stays() -> None:
    source = Source(made_up_table(), "delayed", "made up")
    model, x = nn.MultiheadAttention(64, 4), torch.zeros(8, 2, 64)
    (layer,) = advise(model, get_recipe("delayed"), source, "H200", None, 1, (x, x, x)).layers
    assert "subclass" in layer.reason and not layer.tokens


class Two(nn.Module):
    """A forward with two arguments, and examples of them in Lightning's forms."""

    def __init__(self, form: str = "tuple") -> None:
        super().__init__()
        self.fc = nn.Linear(64, 128)
        x = torch.zeros(2, 3, 64, device="cpu")
        forms: dict[str, Any] = {"tuple": (x, x), "list": [x, x], "dict": {"x": x, "scale": x}, "wrong": (x,)}
        self.example_input_array = forms[form]

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.fc(x * scale)


@pytest.mark.parametrize("form", ["tuple", "list", "dict"])
def test_examples_of_several_arguments(form: str, table: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["advise", "--model", "tests.tuning.test_commands.Two", "--model.form", form, "--table", table, "--json"]
    assert main(words) == 0
    (layer,) = json.loads(capsys.readouterr().out)["layers"]
    assert layer["tokens"] == 6


def test_a_layer_that_is_called_by_keyword_shows_its_rows() -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(input=x)

    assert observe(Keyword(), torch.zeros(3, 4, 16)).rows == {"fc": 12}


@pytest.mark.parametrize("eager", [False, True])
def test_a_layers_figures_are_those_that_decide(eager: bool, table: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["advise", *GPT_WORDS, "--table", table, "--tokens", "512", "--json"]
    assert main([*words, *(["--eager"] if eager else [])]) == 0
    layers = [la for la in json.loads(capsys.readouterr().out)["layers"] if la["fp8_ms"] is not None]
    assert layers
    for la in layers:
        assert f"x{la['bf16_ms'] / la['fp8_ms']:.2f} against bf16" in la["reason"]
        # The host needs 0.1 ms in eager mode and 0.025 in a compiled model.
        assert (la["fp8_ms"] == 0.1) == eager and la["fp8_ms"] >= 0.025


def test_layers_that_do_not_run_gain_nothing() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(4096, 4096)
            self.unused = nn.Linear(4096, 4096)
            self.head = nn.Linear(4096, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.used(x))

    source = Source(made_up_table(), "delayed", "made up")
    advice = advise(Half(), get_recipe("delayed"), source, "GPU", None, 1, torch.zeros(2, 4096))
    used, unused, _head = advice.layers
    assert (unused.bf16_ms, unused.fp8, unused.reason) == (0.0, False, "did not run")
    assert used.tokens == 2 and "not known" in advice.notes[0]


def test_the_estimate_meets_the_step_it_was_made_from() -> None:
    """The bf16 step of eight Llama-3-8B blocks took 366 ms on an H200, 262 of them in products."""
    from lightning_fp8.tuning.decoder import Decoder

    shape = SHAPES["8b"]
    with torch.device("meta"):
        model = Decoder(shape).to(torch.bfloat16)
    tokens = torch.zeros(shape.batch, shape.length, dtype=torch.int64, device="meta")
    source = Source(made_up_table(), "delayed", "made up")
    advice = advise(model, get_recipe("delayed"), source, "NVIDIA H200", peak_of("NVIDIA H200"), 1, tokens)
    assert advice.rest_ms["attention"] == pytest.approx(66, rel=0.15)
    assert advice.rest_ms["pointwise"] == pytest.approx(25, rel=0.15)
    assert advice.rest_ms["optimizer"] == pytest.approx(11, rel=0.15)
    assert advice.bf16_ms == pytest.approx(366, rel=0.1)


# --- bench


def test_benchs_help_names_recipes_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"of {', '.join(RECIPE_NAMES)}; by default {', '.join(RECIPES)}" in text
    assert "timed rounds of three steps; by default 5" in text


def test_bench_measures_draws_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    words = ["bench", "--shape", TINY, "--recipes", "delayed", "--backends", "native", "torchao", "--rounds", "1"]
    assert main([*words, "--compile", "no", "--json", str(figures), "--picture", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "left out: torchao delayed" in text
    found = json.loads(figures.read_text())
    rows = found["results"][TINY]
    assert [row["variant"] for row in rows] == ["bf16-eager", "delayed-eager"]
    assert rows[0]["speedup"] == 1 and rows[1]["speedup"] == pytest.approx(
        rows[0]["milliseconds"] / rows[1]["milliseconds"]
    )
    # The same weights and the same data: losses are alike, and no variant's are those of another by accident.
    assert all(abs(a - b) < 0.2 for a, b in zip(rows[0]["losses"], rows[1]["losses"], strict=True))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_variant_that_cannot_run_is_a_row_of_the_table() -> None:
    lines: list[str] = []
    rows = measure(parse_shape(TINY), ["bf16-eager", "torchao:delayed-eager"], rounds=1, report=lines.append)
    assert not rows[0].error and "torchao" in rows[1].error and rows[1].error in lines[1]


@pytest.mark.filterwarnings("ignore:No layer of Decoder")
def test_a_recipe_that_fits_no_layer_is_not_measured() -> None:
    rows = measure(parse_shape("64,100,1,1,8"), ["bf16-eager", "blockwise-eager"], rounds=1, report=lambda line: None)
    assert "no layer of this shape runs in FP8" in rows[1].error and "not multiples of 128" in rows[1].error
    assert not rows[0].error and not rows[1].speedup


def test_auto_is_a_variant() -> None:
    rows = measure(parse_shape(TINY), ["delayed-auto-eager"], rounds=1, report=lambda line: None)
    assert not rows[0].error and rows[0].milliseconds > 0


def test_a_profile_counts_every_kernel_of_a_cast_as_one() -> None:
    pytest.importorskip("triton")
    from lightning_fp8.kernels import triton_op, triton_stored

    kernels = *triton_op._kernels_of["lightning_fp8::triton_cast"], triton_stored.cast_later
    names = [kernel.__name__ for kernel in kernels]
    names += [f"{name}_of_cat_mul" for name in names]
    found = _by_kind([(name, 1.0, 1.0) for name in (*names, "triton_poi_fused_cast_0")])
    assert found == {"cast": len(names), "pointwise": 1.0}


def test_a_profile_is_part_of_a_row_and_of_a_picture(tmp_path: Path) -> None:
    row = Measurement("bf16", 10.0, 9.0, 11.0, 3.5, [1.0], 1.0, {"gemm": 7.0, "attention": 2.0})
    assert "gemm 7.00  attention 2.00" in format_row(row) and "3.50 GiB" in format_row(row)
    draw({"8b": [row, Measurement("mxfp8", error="no")], "1b": [row]}, tmp_path / "a.svg", "title")
    assert "attention" in (tmp_path / "a.svg").read_text() or (tmp_path / "a.svg").stat().st_size > 5000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "huge"], "'huge' is no shape"),
        (["--shape", "64,128,1,2"], "is no shape"),
        (["--shape", "64,128,1,2,32,3"], "must divide the width"),
        (["--recipes", "fp7"], "Unknown FP8 recipe 'fp7'"),
        (["--backends", "apex"], "apex"),
        (["--rounds", "0"], "--rounds"),
        (["--json", "missing/folder/x.json"], "no folder"),
        (["--picture", "missing/folder/x.png"], "no folder"),
        (["--json", "."], "is a folder"),
        (["--picture", "."], "is a folder"),
    ],
)
def test_mistakes_in_bench(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in error_of(["bench", *words], capsys)


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-3"])
def test_a_measured_step_takes_some_time(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--step-ms must be a positive number" in error_of(["advise", f"--step-ms={value}"], capsys)


def test_shapes_in_numbers() -> None:
    assert parse_shape("8b") is SHAPES["8b"]
    assert parse_shape("4096,14336,8,2,8192,32,8") == SHAPES["8b"]
    assert parse_shape("768,3072,12,32,1024") == SHAPES["small"]
    assert parse_shape("64,128,1,2,32") == DecoderShape(64, 128, 1, 2, 32, 1, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bench_on_a_gpu_tells_memory_and_where_the_time_goes() -> None:
    rows: list[Any] = measure(
        SHAPES["tiny"], ["bf16", "delayed", "delayed-auto"], rounds=1, profile=True, report=lambda line: None
    )
    for row in rows:
        assert not row.error and row.peak_gib > 0 and row.kernels["gemm"] > 0
