"""Clipping of gradients that are split in different ways: those of tensor-parallel parameters beside whole ones.

torch's own functions take several tensors at once, and there no DTensor beside a tensor or a DTensor of another mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lightning_fp8.optimizers import gradients_of, parameters_of


def are_mixed(tensors: Iterable[Tensor]) -> bool:
    """Whether ``tensors`` are of several meshes, or some of none."""
    return len({tensor.device_mesh if isinstance(tensor, DTensor) else None for tensor in tensors}) > 1


def local_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that this rank holds of each, over the same memory."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


@torch.no_grad()
def clip_by_norm(optimizer: Optimizer, max_norm: float) -> None:
    """As ``torch.nn.utils.clip_grad_norm_``, by the norm of all gradients together. Every rank must call."""
    gradients = gradients_of(optimizer)
    if not gradients:
        return
    kinds: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        kind = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        kinds.setdefault(kind, []).append(gradient)
    norms = [torch.nn.utils.get_total_norm(alike) for alike in kinds.values()]
    norm = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]).norm()
    torch._foreach_mul_(local_parts(gradients), (max_norm / (norm + 1e-6)).clamp(max=1.0))


@torch.no_grad()
def clip_by_value(optimizer: Optimizer, limit: float) -> None:
    """As ``torch.nn.utils.clip_grad_value_``. Every rank must call."""
    for parameter in parameters_of(optimizer):
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
            # Of a sum the summands are not what is to be clipped.
            whole = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
            parameter.grad = gradient.redistribute(placements=whole)
    parts = local_parts(gradients_of(optimizer))
    if parts:
        torch._foreach_clamp_min_(parts, -limit)
        torch._foreach_clamp_max_(parts, limit)
