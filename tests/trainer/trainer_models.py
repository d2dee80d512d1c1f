"""Tiny models, loaders and comparisons for the tests of the Trainer and Fabric."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fp8 import DelayedScaling, FP8Precision

BATCH = 4


def body(width: int = 16, dropout: float = 0.1) -> nn.Sequential:
    """Two layers that become FP8, with things around them that must not."""
    return nn.Sequential(
        nn.Linear(width, 2 * width),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(2 * width, width),
        nn.LayerNorm(width),
    )


class Net(pl.LightningModule):
    """A classifier that keeps its losses. ``head`` stays in high precision: it is the last linear layer."""

    def __init__(self, optimizer: str = "adamw", dropout: float = 0.1, lr: float = 1e-2, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            self.body = body(dropout=dropout)
            self.head = nn.Linear(16, 4)
        self.optimizer = optimizer
        self.lr = lr
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x) + x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x).float(), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)
        if self.optimizer == "lbfgs":
            return torch.optim.LBFGS(self.parameters())
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def dataset(samples: int = 24, seed: int = 1) -> TensorDataset:
    """Inputs ``[samples, 16]`` and classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 16, generator=generator)
    return TensorDataset(x, torch.randint(4, (samples,), generator=generator))


def loader(samples: int = 24, shuffle: bool = False, seed: int = 1) -> DataLoader[Any]:
    return DataLoader(dataset(samples, seed), batch_size=BATCH, shuffle=shuffle)


class StatefulLoader:
    """A shuffling loader that can go on in the middle of an epoch: no more than what Lightning asks of one."""

    def __init__(self, samples: int = 24) -> None:
        self.data = dataset(samples)
        self.epoch = 0
        self.position = 0

    def __len__(self) -> int:
        return len(self.data) // BATCH

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.epoch))
        for batch in range(self.position, len(self)):
            # What a checkpoint holds while this batch is out: where to go on.
            self.position = (batch + 1) % len(self)
            self.epoch += self.position == 0
            yield [tensor[order[batch * BATCH : (batch + 1) * BATCH]] for tensor in self.data.tensors]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


def plugin(recipe: Any = None, **kwargs: Any) -> FP8Precision:
    """The plugin with a short history, so that a few steps go round it."""
    return FP8Precision(recipe or DelayedScaling(amax_history_len=3), **kwargs)


def make_trainer(precision: Any = None, **kwargs: Any) -> pl.Trainer:
    """A quiet Trainer on the CPU. ``precision`` is a plugin, or Lightning's own word."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
    }
    if isinstance(precision, str):
        settings["precision"] = precision
    else:
        settings["plugins"] = [precision if precision is not None else plugin()]
    return pl.Trainer(**{**settings, **kwargs})


def fit(model: pl.LightningModule, precision: Any = None, *, data: Any = None, seed: int = 7, **kwargs: Any) -> Any:
    """Fit with seeded dropout and shuffling; returns the Trainer."""
    trainer = make_trainer(precision, **kwargs)
    torch.manual_seed(seed)
    trainer.fit(model, data if data is not None else loader())
    return trainer


def fp8_state(trainer: Any) -> dict[str, Any]:
    """The FP8 state of the Trainer's model."""
    (conversion,) = trainer.precision_plugin.conversions
    return conversion.state_dict()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Equal bit for bit, NaN to NaN, all the way down; dtypes and types too."""
    assert type(a) is type(b), f"{where}: {type(a)} and {type(b)}"
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape, where
        assert torch.equal(_bytes(a), _bytes(b)), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), f"{where}: {a.keys()} and {b.keys()}"
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), f"{where}: {len(a)} and {len(b)}"
        for index, pair in enumerate(zip(a, b, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    else:
        assert a == b, f"{where}: {a} and {b}"


def differs(a: Any, b: Any) -> bool:
    """Whether :func:`assert_same` would fail."""
    try:
        assert_same(a, b)
    except AssertionError:
        return True
    return False
