"""What two ranks do; started once by ``test_monitor_ranks.py``, which looks at the results."""

from __future__ import annotations

import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from monitor_models import Fault, Net, Plant, batches, make_trainer, precision

from lightning_fp8.callbacks.health_monitor import FP8HealthError, FP8HealthMonitor
from lightning_fp8.callbacks.report import FP8Report
from lightning_fp8.metrics import SQNR, Amax, SaturationRate, UnderflowRate

WORLD = 2
#: Each role, on one rank or the other; and one that both ranks see.
FAULTS = [
    Fault(2, "blocks.0", "input", math.nan, rank=1),
    Fault(4, "late", "weight", math.inf, rank=1),
    Fault(6, "head", "grad_output", math.nan, rank=1),
    Fault(8, "blocks.1", "grad_output", math.inf, rank=0),
    Fault(10, "late", "input", math.nan, rank=0),
    Fault(10, "late", "input", math.nan, rank=1),
    # Rank 0's comes later in the step than rank 1's, which is the one to be named.
    Fault(12, "head", "input", math.nan, rank=0),
    Fault(12, "blocks.1", "input", math.nan, rank=1),
    Fault(24, "late", "input", factor=4.0, rank=1),
]


def trainer_of(callbacks: list[Any], steps: int, **settings: Any) -> Any:
    strategy = DDPStrategy(process_group_backend="gloo")
    # Rank 1's own data is what a fault changes: the sampler would hand out the same batches anyway.
    return make_trainer(
        callbacks, steps, precision(), devices=WORLD, strategy=strategy, use_distributed_sampler=False, **settings
    )


def run_rank(rank: int, folder: str, port: int) -> None:
    """All that one rank does."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    results: dict[str, Any] = {}
    monitor = FP8HealthMonitor({"nonfinite": "log", "spike": "log"})
    trainer_of([monitor, Plant(*FAULTS)], 26).fit(Net(), batches(26))
    results["events"] = [[e.kind, e.step, e.layer, e.role, list(e.ranks)] for e in monitor.events]

    raising = FP8HealthMonitor("raise")
    trainer = trainer_of([raising, Plant(Fault(1, "head", "weight", math.nan, rank=1))], 6)
    try:
        trainer.fit(Net(), batches(6))
        results["raised"] = None
    except FP8HealthError as error:
        results["raised"] = [str(error), trainer.global_step]
    trainer_of([FP8Report()], 3, default_root_dir=folder).fit(Net(), batches(3))
    results["metrics"] = metrics(rank)
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    if dist.is_initialized():
        dist.destroy_process_group()


def data(rank: int) -> torch.Tensor:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank))
    return x * torch.logspace(-6, 2, 32)[:, None] * (1 + rank)


def metrics(rank: int) -> dict[str, float]:
    """Each rank has data of its own; all must compute the same."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    values = {}
    for metric in (UnderflowRate(), SaturationRate(), SQNR()):
        metric.update(data(rank), scale=20.0)
        values[type(metric).__name__] = metric.compute().item()
    amax = Amax()
    amax.update(data(rank))
    values["Amax"] = amax.compute().item()
    amax = Amax()
    amax.update(torch.tensor([1.0 if rank == 0 else math.nan]))
    values["Amax of NaN"] = amax.compute().item()
    return values
