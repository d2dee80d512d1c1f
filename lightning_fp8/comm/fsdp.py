"""FP8 on the wire for FSDP2, through its public hooks for custom collectives.

The hooks are not recursive: every FSDP module is given its own, and modules that were sharded together one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_fp8.comm.codec import BlockCodec
from lightning_fp8.comm.fsdp_gradients import FP8ReduceScatter
from lightning_fp8.comm.fsdp_weights import FP8AllGather, has_one_scale
from lightning_fp8.comm.rounding import RoundingKeys
from lightning_fp8.comm.shards import is_replicated, managed_parameters, shard_ranks, sharded_together
from lightning_fp8.comm.traffic import Traffic
from lightning_fp8.comm.weight_scales import GatheredScales
from lightning_fp8.linear import Float8Linear, Float8State
from lightning_fp8.model import conversions
from lightning_fp8.ranks import reshard


@dataclass(frozen=True)
class FSDPCommunication:
    """What goes over the wire in FP8 after :func:`communicate_fsdp_in_fp8`.

    Attributes:
        reduce_scatters: the gradients' collectives, as :func:`fsdp_modules`; none where gradients stay as they are.
        all_gathers: the weights' collectives, the same; none where weights stay as they are.
        replicated: whether there are replicas of the shards (HSDP), whose all-reduce FSDP2 lets nobody replace.
    """

    reduce_scatters: list[FP8ReduceScatter]
    all_gathers: list[FP8AllGather]
    replicated: bool


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules of ``model`` that ``fully_shard`` was applied to, ``model`` included.

    Of modules that were sharded together it is the first. Each is an ``nn.Module`` and an ``FSDPModule``, for which
    there is no type.
    """
    firsts: dict[tuple[nn.Module, ...], Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            firsts.setdefault(sharded_together(module), module)
    return list(firsts.values())


def communicate_fsdp_in_fp8(
    model: nn.Module,
    *,
    grad: bool = True,
    param: bool = True,
    codec: BlockCodec | None = None,
    min_numel: int = 0,
    grad_traffic: Traffic | None = None,
    param_traffic: Traffic | None = None,
    keys: RoundingKeys | None = None,
) -> FSDPCommunication:
    """Give every FSDP module of ``model`` its FP8 collectives; called again, it replaces them.

    What a forward left gathered is freed first: it came without FP8, or with other scales.

    Args:
        model: after ``fully_shard``; FP8 layers are converted.
        grad: reduce gradients in FP8.
        param: gather the weights of FP8 layers in FP8.
        codec: how gradients become bytes. Weights under recipes with finer scales than one a weight go in blocks as
            long, of E4M3, rounded to nearest.
        min_numel: collectives of fewer values go without FP8.
        grad_traffic: counts the gradients' bytes.
        param_traffic: counts the weights'.
        keys: for gradients that are rounded stochastically.

    Raises:
        ValueError: ``model`` holds no FSDP module, or ``param`` was asked for and no layer's weight can go in FP8.
    """
    modules = fsdp_modules(model)
    if not modules:
        raise ValueError(
            f"{type(model).__name__} is not sharded by FSDP2: call lightning_fp8.shard(module, mesh) or "
            "torch.distributed.fsdp.fully_shard first, inside configure_model. (Tensor-parallel styles alone send FP8 "
            "by themselves.)"
        )
    reshard(model)
    layers = _gatherable(model) if param else []
    if param and not layers:
        raise ValueError(
            "No weight can be gathered in FP8: no layer of the native backend runs in FP8 with a sharded weight of its "
            "own. Convert before sharding (lightning_fp8.shard does), or leave weights in bf16: param='bf16'."
        )
    codec = codec or BlockCodec()
    keys = RoundingKeys() if keys is None else keys
    reduce_scatters = []
    for module in modules if grad else []:
        reduce_scatter = FP8ReduceScatter(module, codec, min_numel, grad_traffic, keys)
        module.set_custom_reduce_scatter(reduce_scatter)
        reduce_scatters.append(reduce_scatter)
    all_gathers = []
    if param:
        scales = GatheredScales(modules, [layer for layer in layers if has_one_scale(layer)])
        for conversion in conversions(model):
            if conversion.runtime.gathered is not None:
                conversion.runtime.gathered.close()
            conversion.runtime.gathered = scales
        # Parents come first: the first that gathers anything is gathered first in a forward.
        leader = next(module for module in modules if managed_parameters(module))
        blocks = BlockCodec(block=codec.block)
        for module in modules:
            gather = FP8AllGather(module, layers, scales, module is leader, blocks, min_numel, param_traffic)
            module.set_custom_all_gather(gather)
            all_gathers.append(gather)
    return FSDPCommunication(reduce_scatters, all_gathers, any(is_replicated(p) for p in model.parameters()))


def _gatherable(model: nn.Module) -> list[Float8Linear]:
    """The FP8 layers whose weights are sharded and theirs alone: what shares one needs it in high precision."""
    uses = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, Float8Linear)
        and type(layer.fp8) is Float8State
        and isinstance(layer.weight, DTensor)
        # What one rank holds whole is not gathered.
        and shard_ranks(layer.weight) > 1
        and uses[id(layer.weight)] == 1
    ]
