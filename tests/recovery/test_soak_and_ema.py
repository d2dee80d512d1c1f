from __future__ import annotations

import gc
import math
import statistics

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from recovery_models import Net, fit, make_data, make_loader, make_trainer, same_weights, test_loss
from torch.utils.data import DataLoader, Subset

from lightning_fp8 import FP8Precision
from lightning_fp8.callbacks._averages import Averages
from lightning_fp8.callbacks.ema import EMAOfAcceptedSteps
from lightning_fp8.callbacks.fault_injector import Fault, FaultInjector
from lightning_fp8.callbacks.recovery import SkipBatchRecovery
from lightning_fp8.recovery.faults import random_faults

STEPS = 1000
KINDS = ("batch", "activation", "gradient", "weight", "loss", "bit_flip")


def reachable_objects() -> int:
    gc.collect()
    return sum(1 for thing in gc.get_objects() if isinstance(thing, torch.Tensor))


class CountsTensors(FaultInjector):
    """Counts the live tensors now and again."""

    def __init__(self, faults) -> None:
        super().__init__(faults)
        self.counts: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if trainer.global_step % 100 == 0:
            self.counts.append(reachable_objects())


@pytest.mark.parametrize("optimizer", [pytest.param("adamw", marks=pytest.mark.slow), "adamw-fused"])
def test_a_thousand_steps_with_faults_at_two_percent(tmp_path, optimizer):
    loader = make_loader(4096, 32)
    model, _ = fit(tmp_path, model=Net(optimizer, dropout=0.0), loader=loader, max_steps=STEPS)
    clean = test_loss(model)
    # Bits flip where it shows at once: BatchNorm hides what grows before it.
    faults = random_faults(STEPS, 0.02, KINDS, layers=["net.4"], seed=11)
    injector = CountsTensors(faults)
    recovery = SkipBatchRecovery(window=32, warmup=16, snapshot_every=20, calm=5, rewinds=4, log=None)
    model, trainer = fit(
        tmp_path, [injector, recovery], model=Net(optimizer, dropout=0.0), loader=loader, max_steps=STEPS
    )
    assert trainer.global_step == STEPS and len(faults) > 10
    assert test_loss(model) <= clean * 1.01 + 1e-4, f"{test_loss(model)} against {clean}"
    assert injector.counts[-1] <= injector.counts[1] + 5, "memory grows"
    assert recovery.events.counts["rejected"] >= len([f for f in faults if f.kind != "loss"])


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
def test_one_nan_is_one_skip(tmp_path, optimizer):
    recovery = SkipBatchRecovery(window=32, warmup=16, log=None)
    fit(
        tmp_path, [FaultInjector([Fault("batch", 150)]), recovery], model=Net(optimizer), max_steps=400,
        plugins=[FP8Precision()],
    )  # fmt: skip
    assert dict(recovery.events.counts) == {"rejected": 1}


def averaged(tmp_path, callbacks, data, steps):
    model, _ = fit(
        tmp_path, callbacks, model=Net(schedule=False, dropout=0.0), loader=DataLoader(data, 16), max_steps=steps
    )
    return model.state_dict()


def test_the_average_is_that_of_accepted_steps(tmp_path):
    data = make_data(512)
    without = Subset(data, [i for i in range(512) if not 80 <= i < 96])
    expected = averaged(tmp_path, [EMAWeightAveraging(decay=0.9)], without, 25)
    faulty = [FaultInjector([Fault("batch", 5)]), SkipBatchRecovery(log=None)]
    own = averaged(tmp_path, [*faulty, EMAOfAcceptedSteps(decay=0.9)], data, 26)
    lightnings = averaged(tmp_path, [*faulty, EMAWeightAveraging(decay=0.9)], data, 26)
    assert all(torch.equal(own[key], expected[key]) for key in own)
    assert not all(torch.equal(lightnings[key], expected[key]) for key in own)


