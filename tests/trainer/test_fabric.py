"""Fabric: setup, backward, clip, step, save and load; one module and two."""

from __future__ import annotations

import copy
import gc
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn
from trainer_models import Net, assert_same, body, dataset, differs

from lightning_fp8 import DelayedScaling, LayerSelection
from lightning_fp8.backends import NativeBackend, Support
from lightning_fp8.fabric import FP8Precision
from lightning_fp8.linear import Float8Linear
from lightning_fp8.statistics import SCALE


def make(recipe: Any = None, **kwargs: Any) -> tuple[Fabric, FP8Precision]:
    precision = FP8Precision(recipe or DelayedScaling(amax_history_len=4), **kwargs)
    return Fabric(accelerator="cpu", devices=1, plugins=[precision]), precision


def classifier() -> nn.Sequential:
    net = Net(dropout=0.0)
    return nn.Sequential(net.body, net.head)


def batches(count: int = 6) -> list[tuple[Tensor, Tensor]]:
    x, y = dataset(4 * count).tensors
    return list(zip(x.split(4), y.split(4), strict=True))


def train(fabric: Fabric, model: Any, optimizer: Any, data: Any, clip: float | None = None) -> list[Tensor]:
    losses = []
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        if clip is not None:
            fabric.clip_gradients(model, optimizer, max_norm=clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def scales(precision: FP8Precision, index: int = 0) -> Tensor:
    return precision.conversions[index].runtime.table.data[..., SCALE].clone()


class NativeOnGPUs(NativeBackend):
    """A backend that has kernels on GPUs alone."""

    def support(self, recipe: Any, device: torch.device) -> Support:
        return Support("native" if device.type == "cuda" else "emulated", f"on {device.type}")


def test_layers_are_decided_on_for_the_device_that_they_will_run_on() -> None:
    """Fabric moves a module after it has been converted."""
    for device, kind in (("cuda", "native"), ("cpu", "emulated")):
        fabric, precision = make(backend=NativeOnGPUs(), device=device, layers=LayerSelection())
        model = fabric.setup(classifier())
        assert isinstance(model.module[0][0], Float8Linear)
        (conversion,) = precision.conversions
        assert (conversion.device.type, conversion.support.kind) == (device, kind)


@pytest.mark.parametrize("word", ["bf16-mixed", "bf16-true", "16-mixed"])
def test_training(word: Any) -> None:
    fabric, precision = make(precision=word)
    raw = classifier()
    model, optimizer = fabric.setup(raw, torch.optim.AdamW(raw.parameters(), lr=1e-2, fused=True))
    losses = train(fabric, model, optimizer, batches())
    assert torch.stack(losses).isfinite().all()
    assert type(raw[0][0]) is Float8Linear and type(raw[1]) is nn.Linear
    assert model(batches()[0][0]).dtype == torch.float32
    assert {p.dtype for p in raw.parameters()} == {torch.bfloat16 if word == "bf16-true" else torch.float32}
    # Six optimizer steps, and a forward after the last.
    assert (precision.conversions[0].state_dict()["runtime"]["position"] == 6 % 4).all()
    assert "2 of 3" in precision.summary()


def test_the_same_numbers_as_the_trainer() -> None:
    from trainer_models import fit, plugin

    trained = Net(optimizer="sgd", dropout=0.0)
    fit(trained, plugin(DelayedScaling(amax_history_len=4)))

    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            net = Net(dropout=0.0)
            self.body, self.head = net.body, net.head

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x) + x)

    fabric, _ = make()
    raw = Same()
    _model, optimizer = fabric.setup(raw, torch.optim.SGD(raw.parameters(), lr=1e-2, momentum=0.9))
    losses = []
    for x, y in batches():
        # Fabric casts a module's inputs and outputs, and the loss runs outside: the Trainer's way by hand.
        with fabric.autocast():
            loss = F.cross_entropy(raw(x).float(), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert_same(trained.losses, losses)


def test_scales_move_once_a_step() -> None:
    fabric, precision = make()
    raw = classifier()
    model, optimizer = fabric.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    (x, y), (x2, y2), *_ = batches()
    first = F.cross_entropy(model(x), y)
    start = scales(precision)
    second = F.cross_entropy(model(3 * x2), y2)
    fabric.backward(first)
    fabric.backward(second)
    assert_same(start[:, :2], scales(precision)[:, :2])
    optimizer.step()
    model.eval()
    with torch.no_grad():
        model(x)
    assert_same(start[:, :2], scales(precision)[:, :2])
    model.train()
    with torch.no_grad():
        model(x)
    assert_same(start[:, :2], scales(precision)[:, :2])
    model(x)
    assert differs(start[:, :2], scales(precision)[:, :2])
    history = precision.state_dict()["conversions"][0]["runtime"]["history"]
    # Fabric casts inputs to bf16.
    assert history[0, 0, 0] == (3 * x2).bfloat16().abs().max()


class WithLoss(nn.Module):
    """A forward method of its own beside ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = classifier()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)


@pytest.mark.parametrize("word", ["bf16-mixed", "bf16-true"])
def test_forward_methods_on_one_device_want_autocast_around_them(word: Any) -> None:
    moved = []
    for surround in (False, True):
        fabric, precision = make(precision=word)
        raw = WithLoss()
        model, optimizer = fabric.setup(raw, torch.optim.SGD(raw.parameters(), lr=1e-2))
        model.mark_forward_method("loss")
        for x, y in batches(3):
            with fabric.autocast() if surround else nullcontext():
                loss = model.loss(x.to(raw.net[0][0].weight.dtype), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        moved.append(precision.conversions[0].runtime.scaling.history.position.unique().tolist())
    assert moved == [[0], [2]]  # As docs/precision.md says.


@pytest.mark.parametrize("loss_scale", [None, 1024.0, "dynamic"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_loss_scale_is_undone_before_the_step(loss_scale: Any, clip: float | None) -> None:
    results = []
    for scale in (None, loss_scale):
        fabric, _ = make("rowwise", loss_scale=scale)
        raw = classifier()
        model, optimizer = fabric.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.5))
        before = [p.detach().clone() for p in raw.parameters()]
        train(fabric, model, optimizer, batches(1), clip)
        results.append([a - b.detach() for a, b in zip(before, raw.parameters(), strict=True)])
    # A power of two on the loss changes no bit of rowwise's power-of-two scaled gradients.
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
    if clip is not None:
        total = torch.stack([moved.norm() for moved in results[1]]).norm()
        torch.testing.assert_close(total, torch.tensor(0.5 * clip), rtol=1e-3, atol=0.0)


def test_two_modules_with_two_optimizers() -> None:
    """GAN-like: the critic's step must not move the generator's scales before the generator's backward."""
    fabric, precision = make(DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent"))
    torch.manual_seed(0)
    g_raw, c_raw = body(dropout=0.0), nn.Sequential(body(dropout=0.0), nn.Linear(16, 1))
    generator, g_opt = fabric.setup(g_raw, torch.optim.SGD(g_raw.parameters(), lr=0.05))
    critic, c_opt = fabric.setup(c_raw, torch.optim.SGD(c_raw.parameters(), lr=0.05))
    assert len(precision.conversions) == 2
    before = []
    for step, (real, _) in enumerate(batches()):
        fake = generator(torch.randn_like(real))
        at_forward = scales(precision, 0)
        if step > 1:
            assert differs(before[-1], at_forward)
        c_loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(real)).mean()
        fabric.backward(c_loss)
        c_opt.step()
        c_opt.zero_grad()
        g_loss = F.softplus(-critic(fake)).mean()
        assert_same(at_forward, scales(precision, 0))
        fabric.backward(g_loss)
        if step:
            assert_same(at_forward, scales(precision, 0))
        g_opt.step()
        g_opt.zero_grad()
        before.append(at_forward)
        assert c_loss.isfinite() and g_loss.isfinite()
    positions = [c.state_dict()["runtime"]["position"] for c in precision.conversions]
    assert (positions[0] == 5 % 4).all()
    # The critic's scales moved as its first forward after each of its steps began.
    assert (positions[1] == 6 % 4).all()


def test_a_module_that_is_given_up_is_forgotten() -> None:
    fabric, precision = make()
    first = fabric.setup(classifier())
    fabric.setup(second := classifier())
    assert len(precision.conversions) == 2
    del first
    gc.collect()
    assert len(precision.conversions) == 1
    assert precision.conversions[0] is second.__dict__["_lightning_fp8"]


def test_save_and_load(tmp_path: Path) -> None:
    data = batches(8)

    def start() -> tuple[Any, ...]:
        fabric, precision = make(loss_scale="dynamic")
        raw = classifier()
        model, optimizer = fabric.setup(raw, torch.optim.AdamW(raw.parameters(), lr=1e-2, fused=True))
        return fabric, precision, model, optimizer

    fabric, precision, model, optimizer = start()
    train(fabric, model, optimizer, data[:3])
    state = {"model": model, "optimizer": optimizer, "precision": precision.state_dict()}
    fabric.save(tmp_path / "fabric.ckpt", state)
    whole = train(fabric, model, optimizer, data[3:])

    torch.load(tmp_path / "fabric.ckpt", weights_only=True)
    fabric, again, model, optimizer = start()
    rest = fabric.load(tmp_path / "fabric.ckpt", {"model": model, "optimizer": optimizer})
    again.load_state_dict(rest["precision"])
    assert_same(whole, train(fabric, model, optimizer, data[3:]))
    assert_same(precision.state_dict(), again.state_dict())


def test_another_loss_scale_changes_no_gradient() -> None:
    runs = []
    for after in (None, 2.0**16, "dynamic"):
        raw = classifier()
        fabric, first = make()
        model, optimizer = fabric.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
        train(fabric, model, optimizer, batches(3))
        fabric, again = make(loss_scale=after)
        model, optimizer = fabric.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
        again.load_state_dict(first.state_dict())
        runs.append((train(fabric, model, optimizer, batches(6)[3:]), dict(raw.state_dict())))
    assert_same(runs[0], runs[1])
    assert_same(runs[0], runs[2])


def test_the_precision_itself_may_be_saved(tmp_path: Path) -> None:
    fabric, precision = make()
    raw = classifier()
    model, optimizer = fabric.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    train(fabric, model, optimizer, batches(2))
    fabric.save(tmp_path / "fabric.ckpt", {"model": model, "precision": precision})
    expected = copy.deepcopy(precision.state_dict())
    train(fabric, model, optimizer, batches(4))
    fabric.load(tmp_path / "fabric.ckpt", {"model": model, "precision": precision})
    assert_same(expected, precision.state_dict())


def test_loading_before_setup_is_refused(tmp_path: Path) -> None:
    fabric, precision = make()
    model = fabric.setup(classifier())
    state = precision.state_dict()
    assert model is not None and len(state["conversions"]) == 1
    with pytest.raises(ValueError, match=r"call fabric\.setup\(model\) before loading"):
        make()[1].load_state_dict(state)


def test_lbfgs_is_refused() -> None:
    fabric, _ = make()
    raw = classifier()
    model, optimizer = fabric.setup(raw, torch.optim.LBFGS(raw.parameters()))
    before = [p.detach().clone() for p in raw.parameters()]
    fabric.backward(F.cross_entropy(model(batches()[0][0]), batches()[0][1]))
    with pytest.raises(ValueError, match=r"LBFGS.*another optimizer"):
        optimizer.step()
    assert_same(before, [p.detach() for p in raw.parameters()])


def test_accumulation_with_no_step_moves_nothing() -> None:
    fabric, precision = make()
    raw = classifier()
    model, optimizer = fabric.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    for x, y in batches(3):
        with fabric.no_backward_sync(model, enabled=True):
            fabric.backward(F.cross_entropy(model(x), y))
    assert (precision.state_dict()["conversions"][0]["runtime"]["position"] == 0).all()
    optimizer.step()
    model(batches()[0][0])
    history = precision.state_dict()["conversions"][0]["runtime"]["history"]
    assert history[0, 0, 0] == dataset().tensors[0][:12].bfloat16().abs().max()


def test_setup_again_with_other_settings_converts_anew() -> None:
    fabric, _ = make()
    raw = classifier()
    fabric.setup(raw)
    other, precision = make("tensorwise", layers=LayerSelection(include=["0.0"]))
    other.setup(raw)
    assert [c.converted for c in precision.conversions] == [["0.0"]]
    assert type(raw[0][0]) is Float8Linear and type(raw[0][3]) is nn.Linear


def test_a_pattern_that_matches_nothing_changes_nothing() -> None:
    fabric, _ = make(precision="bf16-true", layers=LayerSelection(include=["absent.*"]))
    raw = classifier()
    with pytest.raises(ValueError, match="matches no linear layer"):
        fabric.setup(raw)
    assert {p.dtype for p in raw.parameters()} == {torch.float32}
    assert type(raw[0][0]) is nn.Linear


def test_init_module_makes_the_dtype_of_the_parameters() -> None:
    fabric, _ = make(precision="bf16-true")
    with fabric.init_module():
        assert nn.Linear(16, 16).weight.dtype == torch.bfloat16
    fabric, _ = make()
    with fabric.init_module():
        assert nn.Linear(16, 16).weight.dtype == torch.float32


def test_the_precision_is_pickled_with_its_settings() -> None:
    fabric, precision = make(loss_scale="dynamic")
    fabric.setup(raw := classifier())
    again = pickle.loads(pickle.dumps(precision))
    assert again.settings.recipe == precision.settings.recipe and again.conversions == []
    assert len(precision.conversions) == 1 and raw is not None


def test_summary_before_setup() -> None:
    with pytest.raises(RuntimeError, match=r"fabric\.setup"):
        make()[1].summary()


def test_the_trainers_class_is_refused_with_the_right_name() -> None:
    from lightning_fp8 import FP8Precision as TrainerFP8Precision

    raw = classifier()
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[TrainerFP8Precision(precision="bf16-true")])
    with pytest.raises(TypeError, match=r"lightning_fp8\.fabric\.FP8Precision"):
        fabric.setup(raw)
    assert type(raw[0][0]) is nn.Linear and raw[1].weight.dtype == torch.float32
