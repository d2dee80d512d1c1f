"""FSDP2's weight all-gather in FP8.

Weights of FP8 layers travel as the codes that the layer would cast them to anyway. Their scale is the layer's own, one
for the whole weight, known to every rank before: when a forward of the model begins, the amaxes of all shards are taken
and reduced over the ranks together. What is gathered is written out in the dtype that FSDP computes in, on the grid of
those codes; casting it with the same scale gives the same codes again. So the all-gather in FP8 changes no result of
layers whose weights have one scale a tensor.

Weights that are cast with finer scales go with one scale per block of values instead, and are rounded twice. All other
parameters travel as they are.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_fp8 import kernels
from lightning_fp8.comm.codec import BlockCodec, use_kernels
from lightning_fp8.comm.collectives import gather_bytes
from lightning_fp8.comm.traffic import Traffic
from lightning_fp8.formats import compute_scale, dequantize
from lightning_fp8.linear import Float8Linear, Float8State
from lightning_fp8.recipes import ROLES, Cast
from lightning_fp8.scaling import ScalingState, reduce_amax
from lightning_fp8.statistics import AMAX, SCALE, SCALE_TRANSPOSED, StatisticsTable

_WEIGHT = ROLES.index("weight")
_ALIGNMENT = 16


class GatheredScales:
    """The scales that the weights of FP8 layers are gathered with: one a weight, the same on every rank.

    Args:
        modules: the FSDP modules that gather them.
        layers: the layers whose weights have one scale each.

    Attributes:
        table: the scales, in the slots of the role ``weight``.
        mode: what they were last set for, ``"training"`` or ``"evaluation"``; ``None`` before.
    """

    def __init__(self, modules: Iterable[nn.Module], layers: Sequence[Float8Linear]) -> None:
        self.modules = [module for module in modules if isinstance(module, FSDPModule)]
        self.layers = layers
        self.table = StatisticsTable([layer.fp8.name for layer in layers])
        self.mode: Literal["training", "evaluation"] | None = None
        self._link()

    def before_training(self) -> None:
        """Free weights that an evaluation left gathered: they are on the grid of its scales, and their amax unnoted."""
        if self.mode == "evaluation":
            for module in self.modules:
                module.reshard()

    @torch.no_grad()
    def update(self, training: bool, dtype: torch.dtype) -> None:
        """Take the amaxes of all shards, reduce them over all ranks at once, and set the scales. Every rank must call.

        Args:
            training: note the amaxes in the layers' own statistics and, where the recipe stores scales, use those.
            dtype: what FSDP computes in: the amaxes are those of the weights in this dtype.
        """
        self.mode = "training" if training else "evaluation"
        if not self.layers:
            return
        shards = [_local(layer.weight) for layer in self.layers]
        if shards[0].device != self.table.device:
            self.table.to(shards[0].device)
            self._link()
        amax = _amaxes(shards).to(dtype).float()
        reduce_amax(amax)
        for scaling, rows, indices in _by_scaling([layer.fp8 for layer in self.layers]):
            self._set_scales(scaling, amax[rows], rows, indices, training)

    def _link(self) -> None:
        for index, layer in enumerate(self.layers):
            layer.fp8.shard_weight(gathered=self.table.slot(index, "weight"))

    def _set_scales(
        self, scaling: ScalingState, amax: Tensor, rows: list[int], indices: list[int], training: bool
    ) -> None:
        """Scales of the layers in ``rows`` here, which are ``indices`` in the table of ``scaling``."""
        casts = scaling.recipe.casts["weight"]
        statistics = scaling.table.data[indices, _WEIGHT]
        telling = amax.isfinite() & (amax > 0)
        for column, cast in ((SCALE, casts.straight), (SCALE_TRANSPOSED, casts.transposed)):
            if cast is None:
                continue
            scale = compute_scale(amax, cast.format.max, cast.margin, cast.power_of_two, cast.max_scale)
            if training and scaling.recipe.source != "data":
                stored = statistics[:, column]
                scale = torch.where(stored == 0, scale, stored)
                # As the cast itself does: an unset scale is taken from the data, if that can tell one.
                statistics[:, column] = torch.where((stored != 0) | telling, scale, stored)
            self.table.data[rows, _WEIGHT, column] = scale
        if training:
            statistics[:, AMAX] = torch.maximum(statistics[:, AMAX], amax)
            scaling.table.data[indices, _WEIGHT] = statistics


class FP8AllGather:
    """An FSDP2 all-gather that sends the weights of FP8 layers in FP8; for ``FSDPModule.set_custom_all_gather``.

    Args:
        module: the FSDP module that it gathers for.
        layers: the FP8 layers whose weights travel in FP8, there and elsewhere.
        scales: those of the layers that have one scale a weight.
        leads: whether this module is gathered first in a forward of the model: it brings the scales up to date.
        codec: how the other layers' weights become bytes.
        min_numel: a module with fewer FP8 weights sends them as they are.
        traffic: counts the bytes.

    Attributes:
        parameters: what the module gathers, in FSDP's order, each with whether it travels in FP8.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Iterable[Float8Linear],
        scales: GatheredScales,
        leads: bool = False,
        codec: BlockCodec | None = None,
        min_numel: int = 0,
        traffic: Traffic | None = None,
    ) -> None:
        self.codec = codec or BlockCodec()
        self.traffic = Traffic() if traffic is None else traffic
        self._module = module
        self._scales = scales
        self._leads = leads
        owners = {id(layer.weight): layer for layer in layers}
        self._parameters = [(parameter, owners.get(id(parameter))) for parameter in managed_parameters(module)]
        if sum(parameter.numel() for parameter, layer in self._parameters if layer is not None) < min_numel:
            self._parameters = [(parameter, None) for parameter, _ in self._parameters]
        self._layouts: dict[int, list[_Segment]] = {}

    @property
    def parameters(self) -> list[tuple[nn.Parameter, bool]]:
        """See above."""
        return [(parameter, layer is not None) for parameter, layer in self._parameters]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer; part of FSDP's protocol."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill ``output_tensor`` with the shards of all ranks, on the current stream; ``input_tensor`` is this one's.

        Raises:
            RuntimeError: the module's parameters are gathered in several dtypes at once, or are not those that it had.
        """
        ranks = group.size()
        segments = self._segments(ranks, input_tensor)
        if self._leads or self._scales.mode is None:
            self._scales.update(self._module.training, input_tensor.dtype)
        sizes = [segment.numel for segment in segments]
        parts = [self._encode(segment, x) for segment, x in zip(segments, input_tensor.split(sizes), strict=True)]
        message = torch.cat(parts) if len(parts) > 1 else parts[0]
        messages = message.new_empty(ranks, message.numel())
        gather_bytes(messages.view(-1), message, group).wait()
        received = messages.split([part.numel() for part in parts], dim=1)
        outputs = output_tensor.view(ranks, -1).split(sizes, dim=1)
        for segment, rows, out in zip(segments, received, outputs, strict=True):
            self._decode(segment, rows, out)
        self.traffic.record((ranks - 1) * message.numel(), (ranks - 1) * input_tensor.numel() * torch.bfloat16.itemsize)

    def _segments(self, ranks: int, input_tensor: Tensor) -> list[_Segment]:
        if ranks not in self._layouts:
            self._layouts[ranks] = _merge(
                _Segment(padded_shard_shape(parameter, ranks), layer) for parameter, layer in self._parameters
            )
        segments = self._layouts[ranks]
        numel = sum(segment.numel for segment in segments)
        if numel != input_tensor.numel() or not input_tensor.is_floating_point():
            raise RuntimeError(
                f"FSDP gathers {input_tensor.numel()} values of {input_tensor.dtype} from each rank, the module's "
                f"parameters are {numel}. FP8 weights need one dtype in each FSDP module "
                "(MixedPrecisionPolicy(param_dtype=...)) and the parameters that it had when the FP8 all-gather was "
                "installed: install it after the last change, or leave weights in bf16 (param='bf16')."
            )
        return segments

    def _encode(self, segment: _Segment, x: Tensor) -> Tensor:
        """A message: uint8, a multiple of 16 bytes long."""
        if not segment.in_fp8:
            return _aligned(x.view(torch.uint8))
        slot, cast = segment.scale_and_cast
        if slot is None:
            return self.codec.encode(x, 1, segment.numel)[0]
        matrix = x.view(segment.shape)
        # The slot's amax is nobody's: the weight's is taken from the shards.
        codes = kernels.cast(matrix, cast, None, slot, True)[0]
        return _aligned(codes[: matrix.shape[0]].reshape(-1).view(torch.uint8))

    def _decode(self, segment: _Segment, messages: Tensor, out: Tensor) -> None:
        """Write the values of all ranks' messages, uint8 ``[ranks, bytes]``, into ``out``, ``[ranks, values]``."""
        if not segment.in_fp8:
            out.copy_(messages[:, : out.shape[1] * out.itemsize].view(out.dtype))
            return
        slot, cast = segment.scale_and_cast
        if slot is None:
            out.copy_(self.codec.decode_rows(messages.contiguous(), segment.numel))
            return
        if use_kernels(out):
            from lightning_fp8.kernels import weight_codes

            weight_codes.decode(messages, out, slot, cast.format)
            return
        codes = messages[:, : out.shape[1]].contiguous().view(cast.format.dtype)
        out.copy_(dequantize(codes, 1 / slot[SCALE]))


