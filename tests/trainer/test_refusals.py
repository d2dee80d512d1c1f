"""Wrong settings and wrong places: an error or a warning that names the remedy, and nothing half converted."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from trainer_models import Net, assert_same, fit, loader, make_trainer, plugin

from lightning_fp8 import DelayedScaling, FP8Precision, LayerSelection
from lightning_fp8.fabric import FP8Precision as FabricFP8Precision
from lightning_fp8.linear import Float8Linear


def untouched(model: nn.Module, state: dict[str, Any]) -> bool:
    """Nothing converted, nothing cast."""
    assert_same(dict(model.state_dict()), state)
    return not any(isinstance(m, Float8Linear) or "fp8" in m.__dict__ for m in model.modules())


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [FP8Precision, FabricFP8Precision])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recipe": "delay"}, r"delay.*(delayed|choose)"),
        ({"recipe": {"name": "delayed", "length": 3}}, r"no setting length.*amax_history_len"),
        ({"recipe": {"amax_history_len": 3}}, r"choose one of delayed"),
        ({"backend": "cutlass"}, r"Unknown backend 'cutlass'.*native"),
        ({"precision": "32"}, r"precision must be one of 'bf16-mixed', 'bf16-true', '16-mixed'"),
        ({"precision": "bf16"}, r"precision must be one of"),
        ({"loss_scale": "static"}, r"loss_scale must be 'dynamic', a positive number or None"),
        ({"loss_scale": 0.0}, r"loss_scale must be"),
        ({"loss_scale": -2}, r"loss_scale must be"),
        ({"loss_scale": float("inf")}, r"loss_scale must be"),
        ({"loss_scale": float("nan")}, r"loss_scale must be"),
        ({"loss_scale": True}, r"loss_scale must be .* got True"),
        ({"loss_scale": 10**400}, r"loss_scale must be .* between 2\*\*-126 and 2\*\*126"),
        ({"loss_scale": 1e300}, r"loss_scale must be .* got 1e\+300"),
        ({"layers": "all"}, r"layers must be 'auto' or a LayerSelection"),
        ({"layers": ["body.*"]}, r"layers must be 'auto' or a LayerSelection"),
    ],
)
def test_a_wrong_setting_is_refused_when_it_is_given(make: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**settings)


@pytest.mark.parametrize(("settings", "message"), [({"recipe": 3}, "recipe"), ({"backend": 3}, "backend")])
def test_a_setting_of_a_wrong_type_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        FP8Precision(**settings)


def test_a_plugin_shows_its_settings() -> None:
    assert "loss_scale" not in repr(FP8Precision()) and "tokens" not in repr(FP8Precision())
    given = FP8Precision("rowwise", precision="bf16-true", loss_scale=1024, tokens=512)
    expected = "recipe=RowwiseScaling(), backend='auto', precision='bf16-true', loss_scale=1024.0, layers='auto'"
    assert repr(given) == f"FP8Precision({expected}, tokens=512)"
    assert "loss_scale='dynamic'" in repr(FP8Precision(precision="16-mixed"))


def test_e5m2_twice_and_an_empty_history_are_refused() -> None:
    with pytest.raises(ValueError, match=r"E5M2 by E5M2.*E4M3"):
        FP8Precision({"name": "delayed", "format": {"input": "e5m2", "grad_output": "e5m2"}})
    with pytest.raises(ValueError, match="amax_history_len must be at least 1"):
        FP8Precision({"name": "delayed", "amax_history_len": 0})


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("pattern", [{"include": ["absent.*"]}, {"exclude": ["body.0", "absent"]}])
def test_a_pattern_that_matches_nothing(precision: Any, pattern: dict[str, Any]) -> None:
    model = Net()
    state = copy.deepcopy(dict(model.state_dict()))
    with pytest.raises(ValueError, match=r"matches no linear layer.*such as: body\.0"):
        fit(model, plugin(precision=precision, layers=LayerSelection(**pattern)))
    assert untouched(model, state)


def test_blocks_that_are_not_there_leave_the_dtype() -> None:
    model = Net()
    model.body = nn.Linear(16, 16)  # type: ignore[assignment]
    state = copy.deepcopy(dict(model.state_dict()))
    with pytest.raises(ValueError, match="the model has no blocks"):
        fit(model, plugin(precision="bf16-true", layers=LayerSelection(keep_first_blocks=1)))
    assert untouched(model, state)


def test_a_refused_conversion_leaves_the_old_one_at_work() -> None:
    model = Net()
    first = fit(model)
    (conversion,) = first.precision_plugin.conversions
    with pytest.raises(ValueError, match="matches no linear layer"):
        fit(model, plugin("rowwise", layers=LayerSelection(include=["absent"])))
    assert type(model.body[0]) is Float8Linear
    again = fit(model)
    assert again.precision_plugin.conversions == [conversion]


def test_nothing_to_convert_is_warned_of_with_the_reason() -> None:
    class Small(Net):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(16, 10), nn.Linear(10, 16))

    with pytest.warns(UserWarning, match=r"No layer of Small runs in FP8.*not multiples of 16"):
        fit(Small(), max_steps=1)


def test_nan_weights_are_warned_of() -> None:
    model = Net()
    with torch.no_grad():
        model.body[0].weight[0, 0] = float("nan")
    with pytest.warns(UserWarning, match=r"body\.0.*NaN or Inf before training.*initialisation or the checkpoint"):
        make_trainer().validate(model, loader(), verbose=False)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_lbfgs_is_refused(precision: Any) -> None:
    with pytest.raises(ValueError, match=r"LBFGS.*another optimizer"):
        fit(Net("lbfgs"), plugin(precision=precision))


def test_summary_before_fit() -> None:
    with pytest.raises(RuntimeError, match="No model was converted yet"):
        plugin().summary()


# --- places ----------------------------------------------------------------------------------------------------------


def test_two_precision_plugins() -> None:
    with pytest.raises(MisconfigurationException, match="multiple values for Precision"):
        pl.Trainer(accelerator="cpu", plugins=[plugin(), plugin()])


def test_a_plugin_and_a_precision() -> None:
    with pytest.raises(ValueError, match="both `precision=bf16-mixed` and `plugins="):
        pl.Trainer(accelerator="cpu", plugins=[plugin()], precision="bf16-mixed")


def test_fabrics_class_in_a_trainer() -> None:
    with pytest.raises(MisconfigurationException, match=r"in a Trainer use lightning_fp8\.FP8Precision"):
        pl.Trainer(accelerator="cpu", plugins=[FabricFP8Precision()])


def test_fsdp_is_refused() -> None:
    strategy = FSDPStrategy()
    with pytest.raises(TypeError, match=r"for FSDPStrategy use lightning_fp8\.FP8FSDPPrecision"):
        strategy.precision_plugin = plugin()


class DeepSpeedStrategy(SingleDeviceStrategy):
    """Stands for Lightning's, which needs the library; subclasses of it are refused alike."""


