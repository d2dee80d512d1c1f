"""AmaxMonitor: what loggers get, when, and that the figures are right."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from monitor_models import Net, StepsByHand, batches, make_trainer, precision
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lightning_fp8 import FP8Precision, LayerSelection
from lightning_fp8.callbacks.amax_monitor import AmaxMonitor
from lightning_fp8.formats import E4M3
from lightning_fp8.recipes import ROLES, DelayedScaling
from tests.keeping import Keep

pytestmark = pytest.mark.filterwarnings("ignore")


def fit(monitor: AmaxMonitor, steps: int, *callbacks: pl.Callback, plugin: Any = None, **kwargs: Any) -> Keep:
    keep = Keep()
    trainer = make_trainer([monitor, *callbacks], steps, plugin, logger=[keep, *kwargs.pop("loggers", [])], **kwargs)
    trainer.fit(kwargs.get("model") or Net(), batches(steps))
    return keep


class Look(pl.Callback):
    """Takes the operands of a layer by itself."""

    def __init__(self, layer: str) -> None:
        self.layer = layer
        self.seen: list[list[Tensor]] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        def look(layer: Any, args: Any, output: Tensor) -> None:
            self.seen.append([args[0].detach().clone(), layer.weight.detach().clone()])
            output.register_hook(lambda g: self.seen[-1].append(g.clone()))

        pl_module.get_submodule(self.layer).register_forward_hook(look)


@pytest.mark.parametrize(("layer", "recipe"), [("late", "delayed"), ("late", "tensorwise"), ("head", "delayed")])
def test_amax_is_logged_for_every_layer_role_and_step(layer: str, recipe: str) -> None:
    look = Look(layer)
    keep = fit(AmaxMonitor(1), 4, look, plugin=precision(recipe))
    assert sorted(keep.lines) == [0, 1, 2, 3]
    for step, operands in enumerate(look.seen):
        for role, operand in zip(ROLES, operands, strict=True):
            assert keep.lines[step][f"fp8/{layer}/{role}/amax"] == operand.abs().max().item()
    named = {key.split("/")[1] for key in keep.lines[0]}
    assert named == {"late", "blocks.0", "blocks.1", "head", *ROLES}
    assert ("fp8/late/input/headroom" in keep.lines[0]) and ("fp8/head/input/headroom" not in keep.lines[0])


def test_only_the_chosen_steps_and_layers_are_logged() -> None:
    keep = fit(AmaxMonitor(2, layers="blocks.*", start_step=3, end_step=8), 12)
    assert sorted(keep.lines) == [3, 5, 7]
    assert not [key for key in keep.lines[3] if "head" in key or "late" in key]
    keep = fit(AmaxMonitor(), 7, log_every_n_steps=3)
    assert sorted(keep.lines) == [0, 3, 6]
    keep = fit(AmaxMonitor(1, per_layer=False), 2)
    assert set(keep.lines[1]) == {f"fp8/{role}/amax_max" for role in ROLES}


def test_steps_are_chosen_where_a_batch_takes_several() -> None:
    monitor = AmaxMonitor(4, statistics_every_n_steps=8, start_step=2, end_step=17)
    model = StepsByHand()
    keep = Keep()
    make_trainer([monitor], -1, precision(), max_epochs=1, logger=[keep]).fit(model, batches(10))
    assert monitor.history is not None and monitor.history.steps.tolist() == [3, 7, 11, 15]
    assert ["fp8/late/input/mse" in line for line in keep.lines.values()] == [True, False, True, False]


def test_statistics_are_those_of_a_cast_written_out() -> None:
    look = Look("late")
    monitor = AmaxMonitor(1, statistics_every_n_steps=3, what_if=["rowwise", "mxfp8"])
    keep = fit(monitor, 7, look, plugin=precision())
    with_statistics = [step for step, line in keep.lines.items() if "fp8/late/input/mse" in line]
    assert with_statistics == [0, 3, 6]
    for step in with_statistics:
        line = keep.lines[step]
        x = look.seen[step][0].float()
        scale = torch.tensor(line["fp8/late/input/scale"])
        scaled = (x * scale).clamp(-448, 448)
        result = scaled.to(torch.float8_e4m3fn).float() / scale
        lost = ((x != 0) & (result == 0)).float().mean() * 100
        clamped = (x.abs() * scale > 448 * 1.00001).float().mean() * 100
        assert line["fp8/late/input/underflows%"] == pytest.approx(lost.item())
        assert line["fp8/late/input/overflows%"] == pytest.approx(clamped.item())
        assert line["fp8/late/input/mse"] == pytest.approx((x - result).square().mean().item(), rel=1e-4)
        sqnr = 10 * torch.log10(x.square().sum() / (x - result).square().sum())
        assert line["fp8/late/input/sqnr"] == pytest.approx(sqnr.item(), rel=1e-4)
        assert line["fp8/late/input/scale_inv_min"] == pytest.approx(1 / scale.item(), rel=1e-6)
        rows = 448 / x.abs().amax(1, keepdim=True)
        rows = torch.exp2(torch.log2(rows).floor())
        by_row = (x * rows).to(E4M3.dtype).float() / rows
        mse = (x - by_row).square().mean().item()
        assert line["fp8/late/input/rowwise/mse"] == pytest.approx(mse, rel=1e-4)
    # In high precision there is no cast of its own, but one can ask what if. Its 16 columns have no blocks of 32.
    assert "fp8/head/weight/rowwise/mse" in keep.lines[0] and "fp8/head/weight/mse" not in keep.lines[0]
    assert "fp8/blocks.1/input/mxfp8/mse" in keep.lines[0] and "fp8/head/weight/mxfp8/mse" not in keep.lines[0]


def test_statistics_change_no_bit_and_compile_nothing_again() -> None:
    class Compiled(Net):
        def __init__(self) -> None:
            super().__init__(lr=0.1)
            self.late = torch.compile(self.late, fullgraph=True, backend="aot_eager")  # type: ignore[assignment]
            self.losses: list[float] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.losses.append(loss.item())
            return loss

    torch._dynamo.reset()
    plain, watched = Compiled(), Compiled()
    # A model that was converted when it is compiled: hooks and layers do not change any more.
    make_trainer([AmaxMonitor(1)], 8, precision()).fit(plain, batches(8))
    torch._dynamo.reset()
    monitor = AmaxMonitor(1, statistics_every_n_steps=3)
    with torch._dynamo.config.patch(error_on_recompile=True):
        trainer = make_trainer([monitor], 8, precision(), logger=Keep())
        trainer.fit(watched, batches(8))
    assert watched.losses == plain.losses
    assert any("late" in key and key.endswith("mse") for key in trainer.logger.lines[3])  # type: ignore[union-attr]


@pytest.mark.parametrize("leaves", [1, 3])
def test_statistics_end_with_an_epoch_that_is_left_as_it_begins(leaves: int) -> None:
    """They are taken in the batch that comes instead."""
    seen = []

    class Leaving(Net):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
            return -1 if self.current_epoch < leaves else None

        def on_train_epoch_end(self) -> None:
            hooks = len(self.late._forward_hooks) - watched
            seen.append((hooks, torch._dynamo.eval_frame._stance.stance))

        def on_fit_start(self) -> None:
            nonlocal watched
            watched = len(self.late._forward_hooks)

    watched = 0
    monitor = AmaxMonitor(1, statistics_every_n_steps=3)
    trainer = make_trainer([monitor], -1, precision(), logger=Keep(), max_epochs=3)
    trainer.fit(Leaving(), batches(1))
    assert seen == [(0, "default")] * 3
    taken = [step for step, line in trainer.logger.lines.items() if "fp8/late/input/mse" in line]
    assert taken == ([0] if leaves < 3 else [])


def test_every_what_if_has_a_name_and_scales_of_its_own() -> None:
    what_if = ["rowwise", "rowwise_gw_hp", "static", DelayedScaling(), DelayedScaling(margin=2)]
    lines = fit(AmaxMonitor(1, statistics_every_n_steps=1, what_if=what_if), 1, plugin=precision()).lines[0]
    keys = [key.split("/") for key in lines if key.startswith("fp8/late/input/") and key.endswith("/scale_inv_max")]
    told = {key[3]: lines["/".join(key)] for key in keys if len(key) == 5}
    assert sorted(told) == ["delayed", "delayed_2", "rowwise", "rowwise_gw_hp", "static"]
    assert told["static"] == 1 and told["delayed_2"] == pytest.approx(4 * told["delayed"])


def test_a_sample_of_rows_gives_about_the_same() -> None:
    from lightning_fp8.cast_statistics import cast_statistics
    from lightning_fp8.casts import Cast

    x = torch.randn(2048, 256, generator=torch.Generator().manual_seed(0))
    for words in ("e4m3/tensorwise", "e5m2/rowwise/pow2", "e4m3/1x128", "e4m3/128x128", "e4m3/1x32"):
        cast = Cast.parse(words)
        assert cast is not None
        whole, sample = cast_statistics(x, cast), cast_statistics(x, cast, max_rows=512)
        assert sample[2:4].tolist() == pytest.approx(whole[2:4].tolist(), rel=0.1), words
        assert torch.equal(sample[4:], whole[4:])


def test_csv_and_tensorboard(tmp_path: Path) -> None:
    table, board = CSVLogger(tmp_path), TensorBoardLogger(tmp_path)
    monitor = AmaxMonitor(1, statistics_every_n_steps=2)
    keep = fit(monitor, 5, plugin=precision(), loggers=[table, board])
    with open(Path(table.log_dir) / "metrics.csv") as file:
        rows = {int(row["step"]): row for row in csv.DictReader(file)}
    for step in range(5):
        key = "fp8/blocks.0/weight/amax"
        assert float(rows[step][key]) == pytest.approx(keep.lines[step][key])
    events = EventAccumulator(board.log_dir)
    events.Reload()
    tags = events.Tags()
    assert {s.step for s in events.Scalars("fp8/head/input/amax")} == set(range(5))
    for role in ROLES:
        assert {f"fp8/{role}/headroom", f"fp8/{role}/amax_log2"} <= set(tags["histograms"]) & set(tags["images"])
    assert [image.step for image in events.Images("fp8/input/headroom")] == [0, 4]
    picture = events.Images("fp8/input/headroom")[-1]
    assert (picture.height, picture.width) == (4 * 8, 5 * 8)


def test_memory_does_not_grow_with_steps() -> None:
    monitor = AmaxMonitor(1, history=8)
    fit(monitor, 40)
    assert monitor.history is not None and len(monitor.history) <= 8
    assert monitor.history.steps[-1] >= 32


def test_resuming_goes_on_with_the_same_history(tmp_path: Path) -> None:
    def run(steps: int, path: Path | None = None) -> AmaxMonitor:
        monitor = AmaxMonitor(1, history=8)
        save = ModelCheckpoint(tmp_path, filename=f"{steps}", every_n_train_steps=7, save_top_k=-1)
        trainer = make_trainer([monitor, save], steps, precision(), enable_checkpointing=True)
        trainer.fit(Net(), batches(20), ckpt_path=path)
        return monitor

    whole = run(14)
    run(7)
    resumed = run(14, tmp_path / "7.ckpt")
    first, second = whole.state_dict()["history"], resumed.state_dict()["history"]
    assert torch.equal(first["steps"], second["steps"])
    assert torch.equal(first["values"].nan_to_num(), second["values"].nan_to_num())


def test_the_history_follows_its_layers_where_others_are_in_fp8(tmp_path: Path) -> None:
    """FP8 layers come first: with another selection the same layers stand in other rows."""
    first = AmaxMonitor(1)
    trainer = make_trainer([first], 3)
    trainer.fit(Net(), batches(3))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    second = AmaxMonitor(1)
    plugin = FP8Precision(layers=LayerSelection(include=["blocks.1"]))
    make_trainer([second], 4, plugin).fit(Net(), batches(8), ckpt_path=tmp_path / "a.ckpt")
    assert second._names[0] == "blocks.1" != first._names[0]
    assert first.history is not None and second.history is not None and second.history.steps.tolist() == [0, 1, 2, 3]
    for name in first._names:
        before, after = first.history.values[:, first._names.index(name)], second.history.values
        assert torch.equal(after[:3, second._names.index(name), :, 0], before[..., 0])


def test_several_side_by_side(tmp_path: Path) -> None:
    def run(steps: int, path: Path | None = None) -> tuple[list[int], list[int], Keep]:
        all_layers, some = AmaxMonitor(2, picture_every=None), AmaxMonitor(1, layers="late", statistics_every_n_steps=3)
        keep = Keep()
        trainer = make_trainer([all_layers, some], steps, precision(), logger=keep)
        trainer.fit(Net(), batches(20), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        assert all_layers.history is not None and some.history is not None
        return all_layers.history.steps.tolist(), some.history.steps.tolist(), keep

    first, second, keep = run(6)
    assert (first, second) == ([0, 2, 4], [0, 1, 2, 3, 4, 5])
    assert "fp8/head/input/amax" not in keep.lines[1] and "fp8/late/input/mse" in keep.lines[3]
    first, second, _ = run(8, tmp_path / "a.ckpt")
    assert (first, second) == ([0, 2, 4, 6], list(range(8)))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"every_n_steps": 0}, "every_n_steps"),
        ({"every_n_steps": 4, "statistics_every_n_steps": 6}, "multiple"),
        ({"what_if": ["rowwise"]}, "statistics_every_n_steps"),
        ({"statistics_every_n_steps": 1, "what_if": ["nonsense"]}, "nonsense"),
        ({"history": 1}, "history"),
        ({"picture_every": 0}, "picture_every"),
        ({"sample_rows": 0}, "sample_rows"),
        ({"every_n_steps": "10"}, "every_n_steps must be a whole number"),
        ({"start_step": None}, "start_step"),
        ({"start_step": -1}, "start_step must be at least 0"),
        ({"start_step": 4, "end_step": 4}, "end_step is 4: give a step after start_step"),
        ({"history": 4.0}, r"history must be a whole number \(int\), got 4.0"),
        ({"every_n_steps": 2.0}, r"every_n_steps must be a whole number \(int\) or None, got 2.0"),
        ({"layers": 5}, "layers must be a list of patterns, got 5"),
        ({"layers": ["late", 5]}, "layers must be a list of patterns"),
        ({"what_if": 0}, "what_if must be a list of recipes, got 0"),
        ({"what_if": None}, "what_if must be a list of recipes, got None"),
        ({"what_if": "rowwise"}, "what_if must be a list of recipes, got 'rowwise'"),
        ({"what_if": {"name": "rowwise"}}, "what_if must be a list of recipes"),
        ({"statistics_every_n_steps": 1, "what_if": [3]}, r"what_if is \[3\]: A recipe is"),
        ({"per_layer": "false"}, "per_layer must be true or false"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises((ValueError, TypeError), match=named):
        AmaxMonitor(**settings)


def test_a_pattern_that_matches_nothing_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match="matches no linear layer"):
        fit(AmaxMonitor(1, layers=["nothing"]), 1)
