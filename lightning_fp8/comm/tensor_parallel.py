"""Tensor parallelism for FP8 layers: torch's parallel styles, with FP8 all-gathers of activations and gradients.

    parallelize_module(block, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

Parameters become the same DTensors as under torch's styles of the same names, so checkpoints are the same. The GEMMs
run in FP8 on each rank's part. Only what is gathered goes in FP8 (activations on entering a column-wise layer,
gradients on entering a row-wise one backwards, both under sequence parallelism); sums over ranks stay in the dtype of
the activations. Layers that are not in FP8 are left to torch's own styles.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.parallel import SequenceParallel
from torch.distributed.tensor.placement_types import Placement

from lightning_fp8.comm.codec import BlockCodec
from lightning_fp8.comm.collectives import FP8Collectives
from lightning_fp8.comm.links import DEFAULT_MIN_NUMEL, NEVER, Wire, check_wire, link_between
from lightning_fp8.comm.traffic import Traffic
from lightning_fp8.linear import Float8Linear, Float8State
from lightning_fp8.ranks import all_gather, local_values
from lightning_fp8.selection import why_not_weight

__all__ = ["ColwiseParallel", "RowwiseParallel", "SequenceParallel"]


class _FP8Style(ABC):
    """What both styles have in common.

    Args:
        all_gather: ``"fp8"``, or ``"bf16"`` for the activations' own dtype, as torch does it.
        min_numel: gathers of fewer values go as they are; by default what the link between the ranks makes worth it.
        block: values that share a scale on the wire.
        traffic: counts the bytes of the gathers.

    Raises:
        ValueError: another word.
    """

    def __init__(
        self,
        *,
        all_gather: Wire = "fp8",
        min_numel: int | None = None,
        block: int = 128,
        traffic: Traffic | None = None,
        **layouts: Any,
    ) -> None:
        super().__init__(**layouts)
        check_wire(all_gather=all_gather)
        self.all_gather = all_gather
        self.min_numel = min_numel
        self.codec = BlockCodec(block=block)
        self.traffic = Traffic() if traffic is None else traffic

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, Float8Linear):
            return super()._apply(module, device_mesh)  # type: ignore[misc, no-any-return]
        if type(module.fp8) is not Float8State:
            raise ValueError(
                f"The layer {module.fp8.name!r} runs by another library than the native backend, which knows no tensor "
                "parallelism: convert with backend='native'."
            )
        self._check_layouts()
        self._partition_linear_fn("", module, device_mesh)  # type: ignore[attr-defined]
        weight: Any = module.weight
        recipe = module.fp8.scaling.recipe
        if (against := why_not_weight(weight.to_local(), recipe)) is not None:
            raise ValueError(
                f"The part of {module.fp8.name!r} on each of {device_mesh.size()} ranks cannot run in FP8: {against}. "
                "Leave it out with LayerSelection(exclude=[...]), or use fewer ranks."
            )
        parallel: Any = module
        parallel.__class__ = _ParallelLinear
        parallel.tensor_parallel = self._exchange(self._collectives(device_mesh), device_mesh)
        return module

    def _collectives(self, mesh: DeviceMesh) -> FP8Collectives:
        group = mesh.get_group()
        min_numel = self.min_numel
        if self.all_gather == "bf16":
            min_numel = NEVER
        elif min_numel is None:
            min_numel = DEFAULT_MIN_NUMEL[link_between(group, torch.device(mesh.device_type))]
        return FP8Collectives(group, self.codec, min_numel, self.traffic)

    @abstractmethod
    def _check_layouts(self) -> None:
        """Raise a ``ValueError`` on layouts that FP8 layers do not take."""

    @abstractmethod
    def _exchange(self, collectives: FP8Collectives, mesh: DeviceMesh) -> _Exchange:
        """What a layer does around its own product."""


class ColwiseParallel(_FP8Style, torch_styles.ColwiseParallel):
    """Each rank computes a part of the output features.

    Args:
        input_layouts: of the input: ``Replicate()``, or ``Shard(dim)`` under sequence parallelism: then it is gathered.
        output_layouts: ``Shard(-1)``.
        use_local_output: give a tensor, not a DTensor.
        all_gather: ``"fp8"``, or ``"bf16"`` for the activations' own dtype, as torch does it.
        min_numel: gathers of fewer values go as they are; by default what the link between the ranks makes worth it.
        block: values that share a scale on the wire.
        traffic: counts the bytes of the gathers.

    Raises:
        ValueError: when applied to an FP8 layer, on other layouts or sizes that do not fit.
    """

    def _check_layouts(self) -> None:
        if self.output_layouts[0] != Shard(-1) or not _is_whole_or_shard(self.input_layouts[0]):
            raise ValueError(
                "For FP8 layers ColwiseParallel takes inputs of Replicate() or Shard(dim) and gives Shard(-1); got "
                f"{self.input_layouts[0]} -> {self.output_layouts[0]}."
            )

    def _exchange(self, collectives: FP8Collectives, mesh: DeviceMesh) -> _Exchange:
        layout = self.input_layouts[0]
        enter = _Gather(collectives, layout.dim) if isinstance(layout, Shard) else _Copy(collectives.group)
        return _Exchange(
            mesh=mesh,
            input_layout=layout,
            enter=enter,
            leave=_keep,
            output_layout=self.output_layouts[0],
            local_output=self.use_local_output,
        )


class RowwiseParallel(_FP8Style, torch_styles.RowwiseParallel):
    """Each rank computes with a part of the input features; the results are summed.

    Args:
        input_layouts: ``Shard(-1)``.
        output_layouts: of the output: ``Replicate()``, or ``Shard(dim)`` under sequence parallelism: then its gradient
            is gathered.
        use_local_output: give a tensor, not a DTensor.
        all_gather: ``"fp8"``, or ``"bf16"`` for the activations' own dtype, as torch does it.
        min_numel: gathers of fewer values go as they are; by default what the link between the ranks makes worth it.
        block: values that share a scale on the wire.
        traffic: counts the bytes of the gathers.

    Raises:
        ValueError: when applied to an FP8 layer, on other layouts or sizes that do not fit.
    """

    def _check_layouts(self) -> None:
        if self.input_layouts[0] != Shard(-1) or not _is_whole_or_shard(self.output_layouts[0]):
            raise ValueError(
                "For FP8 layers RowwiseParallel takes inputs of Shard(-1) and gives Replicate() or Shard(dim); got "
                f"{self.input_layouts[0]} -> {self.output_layouts[0]}."
            )

    def _exchange(self, collectives: FP8Collectives, mesh: DeviceMesh) -> _Exchange:
        layout = self.output_layouts[0]
        leave = _SumAndScatter(collectives, layout.dim) if isinstance(layout, Shard) else _Sum(collectives.group)
        return _Exchange(
            mesh=mesh,
            input_layout=self.input_layouts[0],
            enter=_keep,
            leave=leave,
            output_layout=layout,
            local_output=self.use_local_output,
            # A bias is added to a part of the sequence only: its gradient is a sum over the ranks.
            share_bias=_Copy(collectives.group) if isinstance(layout, Shard) else _keep,
        )


@dataclass(frozen=True, kw_only=True)
class _Exchange:
    """What a tensor-parallel layer does around its own product.

    Attributes:
        mesh: the ranks.
        input_layout: which part of the input each rank has.
        enter: from that part to what it multiplies.
        leave: from its product to its part of the output.
        output_layout: which part that is.
        local_output: give a tensor, not a DTensor.
        share_bias: from the bias to what is added after ``leave``; ``None``: it is a part, added within the product.
    """

    mesh: DeviceMesh
    input_layout: Placement
    enter: Callable[[Tensor], Tensor]
    leave: Callable[[Tensor], Tensor]
    output_layout: Placement
    local_output: bool
    share_bias: Callable[[Tensor], Tensor] | None = None

    def local_input(self, x: Tensor) -> Tensor:
        if isinstance(x, DTensor):
            x = x.redistribute(placements=[self.input_layout]).to_local()
        return x

    def output(self, y: Tensor) -> Tensor:
        return y if self.local_output else DTensor.from_local(y, self.mesh, [self.output_layout], run_check=False)


class _ParallelLinear(Float8Linear):
    """A :class:`Float8Linear` that holds a part of its weight.

    Attributes:
        tensor_parallel: what it exchanges with the other ranks.
    """

    tensor_parallel: _Exchange

    def forward(self, input: Tensor) -> Tensor:
        parallel = self.tensor_parallel
        y = parallel.leave(super().forward(parallel.enter(parallel.local_input(input))))
        if parallel.share_bias is not None and self.bias is not None:
            y = y + parallel.share_bias(local_values(self.bias)).to(y.dtype)
        return parallel.output(y)

    def local_parameters(self) -> tuple[Tensor, Tensor | None]:
        bias_after = self.tensor_parallel.share_bias is not None
        return local_values(self.weight), None if self.bias is None or bias_after else local_values(self.bias)


def _is_whole_or_shard(layout: Placement) -> bool:
    return layout == Replicate() or isinstance(layout, Shard)


# --- what is exchanged: each a function whose gradient is another of them ---------------------------------------------


def _keep(x: Tensor) -> Tensor:
    return x


class _Function:
    """A differentiable exchange; ``torch.compile`` leaves it to eager code: its messages are no graph operations."""

    def __init__(self, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> None:
        self._forward = forward
        self._backward = backward

    @torch.compiler.disable
    def __call__(self, x: Tensor) -> Tensor:
        return _Exchanged.apply(x, self._forward, self._backward)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.exchange = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.exchange(gradient), None, None


class _Copy(_Function):
    """The same on all ranks, each of which uses it for its own part: gradients are summed."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(torch.Tensor.clone, lambda gradient: _sum(gradient, group))


