"""Checkpoints: resuming is not having stopped, and a checkpoint moves freely between bf16 and FP8."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from trainer_models import (
    Net,
    StatefulLoader,
    assert_same,
    dataset,
    differs,
    fit,
    fp8_state,
    loader,
    make_trainer,
    plugin,
)

from lightning_fp8 import DelayedScaling, FP8Precision, LayerSelection
from lightning_fp8.backends.native import NativeBackend
from lightning_fp8.settings import CHECKPOINT_KEY


def run(path: Path, *, data: Any, val: Any = None, epochs: int = 3, resume: Any = None, **kwargs: Any) -> Any:
    """Train with checkpoints after every step and epoch; a resumed run starts from other random states."""
    model = kwargs.pop("model", None) or Net()
    precision = kwargs.pop("precision", None) or plugin()
    saver = ModelCheckpoint(path, filename="{step}", save_top_k=-1, every_n_train_steps=kwargs.pop("every", 1))
    at_end = ModelCheckpoint(
        path, filename="end-{epoch}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True
    )
    torch.manual_seed(7 if resume is None else 1234)
    trainer = make_trainer(precision, max_epochs=epochs, callbacks=[saver, at_end], enable_checkpointing=True, **kwargs)
    trainer.fit(model, data, val, ckpt_path=resume)
    return trainer, model


def assert_resumed(whole: tuple[Any, Any], resumed: tuple[Any, Any], steps_left: int) -> None:
    (trainer_a, a), (trainer_b, b) = whole, resumed
    assert len(b.losses) == steps_left
    assert_same(a.losses[-steps_left:], b.losses, "losses")
    assert_same(dict(a.state_dict()), dict(b.state_dict()), "weights")
    assert_same(trainer_a.optimizers[0].state_dict(), trainer_b.optimizers[0].state_dict(), "optimizer")
    assert_same(fp8_state(trainer_a), fp8_state(trainer_b), "fp8")
    assert_same(torch.get_rng_state(), torch.get_rng_state())


# --- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=3, smoothing=0.5), "tensorwise", "rowwise"])
def test_resume_at_an_epoch_end(recipe: Any, tmp_path: Path) -> None:
    whole = run(tmp_path, data=loader(shuffle=True), precision=plugin(recipe))
    resumed = run(
        tmp_path / "b", data=loader(shuffle=True), precision=plugin(recipe), resume=tmp_path / "end-epoch=0.ckpt"
    )
    assert_resumed(whole, resumed, 12)


@pytest.mark.parametrize(
    "schedule", [{}, {"check_val_every_n_epoch": 2}, {"val_check_interval": 3}], ids=["each epoch", "2nd", "twice"]
)
def test_resume_at_an_epoch_end_with_validation(schedule: dict[str, Any], tmp_path: Path) -> None:
    settings = {"data": loader(shuffle=True), "val": loader(seed=3), **schedule}
    whole = run(tmp_path, **settings)
    resumed = run(tmp_path / "b", **settings, resume=tmp_path / "end-epoch=1.ckpt")
    assert_resumed(whole, resumed, 6)


def test_resume_from_the_best_validation(tmp_path: Path) -> None:
    """Where validation runs more often than epochs end, a monitored checkpoint is written before the epoch ends."""

    def once(folder: Path, resume: Any = None) -> Any:
        model = Net()
        saver = ModelCheckpoint(folder, filename="{step}", monitor="val_loss", save_top_k=-1)
        trainer = make_trainer(
            plugin(), max_epochs=3, callbacks=[saver], enable_checkpointing=True, val_check_interval=3
        )
        torch.manual_seed(7 if resume is None else 1234)
        trainer.fit(model, StatefulLoader(), DataLoader(dataset(8), 4, generator=torch.Generator()), ckpt_path=resume)
        return trainer, model

    whole = once(tmp_path)
    for step in (3, 6):
        assert_resumed(whole, once(tmp_path / f"from {step}", tmp_path / f"step={step}.ckpt"), 18 - step)


@pytest.mark.parametrize("step", [2, 6, 9])
@pytest.mark.parametrize("loss_scale", [None, "dynamic"])
def test_resume_in_mid_epoch_with_a_loader_that_has_state(step: int, loss_scale: Any, tmp_path: Path) -> None:
    whole = run(tmp_path, data=StatefulLoader(), precision=plugin(loss_scale=loss_scale))
    resumed = run(
        tmp_path / "b",
        data=StatefulLoader(),
        precision=plugin(loss_scale=loss_scale),
        resume=tmp_path / f"step={step}.ckpt",
    )
    assert_resumed(whole, resumed, 18 - step)


def test_resume_in_the_middle_of_an_accumulation_window_keeps_its_amaxes(tmp_path: Path) -> None:
    class SaveInside(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                trainer.save_checkpoint(tmp_path / "inside.ckpt")

    torch.manual_seed(7)
    trainer = make_trainer(accumulate_grad_batches=3, callbacks=[SaveInside()], max_epochs=1)
    trainer.fit(Net(), StatefulLoader())
    state = torch.load(tmp_path / "inside.ckpt", weights_only=True)[CHECKPOINT_KEY]["conversions"][0]
    assert not state["step_pending"]
    assert (state["runtime"]["table"]["data"][..., 0] > 0).all()


def test_resume_in_mid_epoch_with_validation_in_between(tmp_path: Path) -> None:
    settings = {"val": loader(seed=3), "val_check_interval": 3}
    whole = run(tmp_path, data=StatefulLoader(), **settings)
    resumed = run(tmp_path / "b", data=StatefulLoader(), **settings, resume=tmp_path / "step=8.ckpt")
    assert_resumed(whole, resumed, 10)


def test_resume_where_validation_follows_the_checkpoint(tmp_path: Path) -> None:
    """Lightning does not validate again there, so the validation loader must not draw from the global numbers."""
    val = DataLoader(dataset(8), batch_size=4, generator=torch.Generator())
    settings = {"val": val, "val_check_interval": 3}
    whole = run(tmp_path, data=StatefulLoader(), **settings)
    resumed = run(tmp_path / "b", data=StatefulLoader(), **settings, resume=tmp_path / "step=9.ckpt")
    assert_resumed(whole, resumed, 9)


def test_resume_in_mid_epoch_with_a_plain_loader_is_warned_of(tmp_path: Path) -> None:
    run(tmp_path, data=loader(), epochs=1)
    with pytest.warns(UserWarning, match="not resumable"):
        run(tmp_path / "b", data=loader(), epochs=1, resume=tmp_path / "step=3.ckpt")


class Augmented(Dataset[Any]):
    """Draws from torch's, numpy's and Python's random numbers for each sample."""

    def __init__(self) -> None:
        self.x, self.y = dataset().tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        import random

        import numpy as np

        noise = torch.randn(16) + float(np.random.rand()) + random.random()
        return self.x[index] + 0.1 * noise, self.y[index]


