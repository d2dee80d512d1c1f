"""Loss scaling beside the FP8 scales."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from trainer_models import Net, assert_same, differs, fit, fp8_state, plugin

from lightning_fp8 import RowwiseScaling, TensorwiseScaling
from lightning_fp8.loss_scaling import LossScaler
from lightning_fp8.statistics import SCALE


class Gradients(pl.Callback):
    """The gradients that the optimizer is about to use."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []
        self.scaled: list[Tensor] = []

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.scaled.append(module.head.weight.grad.clone())

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.seen.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("recipe", [RowwiseScaling(), TensorwiseScaling(power_of_two=True), None])
@pytest.mark.parametrize("loss_scale", [1024.0, "dynamic"])
def test_the_gradients_before_the_step_are_the_same(recipe: Any, loss_scale: Any) -> None:
    plain, scaled = Gradients(), Gradients()
    fit(Net("sgd"), plugin(recipe), callbacks=[plain], max_steps=3)
    fit(Net("sgd"), plugin(recipe, loss_scale=loss_scale), callbacks=[scaled], max_steps=3)
    factor = 65536.0 if loss_scale == "dynamic" else loss_scale
    assert torch.equal(plain.scaled[0] * factor, scaled.scaled[0])
    for one, other in zip(plain.seen, scaled.seen, strict=True):
        for name in one:
            if recipe is None:
                torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-5)
            else:
                # Powers of two everywhere: no bit changes.
                assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("loss_scale", [1024.0, "dynamic"])
def test_an_accumulated_gradient_is_unscaled_once(loss_scale: Any) -> None:
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    plain, scaled = Gradients(), Gradients()
    fit(Net("sgd"), plugin(RowwiseScaling()), callbacks=[plain], **settings)
    fit(Net("sgd"), plugin(RowwiseScaling(), loss_scale=loss_scale), callbacks=[scaled], **settings)
    assert len(plain.seen) == 3
    assert_same(plain.seen, scaled.seen)


def test_a_constant_works_in_every_precision() -> None:
    for precision in ("bf16-mixed", "bf16-true", "16-mixed"):
        model = Net()
        trainer = fit(model, plugin(precision=precision, loss_scale=1024.0), accumulate_grad_batches=2)
        assert torch.stack(model.losses).isfinite().all()
        assert trainer.precision_plugin.settings.loss_scaler.state_dict() == {}


def test_sixteen_mixed_is_dynamic_by_default() -> None:
    assert plugin(precision="16-mixed").settings.loss_scaler.loss_scale == "dynamic"
    assert plugin(precision="16-mixed", loss_scale=8.0).settings.loss_scaler.loss_scale == 8.0
    assert LossScaler(10**30).scale(torch.tensor(2.0)) == 2e30  # torch itself takes no int beyond 64 bits.
    assert plugin().settings.loss_scaler is None


