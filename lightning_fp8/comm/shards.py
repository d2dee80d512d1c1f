"""Which parameters FSDP2 gathers together, and how they are cut."""

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
    """Where a module holds a parameter that FSDP2 shards: its shard, or once it was gathered what is kept of it.

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
        """Whether it holds what was gathered: the whole, or the part that ``reshard_after_forward=<int>`` keeps.

        Beside FSDP tensor parallelism may split that too.
        """
        parameter = self.parameter
        return not isinstance(parameter, DTensor) or parameter.device_mesh != self.mesh


def sharded_together(module: nn.Module) -> tuple[nn.Module, ...]:
    """The modules that one call of ``fully_shard`` took, ``module`` among them, in the order that it visits them.

    FSDP gathers and reduces for all of them at once. Only their state tells (torch 2.11 to 2.13).
    """
    modules: tuple[nn.Module, ...] = cast(FSDPModule, module)._get_fsdp_state()._modules
    return modules


def managed_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that FSDP gathers with those of the FSDP module ``module``; see :func:`managed_places`."""
    return [place.parameter for place in managed_places(module)]


def managed_places(module: nn.Module) -> list[ShardedPlace]:
    """Where the parameters are that FSDP gathers for :func:`sharded_together`, in its order; none is gathered now.

    Those of FSDP modules inside them are not among them. ``fully_shard`` visits children before their parents and takes
    a shared parameter once (torch 2.11 to 2.13).
    """
    places: dict[int, ShardedPlace] = {}
    visited: set[int] = set()

    def visit(part: nn.Module) -> None:
        visited.add(id(part))
        for child in part.children():
            if id(child) not in visited and not isinstance(child, FSDPModule):
                visit(child)
        for name, parameter in part.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                places.setdefault(id(parameter), ShardedPlace.of(part, name))

    for member in sharded_together(module):
        visit(member)
    return list(places.values())


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
