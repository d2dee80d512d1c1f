"""The scales that FSDP2 gathers FP8 weights with: agreed on beforehand, and noted where a layer has used them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_fp8.comm.shards import ShardedPlace, managed_places
from lightning_fp8.formats import tells_scale
from lightning_fp8.linear import Float8Linear
from lightning_fp8.ranks import local_values
from lightning_fp8.recipes import ROLES
from lightning_fp8.scaling import ScalingState, reduce_amax
from lightning_fp8.statistics import AMAX, NOT_SEEN, SCALE, SCALE_TRANSPOSED, StatisticsTable

_WEIGHT = ROLES.index("weight")
_SCALES = slice(SCALE, SCALE_TRANSPOSED + 1)
_MOST_MASKS = 64


class GatheredScales:
    """The scales that the weights of FP8 layers are gathered with: one a weight, the same on every rank that gathers.

    What a step leaves in the layers' statistics is what it leaves without FP8 on the wire: the amax, and the first
    scale, of a weight that its layer has multiplied with. A layer that is gathered and not used leaves none.

    Args:
        modules: the FSDP modules that gather them; none is gathered now.
        layers: the layers whose weights have one scale each.

    Attributes:
        table: the scales that layers cast gathered weights with, in the slots of the role ``weight``. Their amaxes are
            of rounded weights, and only tell which layers have run.
        modes: whether each layer was training when scales were last set; empty before.
        steps: how often the stored scales of each conversion had moved then.
    """

    def __init__(self, modules: Iterable[nn.Module], layers: Sequence[Float8Linear]) -> None:
        self.modules = [module for module in modules if isinstance(module, FSDPModule)]
        self.layers = layers
        names = [layer.fp8.name for layer in layers]
        self.table = StatisticsTable(names)
        # The same scales in slots of their own: the casts before the wire must not look like layers that run.
        self._wire = StatisticsTable(names)
        self._amax = torch.zeros(len(layers), dtype=torch.float32)
        self._places = [ShardedPlace.of(layer, "weight") for layer in layers]
        self.modes: tuple[bool, ...] = ()
        self.steps: tuple[int, ...] = ()
        self._stale = True
        self._link()
        # For models without a Trainer: ahead of FSDP's own hook, which would take weights as it finds them.
        self._hooks = [
            root.register_forward_pre_hook(self._before_forward(root), prepend=True) for root in _roots(self.modules)
        ]

    def wire_slot(self, layer: Float8Linear) -> Tensor | None:
        """The slot with the scale that the weight of ``layer`` is sent with; ``None`` if it has finer ones."""
        return self._wire_slots.get(id(layer))

    def before_training(self) -> None:
        """A training step begins. What a forward without backward left gathered may be on the grid of other scales."""
        self._stale = True
        self._free_weights_of_other_scales()

    def weights_changed(self) -> None:
        """The weights may be others now: what is gathered next is preceded by new scales."""
        self._stale = True

    def fit(self, layers: Iterable[Float8Linear]) -> bool:
        """Whether scales were set since the weights last changed, and for ``layers`` training, or not, as they are."""
        rows = (self._rows.get(id(layer)) for layer in layers)
        return not self._stale and all(self.layers[row].training == self.modes[row] for row in rows if row is not None)

    @torch.inference_mode(False)
    @torch.no_grad()
    def update(self, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        """Take the amaxes of all shards, reduce them over the ranks at once, and set the scales.

        Weights that are gathered keep theirs: they are on the grid of these.

        Args:
            group: the ranks that hold the shards; every one must call.
            dtype: what FSDP computes in: the amaxes are those of the weights in this dtype.
        """
        self.note()  # With the amaxes that are replaced below.
        self._stale = False
        self.modes, self.steps = self._modes(), self._steps()
        if not self.layers:
            return
        self._follow()
        gathered = tuple(place.is_gathered for place in self._places)
        shards = [
            None if held else local_values(place.parameter).detach()
            for place, held in zip(self._places, gathered, strict=True)
        ]
        held = self._mask(gathered)
        stored = torch.where(self._mask(self.modes), self._stored_scales(), torch.inf)
        # A rank on which a layer has not run yet may know no scale of it: all take the smallest that any of them knows.
        message = torch.cat([self._amaxes(shards).to(dtype).float()[None], -stored])
        reduce_amax(message, group)
        amax, stored = message[0], -message[1:]
        self._amax.copy_(torch.where(held, self._amax, amax))
        for scaling, rows, _ in self._parts:
            casts = scaling.recipe.casts["weight"]
            for column, cast in enumerate((casts.straight, casts.transposed)):
                if cast is None:
                    continue
                scale = cast.scale(amax[rows])
                known = stored[column, rows]
                scale = torch.where(known.isinf(), scale, known)
                scales = self.table.data[:, _WEIGHT, SCALE + column]
                scales.index_copy_(0, rows, torch.where(held[rows], scales[rows], scale))
        self._wire.data[:, _WEIGHT, _SCALES] = self.table.data[:, _WEIGHT, _SCALES]

    @torch.inference_mode(False)
    @torch.no_grad()
    def note(self) -> None:
        """Enter the amaxes of the weights of layers that have run into the layers' statistics, and first scales."""
        if not self.modes:
            return
        self._follow()
        used = self.table.data[:, _WEIGHT, AMAX]
        for scaling, rows, indices in self._parts:
            amax = torch.where(used[rows] < 0, NOT_SEEN, self._amax[rows])
            weights = scaling.table.data[:, _WEIGHT]
            statistics = weights[indices]
            statistics[:, AMAX] = torch.maximum(statistics[:, AMAX], amax)
            if scaling.recipe.source != "data":
                # As the cast itself does: an unset scale is taken from the data, if that can tell one.
                first = (statistics[:, SCALE] == 0) & tells_scale(amax)
                gathered = self.table.data[:, _WEIGHT, SCALE][rows]
                statistics[:, SCALE] = torch.where(first, gathered, statistics[:, SCALE])
            weights.index_copy_(0, indices, statistics)
        used.fill_(NOT_SEEN)

    def close(self) -> None:
        """Note what is left, and let go of the modules: other scales take the place of these."""
        self.note()
        for hook in self._hooks:
            hook.remove()

    def _before_forward(self, root: nn.Module) -> Callable[[nn.Module, Any], None]:
        place = next(iter(managed_places(root)), None)

        def hook(module: nn.Module, args: Any) -> None:
            if module.training:
                self._free_weights_of_other_scales()
            if place is None or not place.is_gathered:  # Else this forward is a part of another.
                self._stale = True

        return hook

    def _free_weights_of_other_scales(self) -> None:
        """Free gathered weights, if layers changed between training and evaluation since, or scales have moved."""
        if self.modes and (self.modes, self.steps) != (self._modes(), self._steps()):
            for module in self.modules:
                module.reshard()

    def _modes(self) -> tuple[bool, ...]:
        return tuple(layer.training for layer in self.layers)

    def _steps(self) -> tuple[int, ...]:
        return tuple(scaling.steps for scaling, _, _ in self._parts)

    def _mask(self, flags: tuple[bool, ...]) -> Tensor:
        """``flags`` on the device. They come back step for step: made anew, they would be waited for."""
        if len(self._masks) > _MOST_MASKS:
            self._masks.clear()
        if flags not in self._masks:
            self._masks[flags] = torch.tensor(flags, device=self.table.device)
        return self._masks[flags]

    def _amaxes(self, shards: Sequence[Tensor | None]) -> Tensor:
        """The largest magnitude of each, fp32; 0 for one that is empty or not there."""
        filled = [shard for shard in shards if shard is not None and shard.numel()]
        amaxes = iter(torch._foreach_norm(filled, torch.inf) if filled else ())
        zero = torch.zeros((), dtype=torch.float32, device=self.table.device)
        return torch.stack([next(amaxes).float() if s is not None and s.numel() else zero for s in shards])

    def _stored_scales(self) -> Tensor:
        """The layers' stored scales, straight and transposed, fp32 ``[2, layers]``; infinite where there is none."""
        stored = torch.full((2, len(self.layers)), torch.inf, dtype=torch.float32, device=self.table.device)
        for scaling, rows, indices in self._parts:
            if scaling.recipe.source != "data":
                scales = scaling.table.data[:, _WEIGHT, _SCALES][indices].t()
                stored.index_copy_(1, rows, torch.where(scales == 0, torch.inf, scales))
        return stored

    def _follow(self) -> None:
        """Move to where the layers' own scales are."""
        device = self.layers[0].fp8.scaling.table.device
        if device != self.table.device:
            self.table.to(device)
            self._wire.to(device)
            self._amax = self._amax.to(device)
            self._link()

    def _link(self) -> None:
        """Take slots and what is read with them anew, after the tables moved."""
        self._masks: dict[tuple[bool, ...], Tensor] = {}
        self._rows = {id(layer): row for row, layer in enumerate(self.layers)}
        self._parts = list(_by_scaling(self.layers, self.table.device))
        self._wire_slots = {id(layer): self._wire.slot(row, "weight") for row, layer in enumerate(self.layers)}
        for row, layer in enumerate(self.layers):
            layer.fp8.shard_weight(gathered=self.table.slot(row, "weight"))


def _roots(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that lie in no other of ``modules``."""
    inside = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in inside]


def _by_scaling(layers: Sequence[Float8Linear], device: torch.device) -> Iterator[tuple[ScalingState, Tensor, Tensor]]:
    """The layers of each conversion: their places in ``layers``, and in the conversion's own table.

    Indices are on the device: made from lists, each use of them would wait for a copy.
    """
    for scaling in {id(layer.fp8.scaling): layer.fp8.scaling for layer in layers}.values():
        rows = [row for row, layer in enumerate(layers) if layer.fp8.scaling is scaling]
        indices = [layers[row].fp8.index for row in rows]
        yield scaling, torch.tensor(rows, device=device), torch.tensor(indices, device=device)
