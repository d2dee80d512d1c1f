"""One device: fit, evaluate, accumulate, clip, several optimizers, and what surrounds the FP8 layers."""

from __future__ import annotations

import copy
import traceback
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_models import Net, assert_same, body, dataset, differs, fit, fp8_state, loader, make_trainer, plugin

from lightning_fp8 import DelayedScaling, FP8Precision, LayerSelection
from lightning_fp8.linear import Float8Linear
from lightning_fp8.statistics import AMAX, LAST_AMAX, NOT_SEEN, SCALE


def scales(trainer: Any) -> Tensor:
    return trainer.precision_plugin.conversions[0].runtime.table.data[..., SCALE].clone()


# --- fit -------------------------------------------------------------------------------------------------------------


def test_fit_trains_in_fp8() -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    trainer = fit(model)
    assert len(model.losses) == 6 and all(loss.isfinite() for loss in model.losses)
    assert type(model.body[0]) is Float8Linear and type(model.body[3]) is Float8Linear
    assert type(model.head) is nn.Linear
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(differs(before[key], after[key]) for key in before)
    assert all(value.dtype == torch.float32 for value in after.values())
    assert "body.0" in trainer.precision_plugin.summary() and "2 of 3" in trainer.precision_plugin.summary()


def test_fp8_is_near_bf16_and_is_not_bf16() -> None:
    fp8, bf16 = Net(dropout=0.0), Net(dropout=0.0)
    fit(fp8)
    fit(bf16, "bf16-mixed")
    a, b = torch.stack(fp8.losses), torch.stack(bf16.losses)
    assert not torch.equal(a, b)
    torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "rowwise_gw_hp", "static"])
def test_every_recipe_trains(recipe: str) -> None:
    model = Net()
    trainer = fit(model, FP8Precision(recipe), max_steps=3)
    assert torch.stack(model.losses).isfinite().all()
    table = trainer.precision_plugin.conversions[0].runtime.table.data
    assert (table[..., LAST_AMAX] > 0).all()


