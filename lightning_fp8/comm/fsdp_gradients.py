"""FSDP2's gradient reduce-scatter in FP8: one scale per block of values, summed in fp32.

Under tensor parallelism some parameters are split over the tensor-parallel ranks, and the others must stay the same on
them. A block that held gradients of both kinds would have another scale on each of those ranks, and what must stay the
same would drift apart. So the two kinds are reduced one after the other there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fp8.comm.codec import BlockCodec
from lightning_fp8.comm.collectives import FP8Collectives
from lightning_fp8.comm.links import NEVER
from lightning_fp8.comm.rounding import RoundingKeys
from lightning_fp8.comm.shards import managed_parameters, padded_shard_shape
from lightning_fp8.comm.traffic import Traffic


class FP8ReduceScatter:
    """An FSDP2 reduce-scatter that sends FP8; for ``FSDPModule.set_custom_reduce_scatter``.

    Args:
        module: the FSDP module that it reduces for, with those sharded together with it; none is gathered now.
        codec: how gradients become bytes.
        min_numel: reductions of fewer values go in bf16.
        traffic: counts the bytes.
        keys: for stochastic rounding; all modules of a model take theirs from one object.
    """

    def __init__(
        self,
        module: nn.Module,
        codec: BlockCodec | None = None,
        min_numel: int = 0,
        traffic: Traffic | None = None,
        keys: RoundingKeys | None = None,
    ) -> None:
        self.codec = codec or BlockCodec()
        self.min_numel = min_numel
        self.traffic = Traffic() if traffic is None else traffic
        self.keys = RoundingKeys() if keys is None else keys
        parameters = [parameter for parameter in managed_parameters(module) if parameter.requires_grad]
        self._mixed = len({_is_split(parameter) for parameter in parameters}) > 1
        self._parameters = parameters
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
        op, factor = _op_and_factor(op)
        if not self._mixed:
            self._collectives_of(group).reduce_scatter(output_tensor, input_tensor, op, factor)
            return
        ranks = group.size()
        shapes = [padded_shard_shape(parameter, ranks) for parameter in self._parameters]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        if sum(sizes) * ranks != input_tensor.numel():
            # Some parameters have no gradient this time, and nobody tells which. In bf16 no value touches another.
            bf16 = FP8Collectives(group, self.codec, NEVER, self.traffic)
            bf16.reduce_scatter(output_tensor, input_tensor, op, factor)
            return
        inputs, outputs = input_tensor.view(ranks, -1).split(sizes, dim=1), output_tensor.split(sizes)
        for kind in (False, True):
            mine = [index for index, parameter in enumerate(self._parameters) if _is_split(parameter) == kind]
            whole = torch.cat([inputs[index] for index in mine], dim=1)
            part = whole.new_empty(whole.shape[1], dtype=output_tensor.dtype)
            self._collectives_of(group).reduce_scatter(part, whole.view(-1), op, factor)
            torch._foreach_copy_([outputs[i] for i in mine], part.split([sizes[i] for i in mine]))

    def _collectives_of(self, group: dist.ProcessGroup) -> FP8Collectives:
        if group not in self._collectives:
            self._collectives[group] = FP8Collectives(group, self.codec, self.min_numel, self.traffic, self.keys)
        return self._collectives[group]


def _is_split(parameter: nn.Parameter) -> bool:
    """Whether more than FSDP shards it."""
    return isinstance(parameter, DTensor) and sum(not place.is_replicate() for place in parameter.placements) > 1


def _op_and_factor(op: Any) -> tuple[Any, float]:
    """PREMUL_SUM is a sum with a factor, which only the state that it is pickled by shows."""
    if op == dist.ReduceOp.PREMUL_SUM:
        return dist.ReduceOp.SUM, float(op.__getstate__()[1])
    return op, 1.0
