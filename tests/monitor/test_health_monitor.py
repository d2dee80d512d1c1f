"""FP8HealthMonitor in the Trainer: faults are named exactly, clean runs report nothing."""

from __future__ import annotations

import math
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from monitor_models import EXECUTED, Fault, Net, Plant, batches, make_trainer, precision
from torch import Tensor

from lightning_fp8.callbacks.amax_monitor import AmaxMonitor
from lightning_fp8.callbacks.health_monitor import FP8HealthError, FP8HealthMonitor
from lightning_fp8.callbacks.recovery import SkipBatchRecovery
from lightning_fp8.health import HealthEvent
from lightning_fp8.recipes import ROLES

pytestmark = pytest.mark.filterwarnings("ignore")

FIRST, MIDDLE, LAST = "blocks.0", "late", "head"


def fit(*callbacks: pl.Callback, steps: int, plugin: Any = None, model: Net | None = None, **kwargs: Any) -> pl.Trainer:
    trainer = make_trainer(list(callbacks), steps, plugin, **kwargs)
    trainer.fit(model or Net(), batches(steps * trainer.accumulate_grad_batches))
    return trainer


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [("delayed", "native"), ("tensorwise", "native"), ("rowwise", "torchao"), ("tensorwise", "torchao"), (None, "")],
)
def test_every_planted_fault_is_one_event_and_clean_steps_are_none(recipe: str | None, backend: str) -> None:
    """Each role, forward and backward, in the first, a middle and the last layer; NaN and Inf; clean steps between."""
    cases = product((math.nan, math.inf), ROLES, (FIRST, MIDDLE, LAST))
    faults = [Fault(2 + 2 * n, layer, role, value) for n, (value, role, layer) in enumerate(cases)]
    monitor = FP8HealthMonitor()
    plugin = precision(recipe, backend=needs(backend)) if recipe else None
    fit(monitor, Plant(*faults), steps=faults[-1].step + 3, plugin=plugin)
    told = [(e.kind, e.step, e.layer, e.role, e.ranks) for e in monitor.events]
    assert told == [("nonfinite", f.step, f.layer, f.role, (0,)) for f in faults]
    for event, fault in zip(monitor.events, faults, strict=True):
        assert event.direction == ("backward" if fault.role == "grad_output" else "forward")
        if fault.value == math.inf:
            assert event.amax == math.inf


def test_what_a_fault_leaves_behind_is_the_same_event() -> None:
    monitor = FP8HealthMonitor()
    fit(monitor, Plant(Fault(3, MIDDLE, "input", math.nan), keep_gradients=True), steps=8, plugin=precision())
    (event,) = monitor.events
    assert (event.step, event.layer, event.role, event.steps) == (3, MIDDLE, "input", 5)


def test_another_fit_is_another_event() -> None:
    monitor, model = FP8HealthMonitor(), Net()
    plant = Plant(Fault(1, MIDDLE, "input", math.nan), keep_gradients=True)
    trainer = make_trainer([monitor, plant], -1, precision(), max_epochs=1)
    trainer.fit(model, batches(3))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, batches(3))
    # The weights are spoilt by now.
    assert [(event.step, event.steps) for event in monitor.events] == [(1, 2), (3, 3)]
    ruined = Net()
    torch.nn.init.constant_(ruined.late.weight, math.nan)
    fit(monitor, steps=1, plugin=precision(), model=ruined)
    assert [(event.step, event.layer, event.role) for event in monitor.events] == [(0, MIDDLE, "weight")]


@pytest.mark.parametrize("recipe", ["delayed", None])
def test_what_recovery_rejects_never_enters(recipe: str | None) -> None:
    """With FP8 layers and without."""
    monitor, recovery = FP8HealthMonitor(), SkipBatchRecovery(skip_batches=[(0, 3)], log=None)
    fit(monitor, recovery, steps=6, plugin=precision(recipe) if recipe else None)
    assert monitor._health is not None and (monitor._health.count == 5).all()


def needs(backend: str) -> str:
    if backend == "torchao":
        pytest.importorskip("torchao")
    return backend


