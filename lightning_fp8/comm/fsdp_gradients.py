"""FSDP2's gradient reduce-scatter in FP8: one scale per block of values, summed in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fp8.comm.codec import BlockCodec
from lightning_fp8.comm.collectives import FP8Collectives
from lightning_fp8.comm.traffic import Traffic


class FP8ReduceScatter:
    """An FSDP2 reduce-scatter that sends FP8; for ``FSDPModule.set_custom_reduce_scatter``.

    Args:
        codec: how gradients become bytes.
        min_numel: reductions of fewer values go in bf16.
        traffic: counts the bytes.
        seed: for stochastic rounding.
    """

    def __init__(
        self,
        codec: BlockCodec | None = None,
        min_numel: int = 0,
        traffic: Traffic | None = None,
        seed: int = 0,
    ) -> None:
        self.codec = codec or BlockCodec()
        self.min_numel = min_numel
        self.traffic = Traffic() if traffic is None else traffic
        self.seed = seed
        self._collectives: dict[dist.ProcessGroup, FP8Collectives] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer; part of FSDP's protocol."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write this rank's part of the reduced ``input_tensor`` into ``output_tensor``, on the current stream.

        FSDP ignores what is returned, so the result is there (on a GPU: queued) on return.

        Raises:
            ValueError: ``op`` is none of SUM, AVG and PREMUL_SUM.
        """
        collectives = self._collectives.get(group)
        if collectives is None:
            collectives = FP8Collectives(group, self.codec, self.min_numel, self.traffic, self.seed)
            self._collectives[group] = collectives
        op, factor = _op_and_factor(op)
        collectives.reduce_scatter(output_tensor, input_tensor, op, factor)


def _op_and_factor(op: Any) -> tuple[Any, float]:
    """PREMUL_SUM is a sum with a factor, which only the state that it is pickled by shows."""
    if op == dist.ReduceOp.PREMUL_SUM:
        return dist.ReduceOp.SUM, float(op.__getstate__()[1])
    return op, 1.0
