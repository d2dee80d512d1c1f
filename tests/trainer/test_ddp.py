"""Two ranks on gloo: the checks of ``trainer_ranks.py``, and Lightning's own spawning."""

from __future__ import annotations

import multiprocessing
import socket
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
import trainer_ranks
from lightning.pytorch.strategies import DDPStrategy
from trainer_models import Net, differs, loader, make_trainer, plugin

from lightning_fp8 import LayerSelection


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Forked from a server that has imported everything once: importing takes longer than the checks.
    multiprocessing.set_forkserver_preload(["trainer_ranks"])
    mp.start_processes(
        trainer_ranks.run_rank, args=(str(folder), port), nprocs=trainer_ranks.WORLD, start_method="forkserver"
    )
    return folder


@pytest.mark.parametrize("check", trainer_ranks.CHECKS)
def test_on_two_ranks(check: str, outcomes: Path) -> None:
    texts = [(outcomes / f"{check}-{rank}.txt").read_text() for rank in range(trainer_ranks.WORLD)]
    failed = [f"rank {rank}:\n{text}" for rank, text in enumerate(texts) if text != "passed"]
    assert not failed, "\n".join(failed)


def exclude_nothing(module: torch.nn.Module, name: str) -> bool:
    return True


def test_plugin_and_model_are_pickled_to_spawned_workers() -> None:
    model = Net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    precision = plugin(loss_scale="dynamic", layers=LayerSelection(filter=exclude_nothing))
    # Pickled as "ddp_spawn" does, to processes of the server that has its imports done.
    trainer = make_trainer(precision, devices=2, strategy=DDPStrategy(start_method="forkserver"), max_steps=2)
    trainer.fit(model, loader())
    assert all(differs(before[name], p.detach()) for name, p in model.named_parameters())
    # What trained was in the workers; the model here goes on, converted already or not.
    second = make_trainer(precision, max_steps=1)
    second.fit(model, loader())
    assert model.losses[-1].isfinite()