def test_random_augmentation_resumes_at_an_epoch_end(tmp_path: Path) -> None:
    import random

    import numpy as np

    np.random.seed(0)
    random.seed(0)
    whole = run(tmp_path, data=DataLoader(Augmented(), batch_size=4, shuffle=True))
    np.random.seed(5)
    random.seed(5)
    resumed = run(
        tmp_path / "b",
        data=DataLoader(Augmented(), batch_size=4, shuffle=True),
        resume=tmp_path / "end-epoch=1.ckpt",
    )
    assert_resumed(whole, resumed, 6)


def test_resuming_can_differ(tmp_path: Path) -> None:
    """The comparison would notice a lost FP8 state and lost random states."""
    whole = run(tmp_path, data=loader(shuffle=True))
    checkpoint = torch.load(tmp_path / "end-epoch=1.ckpt", weights_only=True)
    del checkpoint[CHECKPOINT_KEY]
    torch.save(checkpoint, tmp_path / "without.ckpt")
    _, model = run(tmp_path / "b", data=loader(shuffle=True), resume=tmp_path / "without.ckpt")
    assert differs(whole[1].losses[-6:], model.losses)


def test_dynamic_loss_scale_is_resumed(tmp_path: Path) -> None:
    class Grow(Net):
        def on_train_start(self) -> None:
            self.trainer.precision_plugin.settings.loss_scaler._dynamic("cpu").set_growth_interval(2)

    settings: dict[str, Any] = {"data": loader(shuffle=True)}
    whole = run(tmp_path, model=Grow(), precision=plugin(precision="16-mixed"), **settings)
    scaler_state = whole[0].precision_plugin.settings.loss_scaler.state_dict()
    assert scaler_state["scale"] != 65536.0
    resumed = run(
        tmp_path / "b",
        model=Grow(),
        precision=plugin(precision="16-mixed"),
        resume=tmp_path / "end-epoch=0.ckpt",
        **settings,
    )
    assert_resumed(whole, resumed, 12)
    assert_same(scaler_state, resumed[0].precision_plugin.settings.loss_scaler.state_dict())


