"""A run that is killed, and resumed in another process from its last checkpoint."""

from __future__ import annotations

import logging
import multiprocessing
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from recovery_models import PRELOAD, Net, make_data, make_trainer

from examples.loader import ResumableLoader
from lightning_fp8 import FP8Precision
from lightning_fp8.callbacks.fault_injector import Fault, FaultInjector
from lightning_fp8.callbacks.recovery import SkipBatchRecovery

STEPS, EVERY = 50, 4
FAULTS = [
    Fault("batch", 5), Fault("batch", 6), Fault("gradient", 15, "net.0"), Fault("weight", 21, "net.4"),
    Fault("loss", 33, factor=100.0), Fault("batch", 44, value=float("inf")), Fault("batch", 49),
]  # fmt: skip


def train(directory: Path, optimizer: str, end: Fault | None, resume: bool, saves_in: Path) -> None:
    """The run, which a fault may ``end``; its last state goes to ``directory/end.pt``."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    pl.seed_everything(3, verbose=False)
    faults = FAULTS if end is None else [*FAULTS, end]
    recovery = SkipBatchRecovery(window=16, warmup=8, snapshot_every=5, calm=10, log=directory / "events.jsonl")
    saver = ModelCheckpoint(saves_in, "{step}", every_n_train_steps=EVERY, save_top_k=-1)
    trainer = make_trainer(
        directory, [FaultInjector(faults), recovery, saver], max_steps=STEPS, plugins=[FP8Precision()],
        enable_checkpointing=True,
    )  # fmt: skip
    model = Net(optimizer)
    loader = ResumableLoader(make_data(192), 16)
    paths = sorted(saves_in.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1].split("-")[0]))
    trainer.fit(model, loader, ckpt_path=str(paths[-1]) if resume and paths else None)
    state: dict[str, Any] = {
        "weights": model.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "fp8": trainer.precision_plugin.conversions[0].state_dict(),
        "recovery": recovery.state_dict(),
        "epoch_loss": trainer.callback_metrics["train_loss_epoch"],
        "resumed_from": int(paths[-1].stem.split("=")[1]) if resume and paths else 0,
    }
    torch.save(state, directory / "end.pt")


def in_a_process(*arguments: Any) -> int:
    """Runs :func:`train` and returns the exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=train, args=arguments, daemon=True)
    process.start()
    process.join(120)
    process.kill()
    return -1 if process.exitcode is None else process.exitcode