def test_a_module_that_knows_its_recovery_is_averaged(tmp_path):
    model, callback = Net(), SkipBatchRecovery(log=None)
    model.recovery = callback
    fit(tmp_path, [callback, EMAOfAcceptedSteps()], model=model, max_steps=3)
    assert callback.events.counts["rejected"] == 0


def test_the_average_wants_exact_recovery(tmp_path):
    with pytest.raises(MisconfigurationException, match="needs a SkipBatchRecovery"):
        fit(tmp_path, [EMAOfAcceptedSteps()])
    with pytest.raises(MisconfigurationException, match="mode='exact'"):
        fit(tmp_path, [SkipBatchRecovery(log=None), EMAOfAcceptedSteps()], model=Net("adamw-fused"))


def test_the_average_is_refused_for_modules_of_the_other_namespace(tmp_path):
    other = pytest.importorskip("pytorch_lightning")
    trainer = make_trainer(tmp_path, [SkipBatchRecovery(log=None), average := EMAOfAcceptedSteps()])
    with pytest.raises(MisconfigurationException, match=r"lightning\.pytorch"):
        average.setup(trainer, other.LightningModule(), "fit")


def test_a_checkpoint_of_an_average_is_guarded_too(tmp_path):
    every = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    recovery = SkipBatchRecovery(snapshot_every=5, rewinds=1, log=None)
    faults = [Fault("weight", 12, "net.0"), Fault("weight", 14, "net.0")]
    fit(
        tmp_path, [FaultInjector(faults), EMAOfAcceptedSteps(decay=0.5), recovery, every], max_steps=16,
        enable_checkpointing=True,
    )  # fmt: skip
    for path in tmp_path.glob("*step=*.ckpt"):
        state = torch.load(path, weights_only=True)
        for key in ("state_dict", "current_model_state"):
            assert all(value.isfinite().all() for value in state[key].values()), (path, key)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
@pytest.mark.parametrize("first", ["average", "recovery"])
@pytest.mark.parametrize("kind", ["weight", "bit_flip"])
def test_an_average_goes_back_with_the_weights(tmp_path, optimizer, first, kind):
    """A bad weight enters Lightning's own average after the step that is rejected for it."""
    average, recovery = EMAWeightAveraging(decay=0.9), SkipBatchRecovery(snapshot_every=5, log=None)
    callbacks = [average, recovery] if first == "average" else [recovery, average]
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=30)
    faults = FaultInjector([Fault(kind, 21, "net.4")])
    model, _ = fit(tmp_path, [faults, *callbacks, saver], model=Net(optimizer), max_steps=30, enable_checkpointing=True)
    assert recovery.events.counts["rewind"] == 1
    saved = torch.load(saver.best_model_path, weights_only=True)["state_dict"]
    for state in (saved, model.state_dict()):
        assert all(value.isfinite().all() and value.abs().max() < 1e3 for value in state.values())


def test_an_average_of_epochs_goes_back_too(tmp_path):
    callbacks = [StochasticWeightAveraging(1e-3, swa_epoch_start=1), SkipBatchRecovery(log=None)]
    model = Net(schedule=False)
    _, trainer = fit(tmp_path, callbacks, model=model, loader=make_loader(64), max_steps=-1, max_epochs=4)
    averages, snapshots = Averages(trainer), callbacks[1].snapshots
    good = {name: tensor.clone() for name, tensor in averages.live_state().items()}
    snapshots.capture()
    snapshots.promote()
    for tensor in averages.live_state().values():
        tensor.fill_(7)
    snapshots.restore()
    assert good["0.averaged"] > 0
    assert all(torch.equal(tensor, good[name]) for name, tensor in averages.live_state().items())
    averages.load_state_dict({name: tensor for name, tensor in good.items() if name != "0.averaged"})
    assert averages.live_state()["0.averaged"] == 0, "it had not begun"