@pytest.mark.parametrize(("role", "layer"), [("input", FIRST), ("weight", MIDDLE), ("grad_output", LAST)])
@pytest.mark.parametrize(("backend", "recipe"), [("native", "delayed"), ("torchao", "rowwise")])
def test_a_jump_is_reported(role: str, layer: str, backend: str, recipe: str) -> None:
    monitor = FP8HealthMonitor()
    plant = Plant(Fault(15, layer, role, factor=4.0))
    fit(monitor, plant, steps=18, plugin=precision(recipe, backend=needs(backend)))
    (event,) = [event for event in monitor.events if event.kind == "spike"]
    assert (event.step, event.layer, event.role) == (15, layer, role)
    assert event.amax == pytest.approx(4 * event.reference, rel=0.05)


@pytest.mark.parametrize(("backend", "recipe"), [("native", "delayed"), ("torchao", "rowwise")])
def test_a_clean_run_and_a_slow_drift_report_nothing(backend: str, recipe: str) -> None:
    class Drift(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
            batch.mul_(1.03**index)

    monitor = FP8HealthMonitor("raise")
    fit(Drift(), monitor, steps=40, plugin=precision(recipe, backend=needs(backend)), model=Net(lr=0.0))
    assert monitor.events == []
    health = monitor._health
    assert health is not None and (health.count == 40).all()
    first = next(iter(batches(1))).abs().max()
    row = monitor._names.index(FIRST)
    assert health.ring[row, 0].max() > 3 * first  # It did drift.


def test_the_order_of_execution_is_seen() -> None:
    monitor = FP8HealthMonitor()
    trainer = make_trainer([monitor], 2)
    net = Net()
    positions: list[tuple[str, int]] = []
    net.on_train_end = lambda: positions.extend(  # type: ignore[method-assign]
        zip(monitor.telemetry.names, monitor.telemetry.positions, strict=True)
    )
    trainer.fit(net, batches(2))
    assert tuple(sorted(dict(positions), key=dict(positions).__getitem__)) == EXECUTED


def test_losses_are_the_same_with_and_without() -> None:
    def losses(*callbacks: pl.Callback) -> list[float]:
        values: list[float] = []

        class Keep(pl.Callback):
            def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, i: int) -> None:
                values.append(outputs["loss"].item())

        fit(*callbacks, Keep(), steps=6, plugin=precision(), model=Net(lr=0.1))
        return values

    assert losses(FP8HealthMonitor()) == losses()


def test_raise_names_the_layer_a_step_later() -> None:
    monitor = FP8HealthMonitor({"nonfinite": "raise"})
    with pytest.raises(
        FP8HealthError, match=r"Step 4: NaN first seen in the weight of 'late' \(forward, rank 0\)"
    ) as e:
        fit(monitor, Plant(Fault(4, MIDDLE, "weight", math.nan)), steps=20, plugin=precision())
    assert e.value.event == monitor.events[0]
    monitor = FP8HealthMonitor("raise")
    with pytest.raises(FP8HealthError):  # In the very last step too.
        fit(monitor, Plant(Fault(4, MIDDLE, "weight", math.nan)), steps=5, plugin=precision())


def test_warn_log_and_ignore(caplog: pytest.LogCaptureFixture) -> None:
    fault = Fault(3, FIRST, "input", math.nan)
    with pytest.warns(UserWarning, match="NaN first seen in the input of 'blocks.0'"):
        fit(FP8HealthMonitor(), Plant(fault), steps=5)
    for action, lines in (("log", 1), ("ignore", 0)):
        caplog.clear()
        with caplog.at_level("INFO", "lightning_fp8"), warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*first seen.*")
            monitor = FP8HealthMonitor(action)  # type: ignore[arg-type]
            fit(monitor, Plant(fault), steps=5)
        assert len([r for r in caplog.records if "first seen" in r.getMessage()]) == lines
        assert len(monitor.events) == 1


