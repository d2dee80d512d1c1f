"""Faults that can be planted into a training step, to rehearse recovery."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

from lightning_fp8.batches import tensors_of
from lightning_fp8.checks import check_number, keep_as_floats
from lightning_fp8.ranks import local_values
from lightning_fp8.recipes import ROLES, Role

Kind = Literal["batch", "activation", "gradient", "weight", "loss", "amax", "bit_flip", "exception", "kill"]
KINDS: tuple[Kind, ...] = (
    "batch", "activation", "gradient", "weight", "loss", "amax", "bit_flip", "exception", "kill",
)  # fmt: skip
#: Faults that sit in one layer.
IN_A_LAYER = ("activation", "gradient", "weight", "amax", "bit_flip")


class InjectedFault(RuntimeError):
    """The exception that the fault ``exception`` raises."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: ``batch``, ``activation``, ``gradient`` (of the weight), ``weight``: one element becomes ``value``;
            ``loss``: multiplied by ``factor``; ``amax``: of an FP8 layer, multiplied by ``factor``; ``bit_flip`` in one
            element of the weight; ``exception``: raised; ``kill``: SIGKILL.
        step: optimizer step, counted in attempts as ``trainer.global_step`` does.
        layer: qualified name of the module, for faults that sit in one.
        rank: where; None: on every rank.
        value: NaN or Inf, or any number.
        factor: for ``loss`` (default 10) and ``amax`` (default 1e4).
        bit: for ``bit_flip``, from the least significant; None: the highest bit of the exponent.
        role: for ``amax``; None: all roles.

    Raises:
        TypeError: where a setting is of the wrong type.
        ValueError: where one makes no sense.
    """

    kind: Kind
    step: int
    layer: str | None = None
    rank: int | None = None
    value: float = float("nan")
    factor: float | None = None
    bit: int | None = None
    role: Role | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"There is no fault {self.kind!r}: choose from {', '.join(KINDS)}.")
        check_number(whole=True, least=0, step=self.step)
        check_number(whole=True, none=True, least=0, rank=self.rank, bit=self.bit)
        check_number(value=self.value)
        check_number(none=True, factor=self.factor)
        keep_as_floats(self, "value", "factor")
        if self.kind in IN_A_LAYER and self.layer is None:
            raise ValueError(f"The fault {self.kind!r} sits in a layer: name it with layer=.")
        if self.role not in (None, *ROLES):
            raise ValueError(f"There is no role {self.role!r}: choose among {', '.join(ROLES)}, or None for all.")

    @property
    def multiplier(self) -> float:
        """``factor``, or its default."""
        return self.factor if self.factor is not None else 1e4 if self.kind == "amax" else 10.0


def random_faults(
    steps: int, rate: float, kinds: Sequence[Kind], *, layers: Sequence[str] = (), ranks: int = 1, seed: int = 0
) -> list[Fault]:
    """Faults at random steps, the same for the same arguments.

    Args:
        steps: of the run.
        rate: share of steps that get one.
        kinds: to draw from.
        layers: to draw from, for kinds that sit in one.
        ranks: number of ranks to draw from.
        seed: of the draw.

    Raises:
        ValueError: ``rate`` outside [0, 1], or kinds that need layers without any.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"rate is {rate}: give a share from 0 to 1.")
    if not layers and any(kind in IN_A_LAYER for kind in kinds):
        raise ValueError("Some of these kinds sit in a layer: name candidates with layers=.")
    draw = random.Random(seed)
    faults = []
    for step in range(steps):
        if draw.random() < rate:
            kind = draw.choice(list(kinds))
            layer = draw.choice(list(layers)) if kind in IN_A_LAYER else None
            value = draw.choice([float("nan"), float("inf")])
            faults.append(Fault(kind, step, layer, draw.randrange(ranks), value))
    return faults


def spoil_batch(batch: Any, value: float) -> None:
    """Put ``value`` into the first element of the first floating-point tensor, in place.

    Raises:
        ValueError: there is none.
    """
    for tensor in tensors_of(batch):
        if tensor.is_floating_point() and tensor.numel():
            _set_first(tensor, value)
            return
    raise ValueError("The batch holds no floating-point tensor to put a fault in: plant it in an activation.")


@torch.no_grad()
def spoil_weight(module: nn.Module, value: float) -> None:
    """Put ``value`` into the first element of the module's weight, in place."""
    _set_first(_weight(module), value)


@torch.no_grad()
def flip_bit(module: nn.Module, bit: int | None = None) -> None:
    """Flip one bit of the first element of the module's weight, in place; by default the exponent's highest."""
    weight = local_values(_weight(module).data)
    size = weight.element_size() * 8
    bit = size - 2 if bit is None else bit
    if bit >= size:
        raise ValueError(f"bit is {bit}: {weight.dtype} has {size} bits.")
    integer = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[size]
    # The sign bit's mask as a signed number.
    mask = 1 << bit if bit < size - 1 else -(1 << bit)
    element = weight.view(-1)[:1].view(integer)
    element.bitwise_xor_(torch.tensor(mask, dtype=integer, device=weight.device))


def spoil_activation(module: nn.Module, value: float) -> Any:
    """Put ``value`` into the module's next output; returns the handle of the hook that does it."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        handle.remove()
        leaves, spec = _pytree.tree_flatten(output)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
                leaves[index] = _with_first(leaf, value)
                break
        return _pytree.tree_unflatten(leaves, spec)

    handle = module.register_forward_hook(hook)
    return handle


def is_sharded(module: nn.Module) -> bool:
    """Whether the module's weight is; its gradient then passes no hook."""
    return isinstance(_weight(module), DTensor)


def spoil_reduced_gradient(module: nn.Module, value: float) -> None:
    """Put ``value`` into the gradient that the weight has, in place."""
    gradient = _weight(module).grad
    if gradient is not None:
        _set_first(gradient, value)


def spoil_gradient(module: nn.Module, value: float) -> Any:
    """Put ``value`` into the weight's next gradient before ranks reduce it; returns the handle of the hook."""

    def hook(gradient: Tensor) -> Tensor:
        handle.remove()
        return _with_first(gradient, value)

    handle = _weight(module).register_hook(hook)
    return handle


def kill_process() -> None:
    """SIGKILL: nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


def _weight(module: nn.Module) -> nn.Parameter:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter):
        raise ValueError(f"{type(module).__name__} has no weight to put a fault in: name a layer that has one.")
    return weight


@torch.no_grad()
def _set_first(tensor: Tensor, value: float) -> None:
    local = local_values(tensor.data)
    if local.numel():
        local[(0,) * local.ndim] = value


def _with_first(tensor: Tensor, value: float) -> Tensor:
    spoilt = tensor.clone()
    _set_first(spoilt, value)
    return spoilt
