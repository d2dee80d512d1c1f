"""A small model, its data and a quick Trainer, for the tests of recovery."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fp8.callbacks.recovery import SkipBatchRecovery

#: Imported once by the server that test processes are forked from: installed packages only, its sys.path is another.
PRELOAD = ["torch", "torch._dynamo", "torch.distributed.tensor", "lightning.pytorch", "torchmetrics"]
FEATURES, HIDDEN, TARGETS = 16, 32, 16
NAN = math.nan
#: Of recovery, each with an optimizer that leads to it.
MODES = {"exact": "adamw", "fast": "adamw-fused"}
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
    "lbfgs": lambda p: torch.optim.LBFGS(p),
}


class Net(pl.LightningModule):
    """Two linear layers with BatchNorm and dropout between them; learns a noisy linear map."""

    def __init__(self, optimizer: str = "adamw", schedule: bool = True, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(
            nn.Linear(FEATURES, HIDDEN),
            nn.BatchNorm1d(HIDDEN),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(HIDDEN, TARGETS),
        )
        self.optimizer, self.schedule = optimizer, schedule
        self.losses: list[float] = []

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer](self.parameters())
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class TwoBlocks(Net):
    """All linear layers but the head can be FP8."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))


def make_data(samples: int = 512, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    targets = inputs @ torch.randn(FEATURES, TARGETS, generator=torch.Generator().manual_seed(1)) / math.sqrt(FEATURES)
    return TensorDataset(inputs, targets + 0.1 * torch.randn(samples, TARGETS, generator=generator))


def make_loader(samples: int = 512, batch_size: int = 16) -> DataLoader:
    return DataLoader(make_data(samples), batch_size)


def make_trainer(tmp_path: Path, callbacks: Sequence[pl.Callback] = (), **settings: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "max_steps": 60,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": tmp_path,
    }
    return pl.Trainer(**{**defaults, **settings}, callbacks=list(callbacks))


def fit(
    tmp_path: Path,
    callbacks: Sequence[pl.Callback] = (),
    *,
    model: pl.LightningModule | None = None,
    loader: DataLoader | None = None,
    ckpt_path: str | None = None,
    **settings: Any,
) -> tuple[pl.LightningModule, pl.Trainer]:
    """A whole run, the same for the same arguments."""
    pl.seed_everything(7, verbose=False)
    model = model if model is not None else Net()
    trainer = make_trainer(tmp_path, callbacks, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, loader if loader is not None else make_loader(), ckpt_path=ckpt_path)
    return model, trainer


def recovery(**settings: Any) -> SkipBatchRecovery:
    """One that learns quickly what is normal."""
    return SkipBatchRecovery(**{"window": 32, "warmup": 8, "snapshot_every": 10, **settings})


def rejected(callback: SkipBatchRecovery) -> list[dict[str, Any]]:
    return [event for event in callback.events.recent if event["event"] == "rejected"]


def fp16(**settings: Any) -> pl.plugins.MixedPrecision:
    return pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **settings))


@torch.no_grad()
def test_loss(model: Any) -> float:
    """Loss on data that no run has seen; NaN where the model is ruined."""
    model.eval()
    return float(model.loss(make_data(512, seed=99).tensors))


test_loss.__test__ = False  # type: ignore[attr-defined]


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
