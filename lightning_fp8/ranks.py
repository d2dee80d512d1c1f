"""How many ranks there are, and what each has of its own: its part of a tensor, and of a checkpoint (one file)."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

T = TypeVar("T")


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """How many ranks ``group`` has (``None``: all of them); 1 where nothing is distributed."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def local_values(tensor: Tensor) -> Tensor:
    """This rank's dense values of a parameter or gradient."""
    if tensor.is_sparse:
        return tensor.coalesce().values()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reshard(model: nn.Module) -> None:
    """Let every module of ``model`` hold its own parameters, which FSDP2 steps and saves: this rank's shards.

    After a forward without a backward the root holds what it gathered, copies that are gone with the next gathering.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def all_gather(messages: Tensor, message: Tensor, group: dist.ProcessGroup | None = None) -> dist.Work:
    """Begin to gather the messages of all ranks, one behind the other, by the backend's all-gather.

    Args:
        messages: ``[ranks * length]``, filled when the work is done.
        message: ``[length]``, this rank's; as long on every rank.
        group: the ranks; ``None`` means all.
    """
    # torch 2.13 renamed it and warns of the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = gather(messages, message, group=group, async_op=True)
    return work


def gather_from_ranks(mine: T) -> list[T]:
    """Everybody's ``mine``, by rank: plain values and CPU tensors. Every rank must call."""
    ranks = world_size()
    if ranks == 1:
        return [mine]
    everybodys: list[T | None] = [None] * ranks
    dist.all_gather_object(everybodys, mine)
    return everybodys  # type: ignore[return-value]


def own_part(everybodys: list[T]) -> T | None:
    """This rank's of what :func:`gather_from_ranks` gave; ``None`` where the number of ranks changed."""
    ranks = world_size()
    if len(everybodys) != ranks:
        return None
    return everybodys[dist.get_rank() if ranks > 1 else 0]