@dataclass(frozen=True)
class _Segment:
    """Parameters that travel alike, one behind the other in FSDP's buffer.

    Attributes:
        shape: of a rank's padded shard; flat where it is sent as it is.
        layer: the FP8 layer that it is the weight of, or ``None``.
    """

    shape: tuple[int, ...]
    layer: Float8Linear | None = None

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def in_fp8(self) -> bool:
        # A layer that recovery put into high precision needs its weight as it is.
        return self.layer is not None and self.layer.fp8.enabled

    @property
    def scale_and_cast(self) -> tuple[Tensor | None, Cast]:
        """The slot with the weight's one scale (``None`` under finer scales), and the cast of its codes."""
        fp8 = typing.cast(Float8Linear, self.layer).fp8
        return fp8.gathered_weight, typing.cast(Cast, fp8.scaling.recipe.casts["weight"].straight)


def has_one_scale(layer: Float8Linear) -> bool:
    """Whether the layer's weight is cast with one scale."""
    cast = layer.fp8.scaling.recipe.casts["weight"].straight
    return cast is not None and cast.granularity == "tensorwise"


def managed_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that one FSDP module gathers, in its order: without those of FSDP modules inside it.

    ``fully_shard`` visits children before their parents and takes a shared parameter once (torch 2.11 to 2.13).
    """
    parameters: dict[int, nn.Parameter] = {}
    visited: set[int] = set()

    def visit(part: nn.Module) -> None:
        visited.add(id(part))
        for child in part.children():
            if id(child) not in visited and not isinstance(child, FSDPModule):
                visit(child)
        for parameter in part.parameters(recurse=False):
            if isinstance(parameter, DTensor):
                parameters.setdefault(id(parameter), parameter)

    visit(module)
    return list(parameters.values())


def local_numel(parameters: Iterable[Tensor]) -> int:
    """Values that this rank holds of ``parameters``."""
    return sum(_local(parameter).numel() for parameter in parameters)


def _merge(segments: Iterable[_Segment]) -> list[_Segment]:
    """Join neighbours that are sent as they are."""
    merged: list[_Segment] = []
    for segment in segments:
        if segment.layer is not None:
            merged.append(segment)
        elif merged and merged[-1].layer is None:
            merged[-1] = _Segment((merged[-1].numel + segment.numel,))
        else:
            merged.append(_Segment((segment.numel,)))
    return merged


def padded_shard_shape(parameter: Tensor, ranks: int) -> tuple[int, ...]:
    """Shape of a shard as FSDP gathers it over ``ranks``: the first rank's, which no other exceeds."""
    sharded = typing.cast(DTensor, parameter)
    local = sharded.to_local().shape
    pieces = 1
    for size, placement in zip(sharded.device_mesh.shape, sharded.placements, strict=True):
        if getattr(placement, "dim", None) == 0:
            pieces *= size
    if pieces % ranks:
        return tuple(local)  # FSDP shards another dimension, evenly.
    # Beside FSDP tensor parallelism may cut the first dimension, evenly.
    own_rows = parameter.shape[0] // (pieces // ranks)
    return (-(-own_rows // ranks), *local[1:])


def _by_scaling(states: Sequence[Float8State]) -> Iterator[tuple[ScalingState, list[int], list[int]]]:
    """The layers of each conversion: their places in ``states``, and in the conversion's own table."""
    for scaling in {id(state.scaling): state.scaling for state in states}.values():
        rows = [row for row, state in enumerate(states) if state.scaling is scaling]
        yield scaling, rows, [states[row].index for row in rows]


def _amaxes(tensors: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of each tensor, fp32; 0 for an empty one."""
    amax = torch.zeros(len(tensors), dtype=torch.float32, device=tensors[0].device)
    filled = [index for index, tensor in enumerate(tensors) if tensor.numel()]
    if filled:
        norms = torch._foreach_norm([tensors[index] for index in filled], torch.inf)
        amax[filled] = torch.stack(norms).float()
    return amax


def _aligned(message: Tensor) -> Tensor:
    padding = -message.numel() % _ALIGNMENT
    return F.pad(message, (0, padding)) if padding else message


def _local(parameter: Tensor) -> Tensor:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.detach()