class MyDeepSpeed(DeepSpeedStrategy):
    pass


class XLAStrategy(SingleDeviceStrategy):
    pass


@pytest.mark.parametrize(
    ("strategy", "remedy"),
    [(DeepSpeedStrategy, "Use DDP"), (MyDeepSpeed, "Use DDP"), (XLAStrategy, "Use a CUDA device or the CPU")],
)
@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_engines_of_their_own_are_refused(strategy: Any, remedy: str, stage: str) -> None:
    model = Net()
    state = copy.deepcopy(dict(model.state_dict()))
    trainer = make_trainer(plugin(precision="bf16-true"), strategy=strategy(torch.device("cpu")))
    with pytest.raises(ValueError, match=rf"cannot run under .*{remedy}"):
        getattr(trainer, stage)(model, loader())
    assert untouched(model, state)


# --- namespaces ------------------------------------------------------------------------------------------------------


@pytest.fixture
def pytorch_lightning() -> Any:
    return pytest.importorskip("pytorch_lightning")


def test_the_other_namespace_trains(pytorch_lightning: Any) -> None:
    from lightning_fp8.pytorch_lightning import FP8Precision as OtherFP8Precision

    class OtherNet(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(optimizer="sgd")
            self.losses: list[torch.Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.net.loss(batch)
            self.losses.append(loss.detach().clone())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)

    model = OtherNet()
    precision = OtherFP8Precision(DelayedScaling(amax_history_len=3), loss_scale=1024.0)
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        max_epochs=1,
        gradient_clip_val=0.5,
        plugins=[precision],
    )
    torch.manual_seed(7)
    trainer.fit(model, loader())
    same = Net(optimizer="sgd")
    fit(same, plugin(loss_scale=1024.0), gradient_clip_val=0.5)
    assert_same(model.losses, same.losses)


def test_the_wrong_namespace_is_refused_with_the_right_name(pytorch_lightning: Any) -> None:
    from lightning_fp8.pytorch_lightning import FP8Precision as OtherFP8Precision

    with pytest.raises(Exception, match=r"lightning_fp8\.pytorch_lightning\.FP8Precision"):
        pytorch_lightning.Trainer(accelerator="cpu", plugins=[plugin()])
    with pytest.raises(MisconfigurationException, match=r"use lightning_fp8\.FP8Precision"):
        pl.Trainer(accelerator="cpu", plugins=[OtherFP8Precision()])
