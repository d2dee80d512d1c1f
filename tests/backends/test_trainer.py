"""Every backend under the Trainer, and one checkpoint through all of them."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fp8 import FP8Precision
from lightning_fp8.backends import Backend
from tests.backends.models import ALL, FUSE, Block, StandIn


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            self.block = Block()
            self.head = nn.Linear(32, 16)
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.head(self.block(x)).float(), y)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.head(self.block(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(
        TensorDataset(torch.randn(48, 32, generator=generator), torch.randint(16, (48,), generator=generator)), 12
    )


def trainer(precision: FP8Precision | None, epochs: int, folder: Path) -> pl.Trainer:
    return pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        plugins=[precision] if precision else [],
        precision=None if precision else "bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


BACKENDS: dict[str, Backend | str | None] = {
    "bf16": None,
    "native": "native",
    "torchao": "torchao",
    "transformer_engine": StandIn(),
}


def precision(name: str) -> FP8Precision | None:
    backend = BACKENDS[name]
    return None if backend is None else FP8Precision("tensorwise", backend=backend, layers=ALL)


def test_a_checkpoint_goes_through_all_backends(library: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    straight: dict[str, float] = {}
    for source in BACKENDS:
        model, run = Net(), trainer(precision(source), 3, tmp_path)
        run.fit(model, loader(), loader())
        run.save_checkpoint(tmp_path / f"{source}.ckpt")
        longer = Net()
        trainer(precision(source), 4, tmp_path).fit(longer, loader())
        straight[source] = longer.losses[12]
        assert longer.losses[12] < 0.9 * longer.losses[0]
    keys = {tuple(torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"]) for name in BACKENDS}
    assert keys == {tuple(Net().state_dict())}
    for source, target in itertools.product(BACKENDS, BACKENDS):
        model = Net()
        trainer(precision(target), 4, tmp_path).fit(model, loader(), ckpt_path=str(tmp_path / f"{source}.ckpt"))
        assert len(model.losses) == 4
        # Within FP8's rounding of where the source itself goes on.
        assert model.losses[0] == pytest.approx(straight[source], rel=0.03), (source, target)
        if source == target:
            assert model.losses[0] == straight[source]


def test_fused_modules_under_the_trainer(library: ModuleType, tmp_path: Path) -> None:
    names = tuple(tuple(f"block.{name}" for name in group) for group in FUSE)
    losses = []
    for backend in (StandIn(fuse=names, cache_weights=True, amax="library"), "native"):
        model, plugin = Net(), FP8Precision("delayed", backend=backend, layers=ALL)
        run = trainer(plugin, 2, tmp_path)
        run.fit(model, loader(), loader())
        assert list(model.state_dict()) == list(Net().state_dict())
        assert f"{plugin.settings.backend.name} backend" in plugin.summary()
        losses.append(model.losses)
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=0.02, atol=0)
