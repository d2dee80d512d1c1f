"""The table of faults on two gloo ranks: both ranks make all runs one after the other, in one pair of processes."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from fault_table import SCENARIOS, Deep, Result, Scenario, run
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from recovery_models import PRELOAD, make_data, make_loader
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from examples.loader import ResumableLoader
from lightning_fp8.callbacks.fault_injector import Fault
from lightning_fp8.callbacks.recovery import SkipBatchException, SkipBatchRecovery

RANKS = 2
#: One of each kind and mode; the rest of the table is marked slow.
QUICK = (
    "batch-nan", "batch-nan-fast", "batch-nan-accumulated", "activation-nan-fp8", "weight-nan", "bit-flip-fast",
    "loss-x10", "amax-x1e4",
)  # fmt: skip


class OneRankGivesUp(Deep):
    """At batch 5, the ranks in ``who`` leave the batch out in some way."""

    def __init__(self, way: str, who: tuple[int, ...]) -> None:
        super().__init__()
        self.way, self.who = way, who

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        # Ranks that give up have to log as the others do, and so before.
        self.log("mean", loss.detach(), sync_dist=True)
        if self.trainer.global_step != 5 or self.global_rank not in self.who:
            return loss
        if self.way == "none":
            return None
        if self.way == "exception":
            raise SkipBatchException("bad data")
        recovery = next(c for c in self.trainer.callbacks if isinstance(c, SkipBatchRecovery))
        return recovery.reject(loss)


class Sharded(Deep):
    """The same model under FSDP2."""

    def configure_model(self) -> None:
        if not any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.net[0], mesh=mesh)
            fully_shard(self.net, mesh=mesh)


class ShardsItself(Deep):
    """By the plugin; validated before it trains, which leaves weights gathered."""

    def configure_model(self) -> None:
        self.trainer.precision_plugin.shard(self, self.device_mesh)

    def val_dataloader(self) -> Any:
        return make_loader(64)


SHARDED = ("batch-nan", "batch-nan-fast", "gradient-nan", "weight-inf-fast", "bit-flip")


def run_sharded(directory: Path, name: str, make: Callable[[str], Deep] = Sharded, **settings: Any) -> Result:
    scenario = replace(SCENARIOS[name], settings=SCENARIOS[name].settings | settings)
    strategy = ModelParallelStrategy(
        data_parallel_size=RANKS,
        tensor_parallel_size=1,
        process_group_backend="gloo",
        save_distributed_checkpoint=False,
    )
    return run(directory, scenario, rank=1, devices=RANKS, model=make(scenario.optimizer), strategy=strategy)


GIVING_UP = {
    f"{way}-{'one' if len(who) == 1 else 'all'}": (way, who)
    for way in ("none", "exception", "reject")
    for who in ((1,), (0, 1))
}


def everything(directory: Path, names: Sequence[str]) -> dict[str, Any]:
    """This rank's runs, by name."""
    nothing = Scenario(lambda rank: [], ("", "", ""))
    results: dict[str, Any] = {}
    for name in names:
        scenario = SCENARIOS[name]
        for recovery in (False, True):
            results[f"{name}/{recovery}"] = run(directory, scenario, rank=1, recovery=recovery, devices=RANKS)
        clean = ("clean", repr(scenario.fp8), scenario.optimizer, repr(scenario.settings))
        for seed in (7, 8):
            if (*clean, seed) not in results:
                results[(*clean, seed)] = run(
                    directory, scenario, faulty=False, recovery=False, seed=seed, devices=RANKS
                )
    if names != QUICK:
        return results
    results["clean-guarded"] = run(directory, nothing, faulty=False, devices=RANKS)
    for name in SHARDED:
        results[f"sharded/{name}"] = run_sharded(directory, name)
    results["sharded-itself"] = run_sharded(directory, "bit-flip-fp8", ShardsItself, num_sanity_val_steps=2)
    for name, (way, who) in GIVING_UP.items():
        results[name] = run(directory, nothing, faulty=False, devices=RANKS, model=OneRankGivesUp(way, who))
    return results


def over_nccl(directory: Path, names: Sequence[str]) -> dict[str, Any]:
    """The same on GPUs: clean and with recovery only."""
    results: dict[str, Any] = {}
    for name in names:
        scenario = SCENARIOS[name]
        for faulty in (False, True):
            results[f"{name}/{faulty}"] = run(
                directory, scenario, rank=1, faulty=faulty, devices=RANKS, accelerator="gpu"
            )
    return results


def one_run(directory: Path, faults: Sequence[Fault]) -> dict[str, Result]:
    """A run with checkpoints, that goes on from the last one in ``directory``."""
    scenario = Scenario(lambda rank: list(faults), ("", "", ""))
    saver = ModelCheckpoint(directory, "{step}", every_n_train_steps=8, save_top_k=-1)
    saves = sorted(directory.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    last = str(saves[-1]) if saves else None
    loader = ResumableLoader(make_data(4096), 32, num_replicas=RANKS, rank=int(os.environ["LOCAL_RANK"]))
    result = run(directory, scenario, devices=RANKS, more=[saver], ckpt_path=last, loader=loader)
    if result.error:
        raise RuntimeError(result.error)
    return {"run": result}


def work(rank: int, port: int, directory: Path, runs: Callable[..., dict[str, Any]], *arguments: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    os.environ |= {
        "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.save(runs(directory, *arguments), directory / f"rank-{rank}.pt")


def start_ranks(directory: Path, runs: Callable[..., dict[str, Any]], *arguments: Any) -> list[int | None]:
    """Calls ``runs(directory, *arguments)`` on all ranks; their exit codes, None of one that hangs."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    processes = [
        context.Process(target=work, args=(rank, port, directory, runs, *arguments), daemon=True)
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def run_ranks(
    directory: Path, runs: Callable[..., dict[str, Any]] = everything, *arguments: Any
) -> list[dict[str, Result]]:
    """What each rank got."""
    codes = start_ranks(directory, runs, *arguments)
    if codes != [0] * RANKS:
        raise RuntimeError(f"The ranks ended with {codes}; what they raised stands in the captured output.")
    return load_ranks(directory)


def load_ranks(directory: Path) -> list[dict[str, Result]]:
    """What each rank left in ``directory``."""
    return [torch.load(directory / f"rank-{rank}.pt", weights_only=False) for rank in range(RANKS)]
