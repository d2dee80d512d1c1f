"""The faults that can be planted, and what cannot be."""

from __future__ import annotations

import pytest
import torch
from recovery_models import Net, fit, make_loader, make_trainer, recovery, rejected
from torch import nn

from lightning_fp8 import FP8Precision, LayerSelection, convert_model
from lightning_fp8.callbacks.fault_injector import Fault, FaultInjector


def test_the_injector_refuses_what_it_cannot_plant(tmp_path):
    with pytest.raises(ValueError, match=r"no layer 'nope'.*net\.0"):
        fit(tmp_path, [FaultInjector([Fault("weight", 0, "nope")])], max_steps=1)
    with pytest.raises(ValueError, match="ranks"):
        fit(tmp_path, [FaultInjector([Fault("batch", 0, rank=3)])], max_steps=1)
    with pytest.raises(ValueError, match="name it"):
        Fault("weight", 0)
    with pytest.raises(ValueError, match="no fault"):
        FaultInjector([{"kind": "fire", "step": 0}])
    with pytest.raises(ValueError, match="FP8"):
        fit(tmp_path, [FaultInjector([Fault("amax", 0, "net.0")])], max_steps=1)


class Compiled(Net):
    """Converted by hand before it is compiled, so that it does not lie in the module itself."""

    def __init__(self) -> None:
        super().__init__()
        net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.net = torch.compile(convert_model(net, layers=LayerSelection()), backend="eager")


@pytest.mark.parametrize("name", ["net.0", "net._orig_mod.0"])
@pytest.mark.parametrize("kind", ["amax", "weight"])
def test_a_compiled_layer_goes_by_both_its_names(tmp_path, name, kind):
    callback = recovery(skips=9, warmup=2)
    fault = Fault(kind, 8, name, **({"role": "input"} if kind == "amax" else {}))
    fit(tmp_path, [FaultInjector([fault]), callback], model=Compiled(), plugins=[FP8Precision()], max_steps=9)
    (event,) = rejected(callback)
    assert event["step"] == 8
    if kind == "amax":
        assert (event["verdict"], event["layer"], event["role"]) == ("amax_jump", "net.0", "input")


def test_faults_that_come_too_late_are_told_of(tmp_path):
    faults = [Fault("batch", 1), Fault("loss", 2), Fault("loss", 3), Fault("weight", 9, "net.0")]
    trainer = make_trainer(tmp_path, [FaultInjector(faults), recovery()], max_steps=3)
    with pytest.warns(UserWarning, match=r"2 faults were not planted.*: loss at step 3, weight at step 9\."):
        trainer.fit(Net(), make_loader())


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ([{"kind": "batch", "step": 1, "at": 2}], r"no field at: choose among kind, step"),
        ([{"kind": "batch"}], "lacks step"),
        (["batch"], "a mapping with its fields, got 'batch'"),
        ({"kind": "batch", "step": 1}, "a list of faults"),
        ([{"kind": "batch", "step": "1"}], r"step must be a whole number \(int\), got '1'"),
    ],
)
def test_the_injector_names_wrong_fields(faults, words):
    with pytest.raises((ValueError, TypeError), match=words):
        FaultInjector(faults)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "loss", "step": 1, "factor": "10"}, "factor must be a number"),
        ({"kind": "loss", "step": 1.0}, "step must be a whole number"),
        ({"kind": "loss", "step": -1}, "step must be at least 0"),
        ({"kind": "batch", "step": 1, "value": None}, "value must be a number, got None"),
        ({"kind": "batch", "step": 1, "rank": "0"}, "rank must be a whole number"),
        ({"kind": "bit_flip", "step": 1, "layer": "net.0", "bit": -1}, "bit must be at least 0"),
        ({"kind": "amax", "step": 1, "layer": "net.0", "role": "inputs"}, "no role 'inputs': choose among input"),
    ],
)
def test_a_fault_names_its_own_wrong_fields(fields, words):
    with pytest.raises((ValueError, TypeError), match=words):
        Fault(**fields)