@pytest.mark.parametrize("recipe", ["delayed", None])
def test_an_expert_that_seldom_gets_tokens_is_well(recipe: str | None) -> None:
    class Expert(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self(batch[: 0 if batch_idx % 4 else None]).float().square().sum()

    monitor = FP8HealthMonitor("raise", patience=3)
    fit(monitor, steps=70, model=Expert(lr=0.0), plugin=precision(recipe) if recipe else None)
    assert monitor.events == []


def test_recover_needs_somebody_after_it_who_rejects() -> None:
    with pytest.raises(MisconfigurationException, match="SkipBatchRecovery after it"):
        fit(FP8HealthMonitor("recover"), steps=1)


def test_recover_hands_over_the_verdict_before_the_step() -> None:
    class Rejecter(pl.Callback):
        def __init__(self) -> None:
            self.flags: list[bool] = []

        def reject_where(self, flag: torch.Tensor) -> None:
            self.flags.append(bool(flag))

    rejecter = Rejecter()
    monitor = FP8HealthMonitor({"nonfinite": "recover", "spike": "ignore"})
    fit(monitor, rejecter, Plant(Fault(2, FIRST, "grad_output", math.nan)), steps=4)
    assert rejecter.flags == [False, False, True, False]


@pytest.mark.parametrize(
    ("action", "named"),
    [("shout", "'shout'"), (5, "5"), ({"noise": "warn"}, "noise"), ({"noise": "warn", 3: "warn"}, "3")],
)
def test_unknown_kinds_and_actions_are_refused(action: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        FP8HealthMonitor(action)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"progress_bar": "false"}, "progress_bar must be true or false, got 'false'"),
        ({"window": 4.0}, "window must be a whole number"),
    ],
)
def test_settings_of_another_type_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(TypeError, match=named):
        FP8HealthMonitor(**settings)


def test_steps_that_recovery_takes_back_do_not_count() -> None:
    class TakeBack(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
            if trainer.global_step % 2:
                optimizer.zero_grad(set_to_none=True)
                for conversion in trainer.precision_plugin.conversions:  # type: ignore[attr-defined]
                    conversion.runtime.discard()

    monitor = FP8HealthMonitor()
    fit(
        TakeBack(), monitor, steps=10, plugin=precision()
    )  # Listed before the monitor, which sees the step all the same.
    assert monitor._health is not None and (monitor._health.count == 5).all()


@pytest.mark.parametrize("monitor_first", [True, False])
@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_beside_recovery_every_fault_is_one_event_and_one_skip(monitor_first: bool, mode: Any) -> None:
    class Fused(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-4, fused=True)

    faults = [Fault(5, MIDDLE, "input", math.nan), Fault(8, FIRST, "grad_output", math.inf)]
    monitor = FP8HealthMonitor("ignore")
    recovery = SkipBatchRecovery(mode=mode, rewinds=0, snapshot_every=None, log=None)
    pair = [monitor, recovery] if monitor_first else [recovery, monitor]
    fit(*pair, Plant(*faults), steps=12, plugin=precision(), model=Fused())
    assert [(e.step, e.layer, e.role) for e in monitor.events] == [(f.step, f.layer, f.role) for f in faults]
    assert recovery.events.counts["rejected"] == 2
    assert monitor._health is not None and (monitor._health.count[:, 0] == 10).all()


@pytest.mark.parametrize("monitor_first", [True, False])
@pytest.mark.parametrize("how", ["skip_batches", "reject"])
def test_data_that_is_left_out_is_no_event(how: str, monitor_first: bool) -> None:
    """NaN in the batch itself, whichever way it is left out; what the weights are is still seen."""
    monitor = FP8HealthMonitor("raise")
    recovery = SkipBatchRecovery(log=None, skip_batches=[(0, 4)] if how == "skip_batches" else ())

    class Rejects(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch * (math.nan if batch_idx == 4 else 1.0), batch_idx)
            return recovery.reject(loss) if how == "reject" and batch_idx == 4 else loss

    pair = [monitor, recovery] if monitor_first else [recovery, monitor]
    assert fit(*pair, steps=7, plugin=precision(), model=Rejects()).global_step == 7
    assert not monitor.events and recovery.events.counts["rejected"] == 1


@pytest.mark.parametrize("monitor_first", [True, False])
def test_a_fault_of_another_optimizer_in_the_batch_is_seen(monitor_first: bool) -> None:
    recovery, monitor = SkipBatchRecovery(log=None), FP8HealthMonitor()

    class Two(Net):
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            for number, optimizer in enumerate(self.optimizers()):
                loss = self(batch).float().square().mean()
                if batch_idx == 4:
                    loss = loss * math.nan if number else recovery.reject(loss)
                self.manual_backward(loss)
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            halves = [*self.late.parameters(), *self.head.parameters()], self.blocks.parameters()
            return [torch.optim.SGD(half, lr=self.lr) for half in halves]

    pair = [monitor, recovery] if monitor_first else [recovery, monitor]
    trainer = make_trainer(pair, -1, precision(), max_epochs=1)
    trainer.fit(Two(), batches(7))
    assert [(event.kind, event.role) for event in monitor.events] == [("nonfinite", "grad_output")]


@pytest.mark.parametrize("monitor_first", [True, False])
def test_what_the_user_rejects_is_no_event(monitor_first: bool) -> None:
    """recovery.reject(loss) makes gradients NaN by the user's own word; a fault in another step is one all the same."""
    recovery, monitor, amaxes = SkipBatchRecovery(log=None), FP8HealthMonitor(), AmaxMonitor(every_n_steps=1)

    class Rejects(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return recovery.reject(loss) if batch_idx == 4 else loss

    pair = [monitor, amaxes, recovery] if monitor_first else [recovery, monitor, amaxes]
    fault = Plant(Fault(7, MIDDLE, "grad_output", math.nan))
    trainer = fit(fault, *pair, steps=9, plugin=precision(), model=Rejects())
    assert trainer.global_step == 9
    assert [(event.kind, event.step, event.layer) for event in monitor.events] == [("nonfinite", 7, MIDDLE)]
    assert [event["step"] for event in recovery.events.recent if event["event"] == "rejected"] == [4, 7]


def test_evaluation_sanity_checks_and_accumulation_do_not_disturb() -> None:
    monitor = FP8HealthMonitor()
    trainer = make_trainer(
        [monitor], 12, precision(), accumulate_grad_batches=2, val_check_interval=4, num_sanity_val_steps=2
    )
    trainer.fit(Net(), batches(24), batches(2))
    assert monitor.events == []
    assert monitor._health is not None and (monitor._health.count == 12).all()


def test_several_optimizers_count_once_a_batch() -> None:
    class Two(Net):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.blocks.parameters(), 1e-4), torch.optim.SGD(self.late.parameters(), 1e-4)]

    net = Two()
    net.automatic_optimization = False
    monitor = FP8HealthMonitor()
    trainer = make_trainer([monitor, Plant(Fault(8, MIDDLE, "grad_output", math.nan))], 20, precision())
    trainer.fit(net, batches(10))
    assert [(e.layer, e.role) for e in monitor.events] == [(MIDDLE, "grad_output")]
    assert monitor._health is not None and monitor._health.count.max() == 10


