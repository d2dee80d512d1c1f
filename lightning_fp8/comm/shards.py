"""Which parameters an FSDP2 module gathers, and how they are cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_fp8.ranks import local_values


@dataclass(frozen=True)
class ShardedPlace:
    """Where a module holds a parameter that FSDP2 shards: its shard, or while it is gathered the whole of it.

    Attributes:
        module: holds it.
        name: its attribute there.
        mesh: of the shards.
    """

    module: nn.Module
    name: str
    mesh: DeviceMesh

    @staticmethod
    def of(module: nn.Module, name: str) -> ShardedPlace:
        """The place of a parameter that is not gathered now."""
        return ShardedPlace(module, name, cast(DTensor, getattr(module, name)).device_mesh)

    @property
    def parameter(self) -> nn.Parameter:
        """What is there now."""
        return cast(nn.Parameter, getattr(self.module, self.name))

    @property
    def is_gathered(self) -> bool:
        """Whether it is the whole parameter; beside FSDP tensor parallelism may split that too."""
        parameter = self.parameter
        return not isinstance(parameter, DTensor) or parameter.device_mesh != self.mesh


def first_place(module: nn.Module) -> ShardedPlace | None:
    """The place of one of the parameters that an FSDP module gathers; ``None`` if there are none."""
    parameters = managed_parameters(module)
    for part in module.modules() if parameters else ():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter is parameters[0]:
                return ShardedPlace.of(part, name)
    return None


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
    return sum(local_values(parameter).numel() for parameter in parameters)


def padded_shard_shape(parameter: Tensor, ranks: int) -> tuple[int, ...]:
    """Shape of a shard as FSDP gathers it over ``ranks``: the first rank's, which no other exceeds."""
    sharded = cast(DTensor, parameter)
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


def shard_ranks(parameter: Tensor) -> int:
    """How many ranks share the shards of a parameter that FSDP2 sharded."""
    sharded = cast(DTensor, parameter)
    return sharded.device_mesh.size(1 if is_replicated(parameter) else 0)


def is_replicated(parameter: Tensor) -> bool:
    """Whether FSDP shards over the second dimension of its mesh, and replicates over the first."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1 and parameter.placements[0].is_replicate()
