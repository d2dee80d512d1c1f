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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fp8 import kernels
from lightning_fp8.casts import Cast
from lightning_fp8.comm.codec import BlockCodec, use_kernels
from lightning_fp8.comm.shards import managed_places, padded_shard_shape
from lightning_fp8.comm.traffic import Traffic
from lightning_fp8.comm.weight_scales import GatheredScales
from lightning_fp8.formats import dequantize
from lightning_fp8.linear import Float8Linear
from lightning_fp8.ranks import all_gather
from lightning_fp8.statistics import SCALE

_ALIGNMENT = 16


class FP8AllGather:
    """An FSDP2 all-gather that sends the weights of FP8 layers in FP8; for ``FSDPModule.set_custom_all_gather``.

    Args:
        module: the FSDP module that it gathers for, with those sharded together with it; none is gathered now.
        layers: the FP8 layers whose weights travel in FP8, there and elsewhere.
        scales: those of the layers that have one scale a weight.
        leads: whether this module is gathered first in a forward of the model, as a rule: whoever calls the model, and
            has told nobody that weights have changed, gets scales that fit them.
        codec: how the other layers' weights become bytes.
        min_numel: a module with fewer FP8 weights sends them as they are.
        traffic: counts the bytes.

    Attributes:
        parameters: what is gathered, in FSDP's order, each with whether it travels in FP8.
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
        self._scales = scales
        self._leads = leads
        owners = {id(layer.weight): layer for layer in layers}
        self._places = managed_places(module)
        self._parameters = [(place.parameter, owners.get(id(place.parameter))) for place in self._places]
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
        plain_bytes = (ranks - 1) * input_tensor.numel() * torch.bfloat16.itemsize
        if self._places[0].is_gathered:
            # With reshard_after_forward=<int> a smaller group gathers for backward what forward gathered before: it is
            # on the grid of its scales, and cut without regard to parameters' rows.
            all_gather(output_tensor, input_tensor, group).wait()
            self.traffic.record((ranks - 1) * input_tensor.numel() * input_tensor.itemsize, plain_bytes)
            return
        segments = self._segments(ranks, input_tensor)
        if self._leads or not self._scales.fit(layer for _, layer in self._parameters if layer is not None):
            self._scales.update(group, input_tensor.dtype)
        sizes = [segment.numel for segment in segments]
        parts = [self._encode(segment, x) for segment, x in zip(segments, input_tensor.split(sizes), strict=True)]
        message = torch.cat(parts) if len(parts) > 1 else parts[0]
        messages = message.new_empty(ranks, message.numel())
        all_gather(messages.view(-1), message, group).wait()
        received = messages.split([part.numel() for part in parts], dim=1)
        outputs = output_tensor.view(ranks, -1).split(sizes, dim=1)
        for segment, rows, out in zip(segments, received, outputs, strict=True):
            self._decode(segment, rows, out)
        self.traffic.record((ranks - 1) * message.numel(), plain_bytes)

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
        slot, cast = self._scale_and_cast(segment)
        if slot is None:
            return self.codec.encode(x, 1, segment.numel)[0]
        matrix = x.view(segment.shape)
        codes = kernels.cast(matrix, cast, None, slot, True)[0]
        return _aligned(codes[: matrix.shape[0]].reshape(-1).view(torch.uint8))

    def _decode(self, segment: _Segment, messages: Tensor, out: Tensor) -> None:
        """Write the values of all ranks' messages, uint8 ``[ranks, bytes]``, into ``out``, ``[ranks, values]``."""
        if not segment.in_fp8:
            out.copy_(messages[:, : out.shape[1] * out.itemsize].view(out.dtype))
            return
        slot, cast = self._scale_and_cast(segment)
        if slot is None:
            out.copy_(self.codec.decode_rows(messages.contiguous(), segment.numel))
            return
        if use_kernels(out):
            from lightning_fp8.kernels import weight_codes

            weight_codes.decode(messages, out, slot, cast.format)
            return
        codes = messages[:, : out.shape[1]].contiguous().view(cast.format.dtype)
        out.copy_(dequantize(codes, 1 / slot[SCALE]))

    def _scale_and_cast(self, segment: _Segment) -> tuple[Tensor | None, Cast]:
        """The slot with the weight's one scale (``None`` under finer scales), and the cast of its codes."""
        layer = typing.cast(Float8Linear, segment.layer)
        return self._scales.wire_slot(layer), typing.cast(Cast, layer.fp8.scaling.recipe.casts["weight"].straight)


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


def has_one_scale(layer: Float8Linear) -> bool:
    """Whether the layer's weight is cast with one scale."""
    cast = layer.fp8.scaling.recipe.casts["weight"].straight
    return cast is not None and cast.granularity == "tensorwise"


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


def _aligned(message: Tensor) -> Tensor:
    padding = -message.numel() % _ALIGNMENT
    return F.pad(message, (0, padding)) if padding else message
