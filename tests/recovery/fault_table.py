"""Faults, and the same short run with and without recovery, on one device and under DDP."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from recovery_models import fit, make_loader, test_loss
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_fp8 import DelayedScaling, FP8Precision, LayerSelection
from lightning_fp8.callbacks.fault_injector import Fault, FaultInjector
from lightning_fp8.callbacks.recovery import SkipBatchRecovery

STEPS = 100
NAN, INF = math.nan, math.inf


class Deep(pl.LightningModule):
    """Three linear layers; with FP8 the first two are converted. Converges within the steps of a test."""

    def __init__(self, optimizer: str = "adamw", seed: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Identity(), nn.Linear(32, 32), nn.Linear(32, 16))
        self.optimizer = optimizer

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(self.parameters(), 0.4, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), 2e-2, fused=self.optimizer == "adamw-fused")
        # Flat at the end, where a few steps more or fewer make no difference.
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.001, STEPS * 6 // 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@dataclass(frozen=True)
class Scenario:
    """Faults and what the event log must say of the first one.

    Attributes:
        faults: given the rank they strike (None: all).
        verdict: what, where and role of the first event; None: anything.
        ranks: whether the log can tell on which rank it was.
        fp8: the recipe, if layers run in FP8.
        optimizer: of the model.
        settings: of the Trainer.
    """

    faults: Callable[[int | None], list[Fault]]
    verdict: tuple[str, str, str]
    ranks: bool = True
    fp8: DelayedScaling | None = None
    optimizer: str = "adamw"
    settings: dict[str, Any] = field(default_factory=dict)


def one(kind: Any, step: int = 40, layer: str | None = None, **more: Any) -> Callable[[int | None], list[Fault]]:
    return lambda rank: [Fault(kind, step, layer, rank, **more)]


def many(kind: Any, steps: range, layer: str | None = None, **more: Any) -> Callable[[int | None], list[Fault]]:
    return lambda rank: [Fault(kind, step, layer, rank, **more) for step in steps]


BATCH, LOSS = ("nonfinite", "batch", "batch"), ("nonfinite", "loss", "loss")


def gradient(layer: str) -> tuple[str, str, str]:
    return ("nonfinite", f"{layer}.weight", "gradient")


def weight(layer: str) -> tuple[str, str, str]:
    return ("nonfinite", f"{layer}.weight", "weight")


SCENARIOS: dict[str, Scenario] = {
    "batch-nan": Scenario(one("batch"), BATCH),
    "batch-inf": Scenario(one("batch", value=INF), BATCH),
    "batch-nan-fast": Scenario(one("batch"), BATCH, optimizer="adamw-fused"),
    "batch-nan-first-step": Scenario(one("batch", 0), BATCH),
    "batch-nan-first-step-sgd": Scenario(one("batch", 0), BATCH, optimizer="sgd"),
    "batch-nan-last-step": Scenario(one("batch", STEPS - 1), BATCH, optimizer="adamw-fused"),
    "batch-nan-three-in-a-row": Scenario(many("batch", range(40, 43)), BATCH),
    "batch-nan-now-and-again": Scenario(many("batch", range(10, 100, 10)), BATCH),
    "batch-nan-now-and-again-fast": Scenario(many("batch", range(62, 100, 9)), BATCH, optimizer="adamw-fused"),
    "batch-nan-accumulated": Scenario(one("batch", 20), BATCH, settings={"accumulate_grad_batches": 2}),
    "batch-nan-fp8": Scenario(one("batch"), BATCH, fp8=DelayedScaling()),
    "activation-nan": Scenario(one("activation", layer="net.0"), LOSS),
    "activation-inf": Scenario(one("activation", layer="net.2", value=INF), LOSS, optimizer="adamw-fused"),
    "activation-nan-fp8": Scenario(
        one("activation", layer="net.0"), ("nonfinite", "net.2", "input"), fp8=DelayedScaling()
    ),
    "activation-inf-fp8-fast": Scenario(
        one("activation", layer="net.1", value=INF),
        ("nonfinite", "net.2", "input"),
        fp8=DelayedScaling(),
        optimizer="adamw-fused",
    ),
    "gradient-nan": Scenario(one("gradient", layer="net.2"), gradient("net.2"), ranks=False),
    "gradient-inf": Scenario(one("gradient", layer="net.0", value=INF), gradient("net.0"), ranks=False),
    "gradient-nan-clipped": Scenario(
        one("gradient", layer="net.3"), gradient("net.3"), ranks=False, settings={"gradient_clip_val": 1.0}
    ),
    "gradient-nan-fp8-fast": Scenario(
        one("gradient", layer="net.0"), gradient("net.0"), ranks=False, fp8=DelayedScaling(), optimizer="adamw-fused"
    ),
    "weight-nan": Scenario(one("weight", layer="net.2"), weight("net.2")),
    "weight-inf-fast": Scenario(one("weight", layer="net.0", value=INF), weight("net.0"), optimizer="adamw-fused"),
    "weight-nan-fp8": Scenario(one("weight", layer="net.2"), weight("net.2"), fp8=DelayedScaling()),
    "bit-flip": Scenario(one("bit_flip", layer="net.3"), weight("net.3")),
    "bit-flip-fast": Scenario(one("bit_flip", layer="net.2"), weight("net.2"), optimizer="adamw-fused"),
    "bit-flip-fp8": Scenario(one("bit_flip", layer="net.2"), weight("net.2"), fp8=DelayedScaling()),
    "loss-x10": Scenario(many("loss", range(40, 43)), ("spike", "loss", "loss"), optimizer="sgd"),
    "amax-x1e4": Scenario(
        lambda rank: [Fault("amax", 4, layer, rank) for layer in ("net.0", "net.2")],
        ("amax_jump", "net.0", "input"),
        # Without a margin E4M3 has just enough range to lose four digits and go on.
        fp8=DelayedScaling(margin=4.0),
    ),
}


@dataclass
class Result:
    """What one rank saw of a run."""

    loss: float
    weights: dict[str, torch.Tensor]
    events: list[dict[str, Any]]
    error: str = ""


def run(
    tmp_path: Path,
    scenario: Scenario,
    rank: int | None = None,
    *,
    faulty: bool = True,
    recovery: bool = True,
    seed: int = 7,
    devices: int = 1,
    model: Any = None,
    strategy: Any = None,
    more: Sequence[pl.Callback] = (),
    ckpt_path: str | None = None,
    loader: Any = None,
    accelerator: str = "cpu",
) -> Result:
    """One run of a scenario."""
    callbacks: list[pl.Callback] = [FaultInjector(scenario.faults(rank))] if faulty else []
    guard = SkipBatchRecovery(window=16, warmup=8, snapshot_every=5, log=None)
    callbacks += [guard, *more] if recovery else more
    settings = {
        "max_steps": STEPS,
        "num_sanity_val_steps": 0,
        "plugins": [FP8Precision(scenario.fp8, layers=LayerSelection())] if scenario.fp8 else [],
        **scenario.settings,
    }
    if devices > 1:
        environment = LightningEnvironment()
        settings |= {
            "devices": devices,
            "strategy": strategy
            or DDPStrategy(
                process_group_backend="gloo" if accelerator == "cpu" else "nccl", cluster_environment=environment
            ),
            "use_distributed_sampler": True,
        }
    model = model if model is not None else Deep(scenario.optimizer, seed)
    error = ""
    try:
        fit(
            tmp_path,
            callbacks,
            model=model,
            loader=loader or make_loader(4096, 64 // devices),
            ckpt_path=ckpt_path,
            enable_checkpointing=bool(more),
            accelerator=accelerator,
            **settings,
        )
    except Exception as exception:
        error = f"{type(exception).__name__}: {exception}"
    weights = {name: full(value).cpu().clone() for name, value in model.state_dict().items()}
    if strategy is not None:
        model = Deep()
        model.load_state_dict(weights)
    return Result(test_loss(model), weights, guard.events.recent, error)


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def check(clean: float, spread: float, without: Result, with_recovery: Result, scenario: Scenario) -> None:
    """What each fault must hold to."""
    tolerance = max(0.01 * clean, spread)
    assert not without.loss <= clean + tolerance, f"the fault does no harm: {without.loss} against {clean}"
    assert with_recovery.error == ""
    assert with_recovery.loss <= clean + tolerance, f"{with_recovery.loss} against {clean} +- {tolerance}"
    first = with_recovery.events[0]
    assert first["event"] == "rejected"
    assert (first["verdict"], first["layer"], first["role"]) == scenario.verdict
