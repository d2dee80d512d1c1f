"""Models whose parameters join, change or are made while the run goes on."""

from __future__ import annotations

import math

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, ModelPruning
from recovery_models import MODES, NAN, OPTIMIZERS, Net, fit, make_loader, recovery, test_loss
from torch import nn

from lightning_fp8 import FP8Precision, LayerSelection
from lightning_fp8.callbacks.fault_injector import Fault, FaultInjector


class BackboneLast(Net):
    """Its first layer joins the optimizer in the second epoch, at step 8."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.backbone, self.net = self.net[:2], self.net[2:]

    def loss(self, batch):
        return nn.functional.mse_loss(self.net(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer]([p for p in self.parameters() if p.requires_grad])


class Unfreeze(BackboneFinetuning):
    def __init__(self) -> None:
        super().__init__(unfreeze_backbone_at_epoch=1)


@pytest.mark.parametrize("mode", MODES)
def test_layers_that_are_unfrozen_in_mid_run_are_judged(tmp_path, mode):
    callback = recovery()
    faults = [Fault("gradient", step, "backbone.0") for step in (8, 12)]
    model, _ = fit(
        tmp_path, [Unfreeze(), FaultInjector(faults), callback], model=BackboneLast(MODES[mode]),
        loader=make_loader(128), max_steps=20,
    )  # fmt: skip
    events = [(event["step"], event["layer"], event["action"]) for event in callback.events.recent]
    assert events == [(step, "backbone.0.weight", "skip") for step in (8, 12)]
    assert callback.guard.fast == (mode == "fast") and math.isfinite(test_loss(model))


@pytest.mark.parametrize("mode", MODES)
def test_a_rewind_to_before_layers_were_unfrozen(tmp_path, mode):
    """They stay unfrozen; the statistics of the fewer parameters' gradients are not those of all."""
    callback = recovery(snapshot_every=4, skips=0, fallbacks=0)
    model, trainer = fit(
        tmp_path, [Unfreeze(), FaultInjector([Fault("weight", 9, "net.4")]), callback],
        model=BackboneLast(MODES[mode]), loader=make_loader(128), max_steps=24,
    )  # fmt: skip
    (rewind,) = (event for event in callback.events.recent if event["event"] == "rewind")
    assert rewind["good_step"] <= 8 and math.isfinite(test_loss(model)) and trainer.global_step == 24
    assert len(trainer.optimizers[0].param_groups) == 2
    assert callback.guard.judges[0].statistics.count < 24 - 9


class Swaps(Net):
    """Another optimizer in the second epoch, from step 8 on."""

    def __init__(self, optimizer: str, way: str) -> None:
        super().__init__(optimizer)
        self.way = way

    def on_train_epoch_start(self):
        if self.current_epoch != 1:
            return
        if self.way == "set up again":
            self.trainer.strategy.setup_optimizers(self.trainer)
        else:
            self.trainer.optimizers = [OPTIMIZERS[self.optimizer.replace("adamw", "sgd")](self.parameters())]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["set up again", "another class"])
def test_an_optimizer_that_another_takes_the_place_of(tmp_path, mode, way):
    callback = recovery(snapshot_every=50)
    faults = FaultInjector([Fault("gradient", 12, "net.0"), Fault("weight", 16, "net.4")])
    model, trainer = fit(
        tmp_path, [faults, callback], model=Swaps(MODES[mode], way), loader=make_loader(128), max_steps=24, max_epochs=3
    )
    events = [(e["event"], e.get("action") or e.get("good_step")) for e in callback.events.recent]
    assert events[:2] == [("good_state_dropped", 0), ("rejected", "skip")]
    assert callback.events.recent[0]["reason"] == "the optimizers were replaced"
    assert ("rewind", 9) in events, "to what the new one has left in its first step"
    assert trainer.global_step == 24 and math.isfinite(test_loss(model))


class Lazy(Net):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.net[4] = nn.LazyLinear(16)