@pytest.mark.parametrize("first", ["average", "recovery"])
@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_a_fit_that_ends_in_doubt_ends_with_its_average(tmp_path, first, kind):
    recovery = SkipBatchRecovery(snapshot_every=5, log=None)
    average = EMAWeightAveraging(decay=0.9) if kind == "ema" else StochasticWeightAveraging(1e-3, swa_epoch_start=1)
    callbacks = [average, recovery] if first == "average" else [recovery, average]
    faults = FaultInjector([Fault("batch", step) for step in (10, 11)])
    model = Net(schedule=False)
    model.net[1] = torch.nn.Identity()  # With BatchNorm, SWA ends otherwise.
    fit(tmp_path, [faults, *callbacks], model=model, loader=make_loader(64), max_steps=-1, max_epochs=3)
    assert recovery.events.recent[-1]["reason"] == "at the end of the fit"
    averages = average._average_model.parameters()
    assert all(map(torch.equal, model.parameters(), averages))


class BadAtTheEnd(FaultInjector):
    """Besides the faults, NaN in batches of the epoch in which SWA renews the statistics of BatchNorm."""

    def __init__(self, faults, batches) -> None:
        super().__init__(faults)
        self.batches = batches

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if trainer.current_epoch == 4 and batch_idx in self.batches:
            batch[0].fill_(math.nan)


def with_swa(tmp_path, optimizer, callbacks, *, fp8, validated):
    swa = StochasticWeightAveraging(1e-3, swa_epoch_start=2)
    plugins = [FP8Precision()] if fp8 else []
    seed_everything(7, verbose=False)
    model = Net(optimizer, schedule=False)
    trainer = make_trainer(tmp_path, [*callbacks, swa], plugins=plugins, max_steps=-1, max_epochs=4)
    trainer.fit(model, make_loader(64), make_loader(32) if validated else None)
    return model


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("validated", [False, True])
def test_the_statistics_that_an_average_is_given_at_the_end_stay(tmp_path, optimizer, fp8, validated):
    """In an epoch of its own, in which Lightning runs no backward."""
    recovery = SkipBatchRecovery(log=None)
    runs = [with_swa(tmp_path, optimizer, c, fp8=fp8, validated=validated) for c in ([], [recovery])]
    assert same_weights(*runs) and not recovery.events.recent
    assert runs[1].net[1].num_batches_tracked == 4


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
@pytest.mark.parametrize("validated", [False, True])
def test_bad_batches_of_that_epoch_leave_no_trace(tmp_path, optimizer, validated):
    recovery = SkipBatchRecovery(log=None)
    callbacks = [BadAtTheEnd([Fault("batch", step) for step in (14, 15)], [0, 3]), recovery]
    model = with_swa(tmp_path, optimizer, callbacks, fp8=True, validated=validated)
    assert [event["event"] for event in recovery.events.recent] == ["rejected", "rejected", "left_out"]
    assert recovery.events.recent[-1]["reason"].startswith("2 batches") and model.net[1].num_batches_tracked == 2
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_random_faults_are_the_same_for_the_same_seed():
    one = random_faults(500, 0.1, ["batch", "weight"], layers=["a", "b"], ranks=2, seed=3)
    assert repr(one) == repr(random_faults(500, 0.1, ["batch", "weight"], layers=["a", "b"], ranks=2, seed=3))
    assert 25 < len(one) < 80 and {f.rank for f in one} == {0, 1} and {f.kind for f in one} == {"batch", "weight"}
    assert repr(one) != repr(random_faults(500, 0.1, ["batch", "weight"], layers=["a", "b"], ranks=2, seed=4))
    assert statistics.fmean(math.isnan(f.value) for f in one) not in (0.0, 1.0)
    with pytest.raises(ValueError, match="rate"):
        random_faults(10, 2.0, ["batch"])
    with pytest.raises(ValueError, match="layers="):
        random_faults(10, 0.1, ["weight"])
