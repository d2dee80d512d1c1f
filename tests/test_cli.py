"""The command line: classes of the working directory, recipes in both forms, and mistakes in one line."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI

from examples.gpt.data import TextData
from examples.gpt.model import GPT
from lightning_fp8 import AmaxMonitor, DelayedScaling, FP8Precision, MXFP8Scaling, RowwiseScaling
from lightning_fp8.cli import FP8CLI, main
from lightning_fp8.cli_errors import one_line

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("module", ["lightning_fp8", "lightning_fp8.cli"])
def test_modules_are_the_command(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "doctor"])
    monkeypatch.delitem(sys.modules, module)  # Else runpy warns that it is there already.
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module(module, run_name="__main__")
    assert "emulated" in capsys.readouterr().out


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run of two steps, in a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-fp8"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "text").write_bytes(bytes(range(256)) * 30)
    content = {
        "model": {
            "class_path": "examples.gpt.model.GPT",
            "init_args": {"width": 16, "layers": 1, "heads": 1, "length": 32},
        },
        "data": {
            "class_path": "examples.gpt.data.TextData",
            "init_args": {"path": "text", "length": 32, "batch_size": 2, "val_windows": 4},
        },
        "trainer": {
            "plugins": {"class_path": "lightning_fp8.FP8Precision", "init_args": {"recipe": "delayed"}},
            "accelerator": "cpu",
            "max_steps": 2,
            "limit_val_batches": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def recipe_of(cli: LightningCLI) -> object:
    plugin = cli.trainer.precision_plugin
    assert isinstance(plugin, FP8Precision)
    return plugin.settings.recipe


def test_fit_trains_and_says_what_ran_in_fp8(config: str, capsys: pytest.CaptureFixture[str]):
    assert main(["fit", "--config", config]) == 0
    printed = capsys.readouterr().out
    assert "4 of 5 linear layers" in printed and "blocks.0.qkv" in printed


def test_a_fit_in_processes_of_its_own_says_where_the_model_was(capsys: pytest.CaptureFixture[str]):
    """What is left in the process that asked: a plugin that has converted nothing."""
    cli = FP8CLI.__new__(FP8CLI)
    cli.trainer = Trainer(plugins=[FP8Precision()], accelerator="cpu", logger=False, enable_checkpointing=False)
    cli.after_fit()
    assert "converted in processes of their own" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--trainer.plugins.recipe=rowwise"], RowwiseScaling),
        (["--trainer.plugins.recipe=lightning_fp8.RowwiseScaling"], RowwiseScaling),
        (
            ["--trainer.plugins.recipe=lightning_fp8.DelayedScaling", "--trainer.plugins.recipe.margin=1"],
            DelayedScaling,
        ),
    ],
)
def test_recipe_by_name_and_by_class(config: str, arguments: list[str], expected: type):
    recipe = recipe_of(FP8CLI(["fit", "--config", config, *arguments]))
    assert isinstance(recipe, expected)
    if isinstance(recipe, DelayedScaling):
        assert recipe.margin == 1


def test_recipe_by_class_path_in_yaml(config: str, tmp_path: Path):
    content = yaml.safe_load(Path(config).read_text())
    arguments = {"amax_history_len": 16, "format": "e4m3"}
    recipe = {"class_path": "lightning_fp8.DelayedScaling", "init_args": arguments}
    content["trainer"]["plugins"] = [
        {
            "class_path": "lightning_fp8.FP8Precision",
            "init_args": {
                "recipe": recipe,
                "layers": {"class_path": "lightning_fp8.LayerSelection", "init_args": {"exclude": ["*.down"]}},
            },
        }
    ]
    Path(config).write_text(yaml.safe_dump(content))
    cli = FP8CLI(["fit", "--config", config])
    found = recipe_of(cli)
    assert isinstance(found, DelayedScaling) and found.amax_history_len == 16 and found.format == "e4m3"
    assert len(cli.trainer.precision_plugin.conversions[0].converted) == 3


def test_recipes_to_compare_with_are_given_by_name_or_with_settings(config: str):
    what_if = "[mxfp8, {name: delayed, margin: 1}]"
    monitor = f"{{class_path: AmaxMonitor, init_args: {{statistics_every_n_steps: 2, what_if: {what_if}}}}}"
    cli = FP8CLI(["fit", "--config", config, f"--trainer.callbacks={monitor}"])
    (found,) = [c for c in cli.trainer.callbacks if isinstance(c, AmaxMonitor)]
    assert found.what_if == [MXFP8Scaling(), DelayedScaling(margin=1)]


def test_without_fp8_nothing_is_said_about_it(config: str, capsys: pytest.CaptureFixture[str]):
    arguments = ["--trainer.plugins=null", "--trainer.precision=bf16-mixed"]
    assert main(["fit", "--config", config, *arguments]) == 0
    assert "FP8" not in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["doctr"]])
def test_an_unknown_command_is_answered_with_all_commands(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_info:
        main(words)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert all(name in error for name in ("fit", "predict", "doctor", "inspect"))


def test_a_reader_that_has_seen_enough_is_no_error():
    run = "from lightning_fp8.cli import main; import sys; sys.exit(main(['doctor']))"
    with subprocess.Popen([sys.executable, "-c", run], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


MISTAKES = {
    "--trainer.max_steps=soon": "trainer.max_steps: expected int, got soon",
    "--model.width=wide": "model.width: expected int, got wide",
    "--model.width=17": "width must be a multiple of 16",
    "--model.wdth=16": "model: examples.gpt.model.GPT: Option 'wdth' is not accepted",
    "--model=nowhere.Model": "model: nowhere.Model: No module named 'nowhere'",
    "--data.path=nothing": "no text at nothing",
    "--trainer.plugins=nowhere.Plugin": "trainer.plugins: nowhere.Plugin: No module named 'nowhere'",
    "--trainer.plugins.recipe=fastest": "fastest",
    "--trainer.plugins.backend=magic": "magic",
    "--trainer.plugins.precision=fp7": "fp7",
    "--trainer.plugins.recipe={class_path: lightning_fp8.DelayedScaling, init_args: {amax_history_len: 0}}": (
        "amax_history_len must be at least 1"
    ),
    "--trainer.plugins={class_path: FP8Precision, init_args: {recipe: {class_path: DelayedScaling, init_args: "
    "{amax_history_len: x}}}}": "its full path (package.DelayedScaling) tells which",
    "--trainer.precision=bf16-mixed": "precision",
    "--nonsense=1": "unrecognized arguments: --nonsense=1",
    "--config=nothing.yaml": "nothing.yaml",
}


def test_a_wrong_value_for_a_recipe_given_by_class_is_named(config: str, capsys: pytest.CaptureFixture[str]):
    recipe = ["--trainer.plugins.recipe=lightning_fp8.DelayedScaling", "--trainer.plugins.recipe.amax_history_len=x"]
    with pytest.raises(SystemExit):
        main(["fit", "--config", config, *recipe])
    assert "amax_history_len must be a whole number (int), got 'x'" in capsys.readouterr().err


@pytest.mark.parametrize("argument", MISTAKES)
def test_a_mistake_gives_one_line(argument: str, config: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_info:
        main(["fit", "--config", config, argument])
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if not line.startswith("Seed set to")]
    assert len(lines) == 1 and lines[0].startswith("lightning-fp8: error: ")
    assert MISTAKES[argument] in lines[0]
    assert len(lines[0]) < 800  # such errors repr the whole plugin


@pytest.mark.parametrize(
    ("callback", "reason"),
    [
        (
            "lightning_fp8.SkipBatchRecovery, init_args: {skips: -1}",
            "skips must be at least 0, got -1.",
        ),
        (
            "lightning_fp8.SkipBatchRecovery, init_args: {skip_batches: [1, 2]}",
            "skip_batches='[1, 2]' is neither a list of pairs (epoch, batch index) nor an event log that is there.",
        ),
        (
            "lightning.pytorch.callbacks.ModelCheckpoint, init_args: {save_top_k: -3}",
            "Invalid value for save_top_k=-3.",
        ),
        ("lightning_fp8.FP8HealthMonitr", "module 'lightning_fp8' has no attribute 'FP8HealthMonitr'"),
        ("lightning_fp8.DelayedScaling", "does not correspond to a subclass of Callback"),
        ("lightning_fp8.AmaxMonitor, init_args: {every: 2}", "Option 'every' is not accepted"),
    ],
)
@pytest.mark.parametrize(
    "form", ["[{class_path: %s}]", "{class_path: %s}", "[lightning_fp8.FP8Report, {class_path: %s}]"]
)
def test_a_mistake_in_a_callback_is_one_reason(
    form: str, callback: str, reason: str, config: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        main(["fit", "--config", config, f"--trainer.callbacks={form % callback}"])
    error = capsys.readouterr().err.splitlines()[-1]
    assert reason in error and ";" not in error


def test_what_is_no_callback_is_told_so(config: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["fit", "--config", config, "--trainer.callbacks=[5]"])
    assert capsys.readouterr().err == "lightning-fp8: error: trainer.callbacks: expected Callback\n"


def test_one_line_leaves_an_unknown_form_readable():
    assert one_line("something\n  went wrong") == "something; went wrong"


def test_the_command_finds_classes_in_the_working_directory(config: str, tmp_path: Path):
    """A console script does not have the working directory on its path; `python -c` from elsewhere neither."""
    (tmp_path / "mine.py").write_text("from examples.gpt.model import GPT\n\n\nclass Mine(GPT):\n    pass\n")
    script = tmp_path / "bin" / "command"
    script.parent.mkdir()
    # the examples are not installed: they stand for any package that is
    script.write_text(f"import sys\nsys.path.append({str(ROOT)!r})\nfrom lightning_fp8.cli import main\nmain()\n")
    model = "--model={class_path: mine.Mine, init_args: {width: 16, layers: 1, heads: 1, length: 32}}"
    arguments = ["fit", "--config", config, model, "--trainer.max_steps=1"]
    result = subprocess.run(
        [sys.executable, "-P", str(script), *arguments] if sys.version_info >= (3, 11) else
        [sys.executable, str(script), *arguments],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "linear layers" in result.stdout


def test_the_plugin_works_in_a_users_own_command(config: str):
    torch.manual_seed(0)
    recipe = "--trainer.plugins.recipe={class_path: lightning_fp8.RowwiseScaling, init_args: {power_of_two: false}}"
    arguments = [
        "--trainer.plugins=lightning_fp8.FP8Precision",
        recipe,
        "--trainer.accelerator=cpu",
        "--trainer.logger=false",
        "--trainer.fast_dev_run=1",
        "--model.width=16",
        "--model.heads=1",
        "--data.path=text",
    ]
    cli = LightningCLI(GPT, TextData, args=["fit", *arguments])
    found = recipe_of(cli)
    assert isinstance(found, RowwiseScaling) and not found.power_of_two
    assert cli.trainer.global_step == 1
