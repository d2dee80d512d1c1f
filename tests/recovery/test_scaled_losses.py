"""Recovery under loss scaling, constant and dynamic."""

from __future__ import annotations

import math

import lightning.pytorch as pl
import pytest
from recovery_models import Net, fit, fp16, recovery, rejected, test_loss

from lightning_fp8 import FP8Precision
from lightning_fp8.callbacks.fault_injector import Fault, FaultInjector


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "fp8-16", "fp8-scaled"])
def test_under_loss_scaling(tmp_path, precision):
    plugins = {
        "16-mixed": lambda: fp16(init_scale=256.0),
        "bf16-mixed": lambda: pl.plugins.MixedPrecision("bf16-mixed", "cpu"),
        "fp8-16": lambda: FP8Precision(precision="16-mixed"),
        "fp8-scaled": lambda: FP8Precision(loss_scale=1024.0),
    }
    callback = recovery()
    # A larger factor would overflow in fp16 when scaled: that the scaler answers for.
    faults = [Fault("batch", 20), Fault("loss", 30, factor=8.0)]
    model, _ = fit(
        tmp_path, [FaultInjector(faults), callback], model=Net("adamw-fused"), plugins=[plugins[precision]()]
    )
    steps = [event["step"] for event in rejected(callback) if event["action"] == "skip"]
    assert steps == [20, 30]
    assert callback.guard.fast == (precision in ("bf16-mixed", "fp8-scaled"))
    assert math.isfinite(test_loss(model))
    assert rejected(callback)[-1]["loss"] == pytest.approx(model.losses[30] * 8, rel=0.02)


def test_overflow_of_the_loss_scale_is_the_scalers_affair(tmp_path):
    callback = recovery(skips=1, rewinds=0, snapshot_every=None)
    model, _ = fit(tmp_path, [callback], plugins=[fp16(init_scale=2.0**40)])
    actions = [event["action"] for event in rejected(callback)]
    assert len(actions) > 3 and set(actions) == {"loss_scale_lowered"} and math.isfinite(test_loss(model))