# --- what a checkpoint holds -----------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of an FP8 run in mid-training."""
    trainer = fit(Net(), max_steps=4)
    trainer.save_checkpoint(tmp_path / "fp8.ckpt")
    return tmp_path / "fp8.ckpt"


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        assert all(isinstance(key, str) for key in value)
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def test_keys_shapes_and_dtypes_are_those_of_bf16(saved: Path, tmp_path: Path) -> None:
    fit(Net(), "bf16-mixed", max_steps=4).save_checkpoint(tmp_path / "bf16.ckpt")
    fp8, bf16 = (torch.load(path, weights_only=True) for path in (saved, tmp_path / "bf16.ckpt"))
    assert set(fp8) - set(bf16) == {CHECKPOINT_KEY}
    described = [
        {key: (value.shape, value.dtype) for key, value in checkpoint["state_dict"].items()}
        for checkpoint in (fp8, bf16)
    ]
    assert described[0] == described[1]
    assert not any("_extra_state" in key for key in fp8["state_dict"])


def test_fp8_state_is_plain(saved: Path) -> None:
    state = torch.load(saved, weights_only=True)[CHECKPOINT_KEY]
    for leaf in leaves(state):
        assert type(leaf) in (Tensor, int, float, bool, str, type(None)), leaf
        if isinstance(leaf, Tensor):
            assert leaf.device.type == "cpu" and leaf.dtype in (torch.float32, torch.int64, torch.uint8)
    assert state["conversions"][0]["layers"] == ["body.0", "body.3"]


def test_a_weights_only_checkpoint_has_no_fp8_state(tmp_path: Path) -> None:
    trainer = fit(Net(), max_steps=1)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert CHECKPOINT_KEY not in torch.load(tmp_path / "weights.ckpt", weights_only=True)
    again = Net()
    make_trainer().validate(again, loader(), ckpt_path=tmp_path / "weights.ckpt", verbose=False)
    assert torch.equal(again.head.weight, trainer.lightning_module.head.weight)


def test_load_from_checkpoint_gives_plain_layers(saved: Path) -> None:
    model = Net.load_from_checkpoint(saved)
    assert type(model.body[0]) is torch.nn.Linear
    assert torch.equal(model.head.weight, torch.load(saved, weights_only=True)["state_dict"]["head.weight"])