@pytest.mark.parametrize(("recipe", "width"), [("blockwise", 128), ("mxfp8", 32)])
def test_block_recipes_train(recipe: str, width: int) -> None:
    class Wide(Net):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(16, width)
            self.square = nn.Linear(width, width)
            self.final = nn.Linear(width, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.final(self.square(self.wide(x)))

    model = Wide()
    trainer = fit(model, FP8Precision(recipe), max_steps=3)
    assert torch.stack(model.losses).isfinite().all()
    assert "square" in trainer.precision_plugin.conversions[0].converted
    assert "not multiples" in trainer.precision_plugin.summary()


def test_default_recipe_counts_every_step() -> None:
    trainer = fit(Net())
    state = fp8_state(trainer)
    assert state["step_pending"]
    # The last of six steps has not been entered yet: scales move as the next one begins.
    assert (state["runtime"]["position"] == 5 % 3).all()


def test_training_twice_from_one_seed_gives_the_same_bits() -> None:
    runs = [(model := Net(), fit(model)) for _ in range(2)]
    (a, trainer_a), (b, trainer_b) = runs
    assert_same(a.losses, b.losses)
    assert_same(dict(a.state_dict()), dict(b.state_dict()))
    assert_same(fp8_state(trainer_a), fp8_state(trainer_b))


def test_two_trainers_in_one_process_do_not_meet() -> None:
    alone = Net()
    trainer_alone = fit(alone)

    class FitAnother(pl.Callback):
        """Trains another model, with other settings, in the middle of a step's window."""

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            with torch.random.fork_rng([]):
                fit(Net(seed=5), plugin("tensorwise", precision="bf16-true"), max_steps=2)

    among = Net()
    trainer_among = fit(among, callbacks=[FitAnother()])
    assert_same(alone.losses, among.losses)
    assert_same(dict(alone.state_dict()), dict(among.state_dict()))
    assert_same(fp8_state(trainer_alone), fp8_state(trainer_among))


# --- fit twice -------------------------------------------------------------------------------------------------------


def test_fit_again_with_the_same_settings_changes_nothing() -> None:
    model = Net()
    first = fit(model)
    conversion, layer = first.precision_plugin.conversions[0], model.body[0].fp8
    history = conversion.state_dict()["runtime"]
    trainer = make_trainer(plugin(), max_epochs=1)
    seen: list[dict[str, Any]] = []

    class Look(pl.Callback):
        def on_train_start(self, trainer: Any, *args: Any) -> None:
            seen.append(trainer.precision_plugin.conversions[0].state_dict()["runtime"])

    trainer.callbacks.append(Look())
    trainer.fit(model, loader())
    assert trainer.precision_plugin.conversions == [conversion]
    assert model.body[0].fp8 is layer
    assert_same(seen[0], history)


@pytest.mark.parametrize(
    "settings",
    [
        {"recipe": "rowwise"},
        {"layers": LayerSelection(exclude=["body.0"])},
        {"recipe": "delayed", "precision": "bf16-true"},
    ],
)
def test_fit_again_with_other_settings_converts_anew(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    first = fit(model)
    with caplog.at_level("INFO"):
        second = fit(model, plugin(**settings))
    assert "onverting anew" in caplog.text
    assert second.precision_plugin.conversions != first.precision_plugin.conversions
    (conversion,) = second.precision_plugin.conversions
    excluded = settings.get("layers") is not None
    assert conversion.converted == (["body.3"] if excluded else ["body.0", "body.3"])
    assert type(model.body[0]) is (nn.Linear if excluded else Float8Linear)
    assert torch.stack(model.losses).isfinite().all()


def test_refit_in_bf16_runs_without_the_plugin() -> None:
    from lightning_fp8 import revert_model

    model = Net()
    fit(model)
    revert_model(model)
    assert not any(isinstance(m, Float8Linear) for m in model.modules())
    fit(model, "bf16-mixed", max_steps=1)
    assert model.losses[-1].isfinite()


# --- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_alone_runs_in_fp8_and_records_nothing(stage: str) -> None:
    model = Net()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        in_bf16 = copy.deepcopy(model).eval()(dataset().tensors[0][:4])
    trainer = make_trainer()
    result = getattr(trainer, stage)(model, loader())
    assert type(model.body[0]) is Float8Linear
    runtime = trainer.precision_plugin.conversions[0].runtime
    assert (runtime.table.data[..., AMAX] == NOT_SEEN).all() and (runtime.table.data[..., SCALE] == 0).all()
    if stage == "predict":
        assert not torch.equal(result[0], in_bf16)
        torch.testing.assert_close(result[0].float(), in_bf16.float(), rtol=0.1, atol=0.1)
        assert result[0].dtype == torch.bfloat16


def test_validation_during_fit_moves_no_scale() -> None:
    plain, validated = Net(dropout=0.0), Net(dropout=0.0)
    first = fit(plain)
    second = make_trainer(val_check_interval=1)
    second.fit(validated, loader(), loader(seed=9))
    assert_same(plain.losses, validated.losses)
    assert_same(fp8_state(first), fp8_state(second))


# --- when scales move ------------------------------------------------------------------------------------------------


class ScaleLog(pl.Callback):
    """The scales in force at each forward of ``body.0``, at each backward, and the number of optimizer steps."""

    def __init__(self) -> None:
        self.forward: list[Tensor] = []
        self.backward: list[Tensor] = []

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        def now() -> Tensor:
            return scales(trainer)

        module.body[0].register_forward_hook(lambda *args: self.forward.append(now()) if args[0].training else None)
        module.body[0].register_full_backward_hook(lambda *args: self.backward.append(now()))


def test_accumulation_takes_the_maximum_over_the_window() -> None:
    log = ScaleLog()
    model = Net(dropout=0.0)
    trainer = fit(model, plugin(DelayedScaling(amax_history_len=4)), accumulate_grad_batches=3, callbacks=[log])
    assert trainer.global_step == 2
    # Within a window nothing moves but what the first data sets.
    assert_same(log.forward[1], log.forward[2])
    assert_same(log.forward[3], log.forward[5])
    assert differs(log.forward[2], log.forward[3])
    history = fp8_state(trainer)["runtime"]["history"]
    assert (fp8_state(trainer)["runtime"]["position"] == 1).all()
    inputs = dataset().tensors[0]
    # Under autocast the inputs are what the user gave: fp32.
    assert history[0, 0, 0] == inputs[:12].abs().max()


def test_accumulated_gradients_are_those_of_one_large_batch_within_rounding() -> None:
    class Keep(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            self.gradients = {name: p.grad.clone() for name, p in module.named_parameters()}

    whole, parts = Keep(), Keep()
    fit(Net(dropout=0.0), data=torch.utils.data.DataLoader(dataset(12), batch_size=12), callbacks=[whole])
    fit(Net(dropout=0.0), data=loader(12), accumulate_grad_batches=3, callbacks=[parts])
    for name, gradient in whole.gradients.items():
        assert F.cosine_similarity(gradient.flatten(), parts.gradients[name].flatten(), dim=0) > 0.98, name


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("loss_scale", [None, 1024.0])
def test_clipping_with_a_fused_optimizer(algorithm: str, loss_scale: float | None) -> None:
    class Check(pl.Callback):
        seen = 0

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            self.before = [p.grad.clone() for p in module.parameters()]

        def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
            if not hasattr(self, "before"):
                return
            after = [p.grad for p in module.parameters()]
            total = torch.stack([g.norm() for g in self.before]).norm()
            assert total > 0.01
            for old, new in zip(self.before, after, strict=True):
                expected = old * (0.01 / (total + 1e-6)) if algorithm == "norm" else old.clamp(-0.01, 0.01)
                torch.testing.assert_close(new, expected)
            self.seen += 1

    check = Check()
    fit(
        Net(optimizer="adamw"),
        plugin(loss_scale=loss_scale),
        gradient_clip_val=0.01,
        gradient_clip_algorithm=algorithm,
        callbacks=[check],
        max_steps=4,
    )
    assert check.seen == 3


class Gan(pl.LightningModule):
    """Two networks, two losses, two forwards before the first backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            self.generator = body()
            self.critic = nn.Sequential(body(), nn.Linear(16, 1))
        self.scales: list[list[Tensor]] = []
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        g_opt, d_opt = self.optimizers()
        taken = [scales(self.trainer)]
        fake = self.generator(torch.randn_like(real))
        taken.append(scales(self.trainer))
        self.toggle_optimizer(d_opt)
        d_loss = F.softplus(self.critic(fake.detach())).mean() + F.softplus(-self.critic(real)).mean()
        self.manual_backward(d_loss)
        d_opt.step()
        d_opt.zero_grad()
        self.untoggle_optimizer(d_opt)
        taken.append(scales(self.trainer))
        self.toggle_optimizer(g_opt)
        g_loss = F.softplus(-self.critic(fake)).mean()
        self.manual_backward(g_loss)
        g_opt.step()
        g_opt.zero_grad()
        self.untoggle_optimizer(g_opt)
        taken.append(scales(self.trainer))
        self.scales.append(taken)
        self.losses += [d_loss.detach(), g_loss.detach()]

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=1e-2, fused=True) for part in (self.generator, self.critic)]


@pytest.mark.parametrize("loss_scale", [None, 1024.0, "dynamic"])
def test_manual_optimization_with_two_losses(loss_scale: Any) -> None:
    model = Gan()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = fit(model, plugin(loss_scale=loss_scale), max_epochs=1)
    assert torch.stack(model.losses).isfinite().all()
    for taken in model.scales[1:]:
        # Every scale is set by now, and none moves within the step, through two backwards and two optimizer steps.
        assert (taken[0] > 0).all()
        for later in taken[1:]:
            assert_same(taken[0], later)
    for one, two in zip(model.scales[1:], model.scales[2:], strict=False):
        assert differs(one[0], two[0])
    # One training step is one step of the history, however many optimizers stepped in it.
    assert (fp8_state(trainer)["runtime"]["position"] == 5 % 3).all()
    assert all(differs(before[name], p.detach()) for name, p in model.named_parameters())


class ManualClip(Net):
    """Manual optimization that clips as Lightning's documentation shows."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd", dropout=0.0)
        self.automatic_optimization = False
        self.norms: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        before = [p.detach().clone() for p in self.parameters()]
        optimizer.step()
        moved = [(a - b.detach()) for a, b in zip(before, self.parameters(), strict=True)]
        self.norms.append(torch.stack([m.norm() for m in moved]).norm() / self.lr)
        optimizer.zero_grad()


@pytest.mark.parametrize("loss_scale", [None, 1024.0, "dynamic"])
def test_clipping_by_hand_clips_the_true_gradients(loss_scale: Any) -> None:
    model = ManualClip()
    fit(model, plugin(loss_scale=loss_scale), max_steps=3)
    torch.testing.assert_close(model.norms[0], torch.tensor(0.1), rtol=1e-3, atol=0)


def test_several_optimizers_share_one_model() -> None:
    class Two(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.loss(batch)
            self.losses.append(loss.detach())
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.SGD(self.body.parameters(), lr=1e-2),
                torch.optim.AdamW(self.head.parameters(), lr=1e-2, fused=True),
            ]

    model = Two()
    trainer = fit(model)
    assert (fp8_state(trainer)["runtime"]["position"] == 5 % 3).all()
    assert model.losses[-1].isfinite()


def test_a_step_without_a_loss_is_left_out() -> None:
    class Sometimes(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 2 else super().training_step(batch, batch_idx)

    for loss_scale in (None, "dynamic"):
        model = Sometimes()
        fit(model, plugin(loss_scale=loss_scale))
        assert len(model.losses) == 5 and model.losses[-1].isfinite()


# --- what surrounds the FP8 layers -----------------------------------------------------------------------------------


class Attention(Net):
    """A block with everything that must stay in high precision; hooks note the dtypes that its parts see."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.embedding = nn.Embedding(8, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.proj = nn.Linear(16, 16)
        self.softmax = nn.Softmax(-1)
        self.residual = nn.Identity()
        self.criterion = nn.CrossEntropyLoss()
        self.out = nn.Linear(16, 4)
        self.seen: dict[str, set[torch.dtype]] = {}

    def watch(self) -> None:
        for name in ("embedding", "norm", "softmax", "residual", "criterion", "qkv", "proj"):
            getattr(self, name).register_forward_hook(self._note(name))
            getattr(self, name).register_full_backward_hook(self._note(f"{name} backward"))

    def _note(self, name: str) -> Any:
        def hook(module: Any, inputs: Any, outputs: Any) -> None:
            tensors = [t for t in (*inputs, *(outputs if isinstance(outputs, tuple) else (outputs,))) if t is not None]
            self.seen.setdefault(name, set()).update(t.dtype for t in tensors)

        return hook

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = x.unsqueeze(0) + self.embedding(y).unsqueeze(0)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        attention = self.softmax(q @ k.transpose(1, 2) / 4)
        x = self.residual(x + self.proj(attention @ v))
        return self.criterion(self.out(x).squeeze(0), y)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
def test_softmax_norms_residuals_and_loss_see_no_fp8(precision: Any) -> None:
    dtypes: dict[str, dict[str, set[torch.dtype]]] = {}
    for name, setting in (("fp8", plugin(precision=precision)), ("reference", precision)):
        model = Attention()
        model.watch()
        if name == "reference" and precision == "16-mixed":
            continue  # Lightning has no fp16 on the CPU.
        trainer = fit(model, setting, max_steps=2)
        dtypes[name] = model.seen
        if name == "fp8":
            assert {"qkv", "proj"} <= set(trainer.precision_plugin.conversions[0].converted)
    compute = torch.float16 if precision == "16-mixed" else torch.bfloat16
    assert dtypes["fp8"]["softmax"] <= {compute, torch.float32}
    for seen in dtypes["fp8"].values():
        assert seen <= {compute, torch.float32, torch.int64}
    if "reference" in dtypes:
        assert dtypes["fp8"] == dtypes["reference"]


def test_bf16_true_makes_parameters_and_inputs_bf16() -> None:
    class Look(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert batch[0].dtype == torch.bfloat16 and batch[1].dtype == torch.int64
            assert torch.zeros(1).dtype == torch.bfloat16
            return super().training_step(batch, batch_idx)

    model = Look()
    trainer = fit(model, plugin(precision="bf16-true"), max_steps=3)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert trainer.precision_plugin.conversions[0].runtime.table.data.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32
    assert torch.stack(model.losses).isfinite().all()


def test_configure_model_makes_bf16_parameters_at_once() -> None:
    class Late(Net):
        def configure_model(self) -> None:
            self.late = nn.Linear(16, 16)
            self.dtype_at_birth = self.late.weight.dtype

    model = Late()
    make_trainer(plugin(precision="bf16-true")).validate(model, loader(), verbose=False)
    assert model.dtype_at_birth == torch.bfloat16


def test_converting_inside_configure_model_is_kept() -> None:
    class Inside(Net):
        def configure_model(self) -> None:
            self.trainer.precision_plugin.convert(self.body)

    model = Inside()
    trainer = fit(model, plugin(layers=LayerSelection(head=True)))
    (conversion,) = trainer.precision_plugin.conversions
    assert conversion.converted == ["0", "3"]
    assert type(model.head) is nn.Linear
    assert (fp8_state(trainer)["runtime"]["position"] == 5 % 3).all()


def test_a_region_without_autocast_runs_in_full_precision() -> None:
    class Region(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                self.inside = self.body[0](x.float())
                self.expected = F.linear(x.float(), self.body[0].weight, self.body[0].bias)
            return super().forward(x)

    model = Region()
    trainer = fit(model, max_steps=2)
    assert model.inside.dtype == torch.float32
    assert torch.equal(model.inside, model.expected)
    assert trainer.precision_plugin.conversions[0].converted == ["body.0", "body.3"]


def test_detect_anomaly() -> None:
    model = Net()
    fit(model, detect_anomaly=True)
    plain = Net()
    fit(plain)
    assert_same(model.losses, plain.losses)


def test_detect_anomaly_names_a_nan() -> None:
    class Bad(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (float("nan") if batch_idx == 1 else 1.0)

    with pytest.raises(RuntimeError, match="returned nan values"):
        fit(Bad(), detect_anomaly=True)


def test_a_training_step_never_waits_for_the_device() -> None:
    class Forbid(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            reads = func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
            # The CPU's own kernels may: there is nothing to wait for, and GPUs have others.
            if reads and not any("kernels/reference" in frame.filename for frame in traceback.extract_stack()):
                raise RuntimeError(f"{func} reads the device")
            return func(*args, **(kwargs or {}))

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            self.mode = Forbid()
            self.mode.__enter__()

        def on_train_batch_end(self, *args: Any) -> None:
            self.mode.__exit__(None, None, None)
            assert self.mode.calls > 50

        def on_exception(self, *args: Any) -> None:
            self.mode.__exit__(None, None, None)

    watch = Watch()
    for loss_scale in (None, 1024.0):
        fit(Net(), plugin(loss_scale=loss_scale), callbacks=[watch], gradient_clip_val=0.5, max_steps=4)
    # The check can fail: a dynamic loss scale and an optimizer that is not fused must read the device.
    with pytest.raises(RuntimeError, match="reads the device"):
        fit(Net("sgd"), plugin(loss_scale="dynamic"), callbacks=[Watch()], max_steps=4)


def test_step_with_no_growth_in_memory_of_the_state() -> None:
    model = Net()
    sizes = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            state = trainer.precision_plugin.conversions[0].state_dict()["runtime"]
            sizes.append(state["history"].numel() + state["table"]["data"].numel())

    fit(model, callbacks=[Look()], max_epochs=2)
    assert len(sizes) == 12 and len(set(sizes)) == 1


class ConvertsItself(Net):
    def configure_model(self) -> None:
        self.trainer.precision_plugin.convert(self)


def test_scales_are_fp32_where_a_model_converts_itself_in_true_bf16() -> None:
    model = ConvertsItself()
    trainer = fit(model, plugin(precision="bf16-true"))
    assert model.head.weight.dtype == torch.bfloat16
    state = fp8_state(trainer)["runtime"]
    assert state["table"]["data"].dtype == state["history"].dtype == torch.float32
