"""The table of faults on two gloo ranks: both ranks make all runs one after the other, in one pair of processes."""

from __future__ import annotations

import logging
import os
import socket
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from fault_table import SCENARIOS, Deep, Result, Scenario, run
from recovery_models import PRELOAD

from lightning_fp8.callbacks.recovery import SkipBatchException, SkipBatchRecovery

RANKS = 2
#: One of each kind and mode; the rest of the table is marked slow.
QUICK = (
    "batch-nan", "batch-nan-fast", "batch-nan-accumulated", "activation-nan-fp8", "gradient-nan-clipped", "weight-nan",
    "bit-flip-fast", "loss-x10", "amax-x1e4",
)  # fmt: skip


class OneRankGivesUp(Deep):
    """At batch 5, the ranks in ``who`` leave the batch out in some way."""

    def __init__(self, way: str, who: tuple[int, ...]) -> None:
        super().__init__()
        self.way, self.who = way, who

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step != 5 or self.global_rank not in self.who:
            return loss
        if self.way == "none":
            return None
        if self.way == "exception":
            raise SkipBatchException("bad data")
        recovery = next(c for c in self.trainer.callbacks if isinstance(c, SkipBatchRecovery))
        return recovery.reject(loss)


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
    for name, (way, who) in GIVING_UP.items():
        results[name] = run(directory, nothing, faulty=False, devices=RANKS, model=OneRankGivesUp(way, who))
    return results


def work(rank: int, port: int, directory: Path, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    os.environ |= {
        "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    path = directory / f"rank-{rank}.pt"
    try:
        torch.save(everything(directory, names), path)
    except BaseException:
        path.with_suffix(".error").write_text(traceback.format_exc())
        raise


def run_ranks(directory: Path, names: Sequence[str]) -> list[dict[str, Result]]:
    """What each rank got."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    arguments = (port, directory, names)
    processes = [context.Process(target=work, args=(rank, *arguments), daemon=True) for rank in range(RANKS)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(600)
    finally:
        for process in processes:
            process.kill()
    errors = [path.read_text() for path in directory.glob("*.error")]
    if errors:
        raise RuntimeError("\n".join(errors))
    return [torch.load(directory / f"rank-{rank}.pt", weights_only=False) for rank in range(RANKS)]
