"""A tiny model, its data, and a callback that plants faults, for the tests of the monitors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fp8 import FP8Precision, LayerSelection

WIDTH = 16
#: In the order of execution, which is not the order of registration: ``late`` is registered first.
EXECUTED = ("blocks.0", "blocks.1", "late", "head")


class Net(pl.LightningModule):
    """Four linear layers; under FP8 the head stays in high precision, and so is watched."""

    def __init__(self, lr: float = 1e-4) -> None:
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            self.late = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList([nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)])
            self.head = nn.Linear(WIDTH, WIDTH)
        self.lr = lr

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.blocks[0](x))
        return self.head(self.late(self.blocks[1](x)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).float().square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self(batch * 1000)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class StepsByHand(Net):
    """Takes three steps on the first batch and two on each other: they begin at 0, 3, 5, 7, 9, ..."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for _ in range(3 if batch_idx == 0 else 2):
            optimizer.step()


def batches(count: int) -> DataLoader[Tensor]:
    """The same batch again and again, so that nothing but faults changes the amaxes much."""
    batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    return DataLoader(batch.repeat(count, 1), batch_size=8)


def precision(recipe: Any = "delayed", **kwargs: Any) -> FP8Precision:
    return FP8Precision(recipe, layers=LayerSelection(), **kwargs)


def make_trainer(callbacks: list[pl.Callback], steps: int, plugin: Any = None, **kwargs: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": steps,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(callbacks=callbacks, plugins=plugin, **{**settings, **kwargs})


@dataclass(frozen=True)
class Fault:
    """One element of an operand becomes ``value`` in one step, on one rank; or all are multiplied by ``factor``."""

    step: int
    layer: str
    role: str
    value: float | None = None
    factor: float = 1.0
    rank: int = 0

    def apply(self, x: Tensor) -> Tensor:
        x = x.clone() * self.factor
        if self.value is not None:
            x.view(-1)[0] = self.value
        return x


class Plant(pl.Callback):
    """Plants faults, and takes away the gradients of steps with a fault: what follows is clean again."""

    def __init__(self, *faults: Fault, keep_gradients: bool = False) -> None:
        self.faults = faults
        self.keep_gradients = keep_gradients
        self._handles: list[Any] = []
        self._restore: list[tuple[Tensor, Tensor]] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        for fault in self.faults:
            if fault.step == trainer.global_step and fault.rank == trainer.global_rank:
                self._plant(pl_module.get_submodule(fault.layer), fault)

    def _plant(self, layer: nn.Module, fault: Fault) -> None:
        if fault.role == "weight":
            weight = layer.weight.data
            self._restore.append((weight, weight.clone()))
            weight.copy_(fault.apply(weight))
        elif fault.role == "input":
            self._handles.append(layer.register_forward_pre_hook(lambda _, args: (fault.apply(args[0]),)))
        else:

            def spoil(_: nn.Module, args: Any, output: Tensor) -> Tensor:
                output = output.clone()
                output.register_hook(fault.apply)
                return output

            self._handles.append(layer.register_forward_hook(spoil))

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if not self.keep_gradients and any(fault.step == trainer.global_step for fault in self.faults):
            optimizer.zero_grad(set_to_none=True)

    def on_train_batch_end(self, *args: Any) -> None:
        for handle in self._handles:
            handle.remove()
        if not self.keep_gradients:
            for weight, values in self._restore:
                weight.copy_(values)
        self._handles, self._restore = [], []
