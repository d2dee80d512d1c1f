"""What a checkpoint tells without the model's code."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from monitor_models import Fault, Net, Plant, batches, make_trainer, precision

from lightning_fp8 import LayerSelection
from lightning_fp8.callbacks.health_monitor import FP8HealthMonitor
from lightning_fp8.fabric import FP8Precision as FabricFP8Precision
from lightning_fp8.files import write_text
from lightning_fp8.report.inspect import Row, inspect_checkpoint, main

pytestmark = pytest.mark.filterwarnings("ignore")


def save(path: Path, steps: int = 8, plugin: Any = None, *callbacks: pl.Callback) -> pl.Trainer:
    trainer = make_trainer(list(callbacks), steps, plugin)
    trainer.fit(Net(), batches(steps))
    trainer.save_checkpoint(path)
    return trainer


def row(rows: list[Row], layer: str, role: str) -> Row:
    (found,) = [r for r in rows if (r.layer, r.role) == (layer, role)]
    return found


def test_scales_and_headroom_are_those_of_the_run(tmp_path: Path) -> None:
    trainer = save(tmp_path / "a.ckpt", 8, precision())
    told = inspect_checkpoint(tmp_path / "a.ckpt")
    assert told.step == 8 and "DelayedScaling" in told.recipes[0] and len(told.rows) == 9
    table = trainer.precision_plugin.conversions[0].runtime.table  # type: ignore[attr-defined]
    place = table.names.index("late")
    seen = row(told.rows, "late", "input")
    assert (seen.amax, seen.scale) == (table.data[place, 0, 0].item(), table.data[place, 0, 1].item())
    assert seen.headroom == pytest.approx(math.log2(448 / (seen.amax * seen.scale)), abs=1e-6)
    assert not any(r.risks for r in told.rows)


def test_layers_at_risk_come_first(tmp_path: Path) -> None:
    plant = Plant(Fault(7, "late", "input", factor=16.0))
    save(tmp_path / "a.ckpt", 8, precision(), plant)
    rows = inspect_checkpoint(tmp_path / "a.ckpt").rows
    late = row(rows, "late", "input")
    assert "clamped in the last step" in late.risks and "16 times its median" in late.risks[1]
    risky = [bool(r.risks) for r in rows]
    assert risky == sorted(risky, reverse=True) and not all(risky)
    save(tmp_path / "b.ckpt", 8, precision(), Plant(Fault(7, "late", "grad_output", math.nan)))
    risky = [(r.layer, r.role) for r in inspect_checkpoint(tmp_path / "b.ckpt").rows if r.risks]
    assert ("late", "grad_output") in risky and ("late", "input") not in risky


@pytest.mark.parametrize(
    ("max_scale", "power_of_two", "largest"),
    # The last is a number that fp32 rounds down.
    [(64.0, False, 64.0), (100.0, True, 64.0), (0.7, False, torch.tensor(0.7).item())],
)
def test_a_scale_at_its_cap(max_scale: float, power_of_two: bool, largest: float, tmp_path: Path) -> None:
    recipe = {"name": "delayed", "max_scale": max_scale, "power_of_two": power_of_two}
    save(tmp_path / "a.ckpt", 4, precision(recipe))
    weight = row(inspect_checkpoint(tmp_path / "a.ckpt").rows, "late", "weight")
    assert weight.scale == largest and weight.risks[0] == "the scale stands at its cap"


def test_a_stale_scale(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", 8, precision(), Plant(Fault(2, "late", "grad_output", factor=1e4)))
    gradient = row(inspect_checkpoint(tmp_path / "a.ckpt").rows, "late", "grad_output")
    assert any("long past" in risk for risk in gradient.risks)


def test_scales_far_too_small(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", 3, precision("static"))
    rows = inspect_checkpoint(tmp_path / "a.ckpt").rows
    gradient = row(rows, "late", "grad_output")
    assert gradient.risks == (f"{gradient.headroom:.0f} powers of two lie unused above it, small values may vanish",)
    assert not row(rows, "blocks.0", "input").risks


def test_a_remote_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = "memory://bucket/run/last.ckpt"
    trainer = make_trainer([], 2, precision())
    trainer.fit(Net(), batches(2))
    trainer.save_checkpoint(address)
    trainer.save_checkpoint(tmp_path / "here.ckpt")
    assert inspect_checkpoint(address) == inspect_checkpoint(tmp_path / "here.ckpt")
    write_text("memory://b/junk.ckpt", "junk")
    write_text("memory://b/run/shard", "of a distributed one")
    for bad, told_of in (
        ("memory://b/junk.ckpt", "junk.ckpt is no file"),
        ("memory://b/run", "run is no distributed"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=told_of):
            inspect_checkpoint(bad)
    for wrong, told in (
        ("memory://bucket/none.ckpt", "memory://bucket/none.ckpt does not exist"),
        ("nope://x", "nope"),
    ):
        with pytest.raises(SystemExit):
            main([wrong])
        assert told in capsys.readouterr().err


def test_events_of_the_health_monitor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "a.ckpt", 5, precision(), FP8HealthMonitor(), Plant(Fault(2, "late", "input", math.nan)))
    assert main([str(tmp_path / "a.ckpt")]) == 0
    out = capsys.readouterr().out
    assert "Step 2: NaN first seen in the input of 'late'" in out and "step 5" in out
    assert "layer" in out and "headroom" in out


def test_long_lists_are_cut_unless_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "many.ckpt"
    weights = {f"layers.{n}.weight": torch.randn(16, 16) for n in range(50)}
    torch.save({"state_dict": weights, "global_step": 1, "loops": {}}, path)
    main([str(path)])
    short = capsys.readouterr().out
    main([str(path), "--all"])
    assert "and 10 more" in short and len(capsys.readouterr().out.splitlines()) > 50


def test_a_checkpoint_without_fp8_tells_how_its_weights_would_fare(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", 2)
    told = inspect_checkpoint(tmp_path / "a.ckpt")
    assert any("no FP8 state" in note for note in told.notes)
    assert {r.layer for r in told.rows} == {"late", "blocks.0", "blocks.1", "head"}
    spread = torch.randn(64, 64) * torch.logspace(-8, 0, 64)
    torch.save(
        {"state_dict": {"bad.weight": spread, "good.weight": torch.randn(64, 64)}, "loops": {}}, tmp_path / "b.ckpt"
    )
    rows = inspect_checkpoint(tmp_path / "b.ckpt").rows
    assert (rows[0].layer, bool(rows[0].risks), rows[1].risks) == ("bad", True, ())


def test_the_directory_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "whole.ckpt", 3, precision())
    checkpoint = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    del checkpoint["state_dict"]
    (tmp_path / "sharded").mkdir()
    torch.save(checkpoint, tmp_path / "sharded" / "meta.pt")
    assert len(inspect_checkpoint(tmp_path / "sharded").rows) == 9


class Settings:
    """Hyperparameters of a class that whoever inspects does not have."""

    def __init__(self) -> None:
        self.width = 16


def test_objects_of_unknown_classes_do_not_matter(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", 3, precision())
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    torch.save({**checkpoint, "hyper_parameters": {"a": Settings(), "b": [Settings(), tmp_path]}}, tmp_path / "b.ckpt")
    assert inspect_checkpoint(tmp_path / "b.ckpt").rows == inspect_checkpoint(tmp_path / "a.ckpt").rows


def test_a_checkpoint_of_fabrics_and_weights_alone(tmp_path: Path) -> None:
    fabric_precision = FabricFP8Precision("delayed", layers=LayerSelection())
    fabric = Fabric(accelerator="cpu", plugins=[fabric_precision])
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    model = fabric.setup(net)
    fabric.backward(model(torch.ones(4, 16)).sum())
    fabric.save(tmp_path / "fabric.ckpt", {"model": model, "fp8": fabric_precision.state_dict(), "step": 1})
    told = inspect_checkpoint(tmp_path / "fabric.ckpt")
    assert row(told.rows, "0", "input").amax == 1 and "DelayedScaling" in told.recipes[0] and told.step is None
    fabric.save(tmp_path / "model.ckpt", {"model": model})
    torch.save(net.state_dict(), tmp_path / "weights.pt")
    for name in ("model.ckpt", "weights.pt"):
        assert [r.layer for r in inspect_checkpoint(tmp_path / name).rows] == ["0", "1"]


def test_odd_weights(tmp_path: Path) -> None:
    square = torch.randn(4, 4)
    odd = {"sparse": square.to_sparse(), "meta": square.to("meta"), "fp8": square.to(torch.float8_e4m3fn)}
    torch.save({**odd, "bf16": square.bfloat16(), "zero": square * 0, "integer": square.long()}, tmp_path / "a.pt")
    assert {r.layer: r.risks for r in inspect_checkpoint(tmp_path / "a.pt").rows} == {"bf16": (), "zero": ()}


@pytest.mark.parametrize("state", [{"conversions": [{"layers": []}]}, {"conversions": [1]}])
def test_fp8_state_that_cannot_be_read(state: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"state_dict": {}, "lightning_fp8": state}, tmp_path / "a.ckpt")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "a.ckpt")])
    message = capsys.readouterr().err
    assert "none that this version can read" in message and len(message.splitlines()) == 1


def test_a_mistake_on_the_command_line_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["--every", "a.ckpt"])
    assert error.value.code == 2
    assert capsys.readouterr().err == "lightning-fp8 inspect: error: unrecognized arguments: --every\n"


@pytest.mark.parametrize("content", [None, b"nonsense", {"weights": 1}, [1], {}])
def test_what_is_no_checkpoint_is_refused_in_one_line(
    content: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(SystemExit) as error:
        main([str(path)])
    assert error.value.code == 1
    message = capsys.readouterr().err
    assert message.startswith("lightning-fp8 inspect: ") and len(message.splitlines()) == 1
