"""A rank that dies or disagrees makes the others fail; it does not leave them waiting, or with wrong numbers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rank_checks import free_port
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_fp8.comm import FP8Collectives, FP8GradientState, fp8_gradient_hook

TIMEOUT = 5.0
WORLD = 3


def join(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD, timeout=timeout)
    dist.barrier()


def run(work) -> list[tuple[str, float]]:
    """What became of each rank: how it ended, and after how many seconds. Every rank must end."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["lightning_fp8.comm"])
    reports = [context.SimpleQueue() for _ in range(WORLD)]
    port = free_port()
    processes = [context.Process(target=report, args=(work, rank, port, reports[rank])) for rank in range(WORLD)]
    for process in processes:
        process.start()
    endings = []
    for process, queue in zip(processes, reports, strict=True):
        process.join(60)
        if process.is_alive():
            process.kill()
            endings.append(("hangs", 60.0))
        else:
            # The transport ends a process that gets more bytes than it has room for.
            endings.append(queue.get() if not queue.empty() else (f"exit code {process.exitcode}", 0.0))
    return endings


def report(work, rank: int, port: int, queue) -> None:
    join(rank, port)
    action = work(rank)
    start = time.monotonic()
    try:
        action()
        ending = "finished"
    except RuntimeError as error:
        ending = f"{type(error).__name__}: {error}"
    queue.put((ending, time.monotonic() - start))
    # Gone at once, as after an error that nobody catches.
    os._exit(0)


# Each prepares, and gives back what is to fail.


def dies_before_a_collective(rank: int) -> Callable[[], object]:
    if rank == 1:
        os._exit(1)
    return lambda: FP8Collectives().all_reduce(torch.ones(5000))


def dies_between_the_phases(rank: int) -> Callable[[], object]:
    handle = FP8Collectives().all_reduce(torch.ones(5000), async_op=True)
    if rank == 1:
        # What it contributes is on its way; its part of the result never comes.
        os._exit(1)
    return handle.wait


def dies_in_backward(rank: int) -> Callable[[], object]:
    model = DistributedDataParallel(nn.Linear(64, 64))
    model.register_comm_hook(FP8GradientState(), fp8_gradient_hook)
    loss = model(torch.ones(1, 64)).sum()
    if rank == 1:
        os._exit(1)

    def action() -> None:
        loss.backward()
        model.zero_grad()  # The model has to live until then: its hook goes with it.

    return action


def never_comes(rank: int) -> Callable[[], object]:
    store = dist.distributed_c10d._get_default_store()

    def action() -> None:
        if rank == 1:
            # Alive and connected, but busy elsewhere, until the others have given up.
            store.wait(["given up 0", "given up 2"], timedelta(seconds=4 * TIMEOUT))
            raise RuntimeError("stayed away")
        try:
            FP8Collectives().all_reduce(torch.ones(5000))
        finally:
            store.set(f"given up {rank}", "")

    return action


def has_fewer_values(rank: int) -> Callable[[], object]:
    return lambda: FP8Collectives().all_reduce(torch.ones(5000 if rank == 1 else 60_000))


def has_more_values(rank: int) -> Callable[[], object]:
    numel = 600 if rank == 1 else 500
    return lambda: FP8Collectives().all_gather(torch.empty(WORLD * numel), torch.ones(numel))


def gathers_fewer_values(rank: int) -> Callable[[], object]:
    # Here the backend itself says nothing: a short message leaves the rest of the others' buffers as it was.
    numel = 500 if rank == 1 else 60_000
    return lambda: FP8Collectives().all_gather(torch.empty(WORLD * numel), torch.ones(numel))


def has_another_threshold(rank: int) -> Callable[[], object]:
    return lambda: FP8Collectives(min_numel=10_000 if rank == 1 else 0).all_reduce(torch.ones(5000))


@pytest.mark.parametrize(
    "work",
    [
        dies_before_a_collective,
        dies_between_the_phases,
        dies_in_backward,
        never_comes,
        has_fewer_values,
        has_more_values,
        gathers_fewer_values,
        has_another_threshold,
    ],
    ids=lambda work: work.__name__,
)
def test_every_rank_gets_an_error_in_time(work) -> None:
    endings = run(work)
    for ending, seconds in endings:
        assert ending not in ("finished", "hangs", "exit code 0"), endings
        assert seconds < TIMEOUT + 3, endings