class NaNInWeight(pl.Callback):
    """Spoils the last layer's weight, whatever it is called by then."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            with torch.no_grad():
                next(p for name, p in pl_module.named_parameters() if "net.4" in name and p.ndim == 2)[0, 0] = NAN


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fp8", [False, True])
def test_a_rewind_to_before_weights_were_pruned(tmp_path, mode, fp8):
    model = Net(MODES[mode])
    start = {name: value.clone() for name, value in model.named_parameters()}

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if callback.events.counts["rewind"] and not hasattr(self, "seen"):
                self.seen = {n.replace("_orig", ""): value.clone() for n, value in pl_module.named_parameters()}

    callback, looks = recovery(snapshot_every=50), Looks()
    pruning = ModelPruning("l1_unstructured", parameters_to_prune=[(model.net[4], "weight")], amount=0.3)
    plugins = [FP8Precision(layers=LayerSelection())] if fp8 else []
    callbacks = [NaNInWeight(12), callback, pruning, looks]
    fit(tmp_path, callbacks, model=model, loader=make_loader(128), plugins=plugins, max_steps=24)
    events = [(event["event"], event.get("layer")) for event in callback.events.recent]
    assert events[:2] == [("rejected", "net.4.weight"), ("rewind", None)] and callback.events.counts["rewind"] == 1
    assert all(torch.equal(looks.seen[name], value) for name, value in start.items())
    assert math.isfinite(test_loss(model))


@pytest.mark.parametrize("mode", MODES)
def test_a_good_state_that_lacks_new_parameters_is_none(tmp_path, mode, caplog):
    class NormsWeight(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 5:
                nn.utils.parametrizations.weight_norm(pl_module.net[4])
                trainer.optimizers[0].add_param_group({"params": list(pl_module.net[4].parametrizations.parameters())})

    callback = recovery(snapshot_every=50)
    faults = [FaultInjector([Fault("batch", 8)]), NaNInWeight(20)]
    model = Net(MODES[mode], schedule=False)
    fit(tmp_path, [*faults, NormsWeight(), callback], model=model, max_steps=30)
    dropped, _, _, rewind = callback.events.recent[:4]
    assert (dropped["event"], rewind["event"]) == ("good_state_dropped", "rewind")
    assert callback.events.counts["rewind"] == callback.events.counts["good_state_dropped"] == 1
    assert dropped["layers"] == [f"net.4.parametrizations.weight.original{index}" for index in range(2)]
    assert dropped["good_step"] == 0 and 8 < rewind["good_step"] < 12, "the next good step gives a state again"
    assert "no state to go back to" in caplog.text and math.isfinite(test_loss(model))


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_the_first_batch_makes(tmp_path, mode):
    """What is gone back to has all of them."""
    callback = recovery(skips=0, fallbacks=0, snapshot_every=100)
    model, trainer = fit(
        tmp_path, [FaultInjector([Fault("weight", 6, "net.0")]), callback], model=Lazy(MODES[mode]), max_steps=12
    )
    (rewind,) = (event for event in callback.events.recent if event["event"] == "rewind")
    assert rewind["good_step"] == 1 and math.isfinite(test_loss(model)) and trainer.global_step == 12


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_save_before_the_first_batch_makes_the_weights(tmp_path, weights_only):
    class Saves(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 0:
                trainer.save_checkpoint(tmp_path / "first.ckpt", weights_only=weights_only)

    model = Net()
    model.net = nn.Sequential(nn.LazyLinear(16))
    fit(tmp_path, [recovery(), Saves()], model=model, max_steps=2)
    assert (tmp_path / "first.ckpt").exists()


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_statistics_that_a_bad_first_batch_makes(tmp_path, mode, affine):
    """And a layer that no batch makes is in nobody's way."""
    model = Net(MODES[mode])
    model.net[1], model.unused = nn.LazyBatchNorm1d(affine=affine), nn.LazyLinear(3)
    callback = recovery(skips=1, fallbacks=0, snapshot_every=2)
    faults = FaultInjector([Fault("batch", 0), Fault("weight", 6, "net.0")])
    fit(tmp_path, [faults, callback], model=model, max_steps=9)
    rewind = next(event for event in callback.events.recent if event["event"] == "rewind")
    assert model.net[1].num_batches_tracked == rewind["good_step"] - 1 + 9 - rewind["step"]
    assert rewind["good_step"] >= 2 and math.isfinite(test_loss(model))