@pytest.mark.parametrize(("layer", "role"), [(FIRST, "input"), (MIDDLE, "weight"), (LAST, "grad_output")])
def test_backwards_that_pass_the_trainer_by_are_seen(layer: str, role: str) -> None:
    """Two optimizers, each with a backward of its own that is called on the loss."""

    class Two(Net):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
            first, second = self.optimizers()
            hidden = self.blocks[1](torch.relu(self.blocks[0](batch)))
            hidden.square().mean().backward()
            first.step()
            self.head(self.late(hidden.detach())).square().mean().backward()
            second.step()
            first.zero_grad(), second.zero_grad()

        def configure_optimizers(self) -> Any:
            late = [*self.late.parameters(), *self.head.parameters()]
            return [torch.optim.SGD(self.blocks.parameters(), 1e-4), torch.optim.SGD(late, 1e-4)]

    net = Two()
    net.automatic_optimization = False
    monitor = FP8HealthMonitor()
    trainer = make_trainer([monitor, Plant(Fault(8, layer, role, math.nan))], 24, precision())
    trainer.fit(net, batches(12))
    assert [(e.step, e.layer, e.role) for e in monitor.events] == [(8, layer, role)]
    assert monitor._health is not None and monitor._health.count.max() == 12


class EverySecond(Net):
    """The closure alone on every other batch: Lightning counts a step there as well."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


@pytest.mark.parametrize("layer", [MIDDLE, LAST])  # In FP8, and in high precision.
@pytest.mark.parametrize("planted", [4, 5])
def test_batches_without_an_optimizer_step_are_judged_with_the_next_one(planted: int, layer: str) -> None:
    monitor, amaxes = FP8HealthMonitor(), AmaxMonitor(every_n_steps=1)
    plant = Plant(Fault(planted, layer, "input", math.nan))
    fit(monitor, amaxes, plant, steps=10, plugin=precision(), model=EverySecond())
    assert [(event.step, event.layer, event.role) for event in monitor.events] == [(5, layer, "input")]
    assert monitor._health is not None and monitor._health.count[:, ROLES.index("weight")].tolist() == [5] * 4
    assert amaxes.history.steps.tolist() == list(range(10))


def test_resuming_goes_on_with_the_same_history(tmp_path: Path) -> None:
    def run(steps: int, path: Path | None = None) -> FP8HealthMonitor:
        monitor = FP8HealthMonitor()
        plant = Plant(Fault(3, FIRST, "input", math.nan), Fault(12, MIDDLE, "weight", factor=4.0))
        save = ModelCheckpoint(tmp_path, filename=f"{steps}", save_last=False, every_n_train_steps=6, save_top_k=-1)
        trainer = make_trainer([monitor, plant, save], steps, precision(), enable_checkpointing=True)
        trainer.fit(Net(), batches(20), ckpt_path=path)
        return monitor

    whole = run(14)
    run(6)
    resumed = run(14, tmp_path / "6.ckpt")
    assert [event.message() for event in resumed.events] == [event.message() for event in whole.events]
    assert [event.kind for event in resumed.events] == ["nonfinite", "spike"]
    for name, values in whole.state_dict()["health"].items():
        assert torch.equal(values, resumed.state_dict()["health"][name]), name


@pytest.mark.parametrize("planted", [False, True])
def test_gradients_under_another_loss_scale_are_no_spikes(tmp_path: Path, planted: bool) -> None:
    """Their history follows the ratio, so that a spike of the run that goes on is seen as before."""

    def run(steps: int, loss_scale: float, path: Path | None = None) -> FP8HealthMonitor:
        monitor = FP8HealthMonitor()
        plant = Plant(*[Fault(14, MIDDLE, "grad_output", factor=50.0)] * planted)
        save = ModelCheckpoint(tmp_path / str(loss_scale), filename="{step}", every_n_train_steps=12)
        plugin = precision(loss_scale=loss_scale)
        trainer = make_trainer([monitor, plant, save], steps, plugin, enable_checkpointing=True)
        trainer.fit(Net(), batches(20), ckpt_path=path)
        return monitor

    whole = run(16, 1.0)
    run(12, 1024.0)
    resumed = run(16, 1.0, tmp_path / "1024.0" / "step=12.ckpt")
    assert [event.message() for event in resumed.events] == [event.message() for event in whole.events]
    assert {event.kind for event in resumed.events} == ({"spike"} if planted else set())
    for name, values in whole.state_dict()["health"].items():
        other = resumed.state_dict()["health"][name]
        torch.testing.assert_close(values, other, msg=lambda message, name=name: f"{name}: {message}")


def test_the_progress_bar_shows_the_worst_layer() -> None:
    descriptions: list[str] = []

    class Bar(TQDMProgressBar):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            descriptions.append(self.train_progress_bar.desc)

    bar = Bar()
    fit(FP8HealthMonitor(), bar, steps=4, plugin=precision(), enable_progress_bar=True)
    assert "fp8_headroom" in bar.trainer.progress_bar_metrics
    assert any(f"{name}/{role}" in descriptions[-1] for name in EXECUTED for role in ROLES)


def test_the_progress_bar_shows_skipped_steps() -> None:
    recovery = SkipBatchRecovery(rewinds=0, snapshot_every=None, log=None)
    plant = Plant(Fault(2, MIDDLE, "input", math.nan), keep_gradients=True)
    trainer = fit(FP8HealthMonitor("ignore"), recovery, plant, steps=6, plugin=precision(), enable_progress_bar=True)
    assert trainer.progress_bar_metrics["skipped"] == 1


def test_events_are_bounded() -> None:
    class Troubled(Net):
        def on_train_start(self) -> None:
            monitor.events = [HealthEvent("spike", 0, LAST, "input", (0,), 4.0, 1.0)] * 1000

    monitor = FP8HealthMonitor()
    fit(monitor, Plant(Fault(1, FIRST, "input", math.nan)), steps=3, model=Troubled())
    assert len(monitor.events) == 1000 and monitor.events[-1].layer == FIRST
