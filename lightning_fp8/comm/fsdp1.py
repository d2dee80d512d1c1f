"""FP8 gradient reduction for FSDP1, through its public communication hook.

    fsdp_model.register_comm_hook(FP8Collectives(fsdp_model.process_group), fp8_shard_hook)

FSDP1 has no hook for its weight all-gather, and none for gradients under hybrid sharding.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from lightning_fp8.comm.collectives import FP8Collectives


def fp8_shard_hook(state: FP8Collectives, gradient: Tensor, output: Tensor | None = None) -> None:
    """Average a flat gradient over the ranks in FP8.

    Args:
        state: the collectives of the module's process group.
        gradient: flat, all ranks' chunks; replaced by the mean where there is no ``output`` (``NO_SHARD``).
        output: takes this rank's chunk of the mean.
    """
    if output is None:
        state.all_reduce(gradient, dist.ReduceOp.AVG)
    else:
        state.reduce_scatter(output, gradient, dist.ReduceOp.AVG)