def test_it_loads_where_the_package_is_not_installed(saved: Path) -> None:
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "lightning_fp8":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import torch
from torch import nn
checkpoint = torch.load({str(saved)!r}, weights_only=True)
body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(), nn.Linear(32, 16), nn.LayerNorm(16))
model = nn.ModuleDict({{"body": body, "head": nn.Linear(16, 4)}})
print(model.load_state_dict(checkpoint["state_dict"]), "lightning_fp8" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "All keys matched successfully> False" in done.stdout, done.stderr


def test_bf16_goes_on_from_fp8(saved: Path) -> None:
    model = Net()
    fit_from(model, "bf16-mixed", saved)
    assert len(model.losses) == 2 and model.losses[-1].isfinite()


def test_fp8_goes_on_from_bf16(tmp_path: Path) -> None:
    fit(Net(), "bf16-mixed", max_steps=4).save_checkpoint(tmp_path / "bf16.ckpt")
    model = Net()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*FP8.*")
        trainer = fit_from(model, plugin(), tmp_path / "bf16.ckpt")
    assert len(model.losses) == 2 and model.losses[-1].isfinite()
    assert (fp8_state(trainer)["runtime"]["position"] == 1).all()


def fit_from(model: Any, precision: Any, path: Path) -> Any:
    """Resume after four steps, for two more."""
    trainer = make_trainer(precision, max_steps=6, max_epochs=2)
    torch.manual_seed(0)
    trainer.fit(model, loader(), ckpt_path=path)
    return trainer


def test_weights_arrive_whichever_way(saved: Path, tmp_path: Path) -> None:
    weights = torch.load(saved, weights_only=True)["state_dict"]
    for precision in ("bf16-mixed", plugin(), plugin("rowwise"), plugin(precision="bf16-true")):
        model = Net()
        make_trainer(precision).test(model, loader(), ckpt_path=saved, verbose=False)
        for key, value in model.state_dict().items():
            assert torch.equal(value, weights[key].to(value.dtype)), key


@pytest.mark.parametrize("evaluation", ["validate", "test", "predict"])
def test_evaluating_a_checkpoint_leaves_the_random_numbers_alone(evaluation: str, saved: Path) -> None:
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        getattr(make_trainer(), evaluation)(Net(), loader(), ckpt_path=saved)
        drawn.append(torch.rand(()))
    assert drawn[0] != drawn[1]


def test_evaluating_a_checkpoint_resumes_no_training(saved: Path) -> None:
    """Whoever evaluates need not hear that the ranks are others, and the loss scale stays what it was."""
    checkpoint = torch.load(saved, weights_only=True)
    checkpoint[CHECKPOINT_KEY]["rng"] *= 2
    checkpoint[CHECKPOINT_KEY]["loss_scaler"] = {"scale": 8.0}
    torch.save(checkpoint, saved)
    precision = plugin(loss_scale="dynamic")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*random states")
        make_trainer(precision).validate(Net(), loader(), ckpt_path=saved, verbose=False)
    assert precision.settings.loss_scaler is not None and precision.settings.loss_scaler.state_dict() == {}


# --- a checkpoint of other settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", DelayedScaling(amax_history_len=5)])
def test_another_recipe_is_warned_of(saved: Path, recipe: Any) -> None:
    model = Net()
    with pytest.warns(UserWarning, match="use the checkpoint's recipe"):
        fit_from(model, plugin(recipe), saved)
    assert len(model.losses) == 2 and model.losses[-1].isfinite()


class OtherBackend(NativeBackend):
    """The native backend under another name."""

    name = "other"


def test_another_backend_goes_on_with_the_scales(saved: Path) -> None:
    model = Net()
    trainer = fit_from(model, plugin(backend=OtherBackend()), saved)
    assert trainer.precision_plugin.conversions[0].backend.name == "other"
    same = fit_from(Net(), plugin(), saved)
    assert torch.equal(fp8_state(trainer)["runtime"]["history"], fp8_state(same)["runtime"]["history"])


def test_a_layer_that_joins_is_warned_of(tmp_path: Path) -> None:
    fit(Net(), plugin(layers=LayerSelection(exclude=["body.0"])), max_steps=4).save_checkpoint(tmp_path / "few.ckpt")
    model = Net()
    with pytest.warns(UserWarning, match=r"no FP8 state for body\.0"):
        trainer = fit_from(model, plugin(layers=LayerSelection()), tmp_path / "few.ckpt")
    # One step has been entered since the new layer began; the old one goes on where it was.
    assert fp8_state(trainer)["runtime"]["position"][:, 0].tolist() == [1, 5 % 3]


def test_a_layer_that_leaves_is_no_problem(saved: Path) -> None:
    model = Net()
    trainer = fit_from(model, plugin(layers=LayerSelection(exclude=["body.0"])), saved)
    assert fp8_state(trainer)["runtime"]["position"][:, 0].tolist() == [5 % 3]


@pytest.mark.parametrize("before", [None, 2.0**16, "dynamic"])
@pytest.mark.parametrize("after", [None, 2.0**10, "dynamic"])
def test_another_loss_scale_changes_no_gradient(before: Any, after: Any, tmp_path: Path) -> None:
    """Scales and amaxes of gradients follow the factor: with powers of two everything is as with the same factor."""
    fit(Net(), plugin(loss_scale=before), max_steps=4).save_checkpoint(tmp_path / "a.ckpt")
    runs = []
    for loss_scale in (before, after):
        model = Net()
        precision = plugin(loss_scale=loss_scale)
        trainer = fit_from(model, precision, tmp_path / "a.ckpt")
        state = precision.settings.state_dict(precision.conversions)
        runs.append([model.losses, dict(model.state_dict()), trainer.optimizers[0].state_dict()])
        history = state["conversions"][0]["runtime"]["history"]
        runs[-1].append(torch.cat([history[:, :2], history[:, 2:] / state["loss_factor"]], 1))
    assert_same(*runs)


def test_a_constant_does_not_hand_on_the_dynamic_factor_it_went_on_from(tmp_path: Path) -> None:
    fit(Net(), plugin(loss_scale="dynamic"), max_steps=4).save_checkpoint(tmp_path / "a.ckpt")
    fit_from(Net(), plugin(loss_scale=8.0), tmp_path / "a.ckpt").save_checkpoint(tmp_path / "b.ckpt")
    state = torch.load(tmp_path / "b.ckpt", weights_only=True)[CHECKPOINT_KEY]
    assert (state["loss_scaler"], state["loss_factor"]) == ({}, 8.0)


def test_a_checkpoint_that_names_no_factor_goes_on_as_it_is(saved: Path) -> None:
    checkpoint = torch.load(saved, weights_only=True)
    del checkpoint[CHECKPOINT_KEY]["loss_factor"]
    torch.save(checkpoint, saved)
    settings = plugin(loss_scale=8.0).settings
    states = settings.saved_conversions(checkpoint[CHECKPOINT_KEY])
    assert settings.under_own_loss_scale(states, checkpoint[CHECKPOINT_KEY]) is states
    checkpoint[CHECKPOINT_KEY]["loss_scaler"] = {"scale": 16.0}
    (state,) = settings.under_own_loss_scale(states, checkpoint[CHECKPOINT_KEY])
    assert torch.equal(state["runtime"]["history"][:, 2], states[0]["runtime"]["history"][:, 2] / 2)


def test_a_loss_scale_that_the_checkpoint_lacks_starts_anew(saved: Path) -> None:
    model = Net()
    fit_from(model, FP8Precision(DelayedScaling(amax_history_len=3), loss_scale="dynamic"), saved)
    assert len(model.losses) == 2 and model.losses[-1].isfinite()
