"""Models, training and byte counts for the checks of sharded training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_checks import device
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import lightning_fp8
from lightning_fp8 import LayerSelection
from lightning_fp8.linear import Float8Linear
from lightning_fp8.model import conversions

VOCABULARY = 50


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Blocks in FP8 between an embedding and a head in high precision."""

    def __init__(self, width: int = 48, hidden: int = 80, depth: int = 2, bias: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, hidden, bias) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(**options: Any) -> Decoder:
    torch.manual_seed(1)
    return Decoder(**options)


def line_mesh(**_: Any) -> DeviceMesh:
    return init_device_mesh(device().type, (dist.get_world_size(),))


def sharded(model: nn.Module | None = None, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    settings: dict[str, Any] = {"layers": LayerSelection(), "min_numel": 0, **options}
    return lightning_fp8.shard(model or make(), mesh or line_mesh(), **settings)


def batch(step: int, group: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + group)
    return torch.randint(0, VOCABULARY, (4, 16), generator=generator).to(device())


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    return F.cross_entropy(model(text).float().flatten(0, 1), text.flatten().roll(1))


def train(model: nn.Module, steps: int = 3, group: int | None = None, accumulate: int = 1) -> list[float]:
    """Losses of this rank; ``group`` names its data where ranks share them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for step in range(steps):
        for part in range(accumulate):
            loss = loss_of(model, batch(step * accumulate + part, dist.get_rank() if group is None else group))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        lightning_fp8.step(model)
        losses.append(float(loss))
    return losses


def weights(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, whole."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    left, right = weights(a), weights(b)
    assert [n.replace("_checkpoint_wrapped_module.", "") for n in left] == [
        n.replace("_checkpoint_wrapped_module.", "") for n in right
    ]
    for (name, x), y in zip(left.items(), right.values(), strict=True):
        assert torch.equal(x.cpu(), y.cpu()), name


def statistics(model: nn.Module) -> Tensor:
    return conversions(model)[0].runtime.table.data


def fp8_layers(model: nn.Module) -> list[Float8Linear]:
    return [layer for layer in model.modules() if isinstance(layer, Float8Linear)]


@contextmanager
def counted_bytes() -> Iterator[dict[str, int]]:
    """Bytes that this rank hands to torch.distributed for others, by kind of collective."""
    sent = {"gather": 0, "scatter": 0, "reduce": 0, "send": 0}
    patches = []

    def watch(name: str, kind: str, size: Any) -> None:
        original = getattr(dist, name, None)
        if original is None:
            return

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            others = dist.get_world_size(kwargs.get("group")) - 1
            sent[kind] += size(args, kwargs, others)
            return original(*args, **kwargs)

        patches.append(mock.patch.object(dist, name, wrapper))

    def tensor(args: Any, kwargs: Any, place: int, *names: str) -> Tensor:
        return next((kwargs[name] for name in names if name in kwargs), None) if len(args) <= place else args[place]

    def nbytes(x: Tensor) -> int:
        return x.numel() * x.itemsize

    for name in ("all_gather_single", "all_gather_into_tensor"):
        watch(name, "gather", lambda a, k, n: n * nbytes(tensor(a, k, 1, "input_tensor")))
    for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
        watch(name, "scatter", lambda a, k, n: n * nbytes(tensor(a, k, 0, "output", "output_tensor")))
    watch("all_to_all_single", "send", lambda a, k, n: nbytes(tensor(a, k, 1, "input")) * n // (n + 1))
    watch("all_reduce", "reduce", lambda a, k, n: 2 * n * nbytes(tensor(a, k, 0, "tensor")) // (n + 1))
    watch(
        "batch_isend_irecv",
        "send",
        lambda a, k, n: sum(nbytes(op.tensor) for op in a[0] if op.op is dist.isend),
    )
    for patch in patches:
        patch.start()
    try:
        yield sent
    finally:
        for patch in patches:
            patch.stop()
