"""On a GPU: no step waits for the device with recovery's fast mode on, whatever the batches hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import FP8HealthMonitor, FP8Precision, LayerSelection, SkipBatchRecovery

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

STEPS, WIDTH = 12, 32


class Net(pl.LightningModule):
    """Takes numbers, or indices of rows of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch if batch.is_floating_point() else self.embedding(batch)
        return self.layers(x).float().square().mean() + 0 * self.embedding.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3, fused=True)


class OnDevice:
    """Batches that are on the device already: copying them would be a wait that is not recovery's."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.data.split(8))


class NoWaiting(pl.Callback):
    """Waiting for the device is an error from the fourth step to the last but one."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, index: int) -> None:
        if index == 3:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == STEPS - 2:
            torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("health", [False, True])
@pytest.mark.parametrize("kind", ["numbers", "indices"])
def test_no_step_waits_for_the_device(kind: str, health: bool, tmp_path: Any) -> None:
    torch.manual_seed(0)
    data = torch.randn(8 * STEPS, WIDTH) if kind == "numbers" else torch.randint(16, (8 * STEPS, 4))
    recovery = SkipBatchRecovery(log=None)
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        max_steps=STEPS,
        plugins=[FP8Precision(layers=LayerSelection())],
        callbacks=[NoWaiting(), *([FP8HealthMonitor("recover")] if health else []), recovery],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Net(), OnDevice(data.cuda()))
    assert trainer.global_step == STEPS