class Overflow(Net):
    """A loss that overflows in some steps."""

    def __init__(self, steps: set[int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.steps = steps
        self.moved: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.before = [p.detach().clone() for p in self.parameters()]
        return super().training_step(batch, batch_idx) * (float("inf") if batch_idx in self.steps else 1.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.moved.append(differs(self.before, [p.detach() for p in self.parameters()]))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_an_overflow_skips_the_step_and_halves_the_scale(optimizer: str, clip: float | None) -> None:
    model = Overflow({2}, optimizer=optimizer)
    trainer = fit(model, plugin(loss_scale="dynamic"), gradient_clip_val=clip)
    assert model.moved == [True, True, False, True, True, True]
    assert trainer.precision_plugin.settings.loss_scaler.state_dict()["scale"] == 32768.0
    state = fp8_state(trainer)["runtime"]
    assert state["history"].isfinite().all()
    # The bad step's gradient is in no history; its input and weight are.
    positions = state["position"]
    assert (positions[:, :2] == 5 % 3).all() and (positions[:, 2] == 4 % 3).all()


def test_an_overflow_in_the_first_step_leaves_no_scale_behind() -> None:
    model = Overflow({0})
    trainer = fit(model, plugin(loss_scale="dynamic"), max_steps=3)
    assert model.moved == [False, True, True]
    table = fp8_state(trainer)["runtime"]["table"]["data"]
    assert (table[:, 2, SCALE] > 0).all() and torch.stack(model.losses).isfinite().all()
    # The scale is that of the scaled gradients, not the 1 of an amax that says nothing.
    assert (table[:, 2, SCALE] != 1).all()


def test_sixteen_mixed_trains_through_its_first_overflows() -> None:
    """fp16 gradients overflow with the initial factor of 65536; training goes on once it is small enough."""
    model = Overflow(set())
    trainer = fit(model, plugin(precision="16-mixed"), max_epochs=4, max_steps=24)
    assert model.moved[-1] and sum(model.moved) >= 12
    assert torch.stack(model.losses).isfinite().all()
    assert all(p.isfinite().all() for p in model.parameters())
    assert torch.stack(model.losses[-6:]).mean() < torch.stack(model.losses[:6]).mean()
    assert trainer.precision_plugin.settings.loss_scaler.state_dict()["scale"] <= 65536.0


def test_one_factor_for_all_optimizers_of_one_backward() -> None:
    layers = [nn.Linear(4, 4) for _ in range(2)]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in layers]
    scaler = LossScaler("dynamic")
    x = torch.ones(1, 4)
    for _ in range(4):
        loss = sum(layer(x).sum() for layer in layers)
        scaler._dynamic("cpu").set_growth_interval(1)
        scaler.scale(loss).backward()
        before = [layer.bias.detach().clone() for layer in layers]
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        moved = [a - layer.bias.detach() for a, layer in zip(before, layers, strict=True)]
        # The factor doubles after every backward; neither optimizer's step may see it happen.
        for movement in moved:
            torch.testing.assert_close(movement, torch.ones(4))
    assert scaler.state_dict()["scale"] == 65536.0 * 2**4


def test_unscaling_happens_once() -> None:
    for loss_scale in (1024.0, "dynamic"):
        layer = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        scaler = LossScaler(loss_scale)
        before = layer.bias.detach().clone()
        scaler.scale(layer(torch.ones(1, 4)).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.unscale_(optimizer)
        assert torch.equal(layer.bias.grad, torch.ones(4))
        scaler.step(optimizer)
        torch.testing.assert_close(before - layer.bias.detach(), torch.ones(4))


def test_two_optimizers_may_both_clip_before_either_steps() -> None:
    for loss_scale in (1024.0, "dynamic"):
        layers = [nn.Linear(4, 4) for _ in range(2)]
        optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in layers]
        scaler = LossScaler(loss_scale)
        before = [layer.bias.detach().clone() for layer in layers]
        for layer, optimizer in zip(layers, optimizers, strict=True):
            scaler.scale(layer(torch.ones(1, 4)).sum()).backward()
            scaler.unscale_(optimizer)
        for optimizer in optimizers:
            scaler.step(optimizer)
        for bias, layer in zip(before, layers, strict=True):
            torch.testing.assert_close(bias - layer.bias.detach(), torch.ones(4))


class SkipsItsSecondStep(Net):
    """Manual optimization that clips, looks, and lets a step go."""

    def __init__(self, set_to_none: bool) -> None:
        super().__init__("sgd")
        self.set_to_none = set_to_none
        self.automatic_optimization = False
        self.norms: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad(set_to_none=self.set_to_none)
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=1e9, gradient_clip_algorithm="norm")
        if batch_idx != 1:
            self.norms.append(self.head.weight.grad.norm())
            optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("loss_scale", [1024.0, "dynamic"])
def test_the_step_after_a_skipped_one_has_true_gradients(loss_scale: Any, set_to_none: bool) -> None:
    plain, scaled = SkipsItsSecondStep(set_to_none), SkipsItsSecondStep(set_to_none)
    fit(plain, plugin("rowwise"))
    fit(scaled, plugin("rowwise", loss_scale=loss_scale))
    assert len(plain.norms) == 5
    torch.testing.assert_close(plain.norms, scaled.norms, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("loss_scale", [None, 1024.0, "dynamic"])
def test_a_step_without_gradients_is_clipped_by_value(loss_scale: Any) -> None:
    class GivesUp(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            return super().training_step(batch, batch_idx) if batch_idx != 2 else None

    model = GivesUp("sgd")
    fit(model, plugin(loss_scale=loss_scale), gradient_clip_val=0.5, gradient_clip_algorithm="value")
    assert len(model.losses) == 5


@pytest.mark.parametrize("loss_scale", [1024.0, "dynamic"])
def test_an_optimizer_without_gradients_steps_beside_another(loss_scale: Any) -> None:
    layers = [nn.Linear(4, 4) for _ in range(2)]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in layers]
    scaler = LossScaler(loss_scale)
    for _ in range(2):
        before = [layer.bias.detach().clone() for layer in layers]
        scaler.scale(layers[0](torch.ones(1, 4)).sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        moved = [a - layer.bias.detach() for a, layer in zip(before, layers, strict=True)]
        torch.testing.assert_close(moved, [torch.ones(4), torch.zeros(4)])


class Interrupts(pl.Callback):
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.global_step == 2:
            raise RuntimeError("interrupted")


def test_an_interrupted_step_does_not_hold_the_dynamic_factor_fast() -> None:
    precision = plugin(loss_scale="dynamic")
    model = Overflow({1})
    with pytest.raises(RuntimeError, match="interrupted"):
        fit(model, precision, callbacks=[Interrupts()])
    held = model.trainer.optimizers  # Alive, as it is where a notebook goes on.
    scale = precision.settings.loss_scaler.state_dict()["scale"]
    fit(model, precision, max_steps=2)
    assert held and precision.settings.loss_scaler.state_dict()["scale"] == scale / 2
