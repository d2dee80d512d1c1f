"""Runs checks on several gloo ranks with one spawn, and says which of them failed where."""

from __future__ import annotations

import os
import queue
import socket
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Check = Callable[[int, int], None]
"""Called on every rank with the rank and the world size; raises where something is wrong."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def run_checks(
    checks: Sequence[Check],
    world_size: int,
    timeout: float = 20.0,
    backend: str = "gloo",
    folder: str = "",
    tensors_there: bool = False,
) -> dict[str, list[str]]:
    """The failures of each check: one traceback for each rank that raised.

    With ``backend="nccl"`` rank i has GPU i; with ``tensors_there`` that is where tensors are made by default.
    ``folder`` is where checks find what other spawns left (:func:`folder`).

    A rank that raises may leave the others waiting in a collective; the group's timeout turns that into a failure too.
    Where ranks failed otherwise than alike the group's state is unknown: the checks that follow fail as "not run".
    """
    # Forked from a server that has imported torch, once for all world sizes: importing takes longer than the checks.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["lightning_fp8.comm"])
    reports = context.Queue()
    port = free_port()
    settings = (world_size, port, checks, timeout, reports, backend, folder, tensors_there)
    processes = [context.Process(target=_work, args=(rank, *settings), daemon=True) for rank in range(world_size)]
    for process in processes:
        process.start()
    failures: dict[str, list[str]] = {check.__name__: [] for check in checks}
    for _ in range(world_size):
        try:
            rank, results = reports.get(timeout=200)
        except queue.Empty:
            rank, results = -1, {}
        for check in checks:
            report = results.get(check.__name__, "not run")
            if report:
                failures[check.__name__].append(f"rank {rank}: {report}")
    for process in processes:
        process.join(20)
    return failures


def _work(
    rank: int,
    world_size: int,
    port: int,
    checks: Sequence[Check],
    timeout: float,
    reports: mp.Queue,
    backend: str,
    folder: str,
    tensors_there: bool,
) -> None:
    torch.set_num_threads(1)
    results: dict[str, str] = {}
    if backend == "nccl":
        torch.cuda.set_device(rank)
    # Lightning takes its ranks from here, and the process group as it finds it.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NODE_RANK="0", LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world_size), CHECKS_FOLDER=folder)
    patience = timedelta(seconds=timeout)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, timeout=patience * 2)
    dist.init_process_group(
        backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world_size, timeout=patience
    )
    for check in checks:
        name = check.__name__
        torch.manual_seed(0)
        try:
            with device() if tensors_there else nullcontext():
                check(rank, world_size)
            results[name], outcome = "", "passed"
        except BaseException as error:
            results[name] = traceback.format_exc()
            outcome = type(error).__name__
        store.set(f"{name}/{rank}", outcome)
        try:
            outcomes = [store.get(f"{name}/{other}") for other in range(world_size)]
        except dist.DistError:
            break
        # Where all ranks failed alike, or a check compared in vain, nobody waits in a collective.
        if len(set(outcomes)) > 1 and set(outcomes) - {b"passed", b"AssertionError", b"Failed"}:
            break
    store.set(f"bye/{rank}", "")
    if rank == 0:  # The store is this process's.
        with suppress(dist.DistError):
            store.wait([f"bye/{other}" for other in range(world_size)])
    reports.put((rank, results))
    reports.close()
    reports.join_thread()


def device() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def folder() -> Path:
    """A folder shared by all ranks and spawns."""
    return Path(os.environ["CHECKS_FOLDER"])


def same_on_all_ranks(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> bool:
    """Whether all ranks hold the same bits."""
    mine = tensor.detach().to(device()).contiguous().view(-1).view(torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return all(torch.equal(other, mine) for other in everyone)