class _Sum(_Function):
    """The sum over the ranks."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(lambda x: _sum(x, group), torch.Tensor.clone)


class _Gather(_Function):
    """All ranks' parts along ``dim``, in FP8; gradients are summed, and each rank keeps its part."""

    def __init__(self, collectives: FP8Collectives, dim: int) -> None:
        super().__init__(
            lambda x: _gather(x, dim, collectives), lambda gradient: _scatter_sum(gradient, dim, collectives.group)
        )


class _SumAndScatter(_Function):
    """The sum over the ranks, each of which keeps its part along ``dim``; gradients are gathered in FP8."""

    def __init__(self, collectives: FP8Collectives, dim: int) -> None:
        super().__init__(
            lambda x: _scatter_sum(x, dim, collectives.group), lambda gradient: _gather(gradient, dim, collectives)
        )


def _sum(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gather(x: Tensor, dim: int, collectives: FP8Collectives) -> Tensor:
    part = x.movedim(dim, 0).contiguous()
    whole = part.new_empty(part.shape[0] * collectives.world_size, *part.shape[1:])
    if whole.numel() >= collectives.min_numel:
        collectives.all_gather(whole, part)
    else:
        all_gather(whole.view(-1).view(torch.uint8), part.view(-1).view(torch.uint8), collectives.group).wait()
    return whole.movedim(0, dim).contiguous()


def _scatter_sum(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    ranks = dist.get_world_size(group)
    if x.shape[dim] % ranks:
        raise ValueError(
            f"Dimension {dim} of {tuple(x.shape)} cannot be cut evenly for {ranks} ranks: pad the sequence."
        )
    whole = x.movedim(dim, 0).contiguous()
    part = whole.new_empty(whole.shape[0] // ranks, *whole.shape[1:])
    # torch 2.13 renamed it and warns of the old name.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(part, whole, group=group)
    return part.movedim(0, dim).contiguous()
