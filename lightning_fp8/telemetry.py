"""The statistics of all linear layers of a model as one, FP8 or not, and their way to the host."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_fp8.casts import Cast
from lightning_fp8.formats import MAX_SCALE, round_down_to_power_of_two
from lightning_fp8.model import Conversion
from lightning_fp8.recipes import ROLES, Recipe, Role
from lightning_fp8.selection import clean_name, in_compiled, linear_layers
from lightning_fp8.statistics import AMAX, SCALE, SCALE_TRANSPOSED
from lightning_fp8.watch import Watch

#: Where a model keeps its :class:`Telemetry` while somebody uses it.
_ATTRIBUTE = "_lightning_fp8_telemetry"


class Readout(NamedTuple):
    """What a reading of the table tells, fp32 ``[layers, 3]`` each.

    Attributes:
        amax: largest magnitude; negative: not seen.
        scale: what multiplied the operand before its cast; NaN in high precision. Where every block has a scale of its
            own, that of the block which holds the amax.
        headroom: powers of two between the scaled amax and the format's largest value; negative: values were clamped;
            NaN where there is no scale, or no amax above zero.
    """

    amax: Tensor
    scale: Tensor
    headroom: Tensor


class Telemetry:
    """The tables of a model, read as one.

    Several users share one: :meth:`attach` makes it or finds it, :meth:`release` takes it down with the last user.

    Args:
        model: its layers, converted or not.

    Attributes:
        names: of the layers, in the order of registration in each table, FP8 layers first.
        recipes: of each layer; ``None`` in high precision.
        layers: the modules, by name.
        conversions: those of the model and of modules inside it.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = {clean_name(name): module for name, module in model.named_modules(remove_duplicate=False)}
        self.conversions: list[Conversion] = []
        self.names: list[str] = []
        self.recipes: list[Recipe | None] = []
        for prefix, conversion in _named_conversions(model):
            self.conversions.append(conversion)
            self.names += [_join(prefix, name) for name in conversion.runtime.table.names]
            self.recipes += [conversion.recipe] * len(conversion.runtime.table.names)
        taken = set(self.names)
        rest = {name: layer for name, layer in linear_layers(model).items() if name not in taken}
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._watch = Watch(rest, self.device)
        self.names += rest
        self.recipes += [None] * len(rest)
        self.layers = {name: modules[name] for name in self.names}
        self._step: int | None = None
        self._users = 0
        self._order = ExecutionOrder(model, self.layers)

    @staticmethod
    def attach(model: nn.Module) -> Telemetry:
        """The model's telemetry, made if there is none; to be released when done."""
        telemetry: Telemetry | None = model.__dict__.get(_ATTRIBUTE)
        if telemetry is None:
            telemetry = model.__dict__[_ATTRIBUTE] = Telemetry(model)
        telemetry._users += 1
        return telemetry

    def release(self, model: nn.Module) -> None:
        """One user less; the last one takes all hooks off the model."""
        self._users -= 1
        if self._users == 0:
            self._watch.close()
            self._order.close()
            model.__dict__.pop(_ATTRIBUTE, None)

    @staticmethod
    def discard(model: nn.Module, rejected: Tensor | bool = True) -> None:
        """Forget what the running step left in the table of layers in high precision, if somebody uses one.

        Args:
            model: perhaps with a telemetry.
            rejected: whether to; a bool tensor ``[]`` on the model's device decides without a host read.
        """
        telemetry: Telemetry | None = model.__dict__.get(_ATTRIBUTE)
        if telemetry is not None:
            telemetry._watch.table.discard(rejected)

    def begin_step(self, step: int) -> None:
        """A training batch begins.

        Args:
            step: number of completed optimizer steps; where it has changed, the windows of layers in high precision
                begin anew (FP8 layers do so by themselves).
        """
        if self._step is not None and step != self._step:
            self._watch.finish_step()
        self._step = step

    def read(self) -> Tensor:
        """A copy of all tables, fp32 ``[layers, 3, 4]``, on the device; columns as in :mod:`.statistics`."""
        tables = [conversion.runtime.table for conversion in self.conversions] + [self._watch.table]
        return torch.cat([table.data.to(self.device, non_blocking=True) for table in tables])

    def slot(self, row: int, role: Role) -> Tensor:
        """A copy of one layer's and role's statistics, fp32 ``[4]``, on the layer's device."""
        for conversion in self.conversions:
            table = conversion.runtime.table
            if row < len(table.names):
                return table.data[row, ROLES.index(role)].clone()
            row -= len(table.names)
        return self._watch.table.data[row, ROLES.index(role)].clone()

    def kept(self, window: Tensor) -> Tensor:
        """Whether the step that left ``window`` still stands, bool ``[]`` on the device.

        Recovery takes back what a rejected step has left in the tables, by marking it not seen.

        Args:
            window: as :meth:`read` gave it before the optimizer step.
        """
        seen, still_seen = (~(data[..., AMAX] < 0) for data in (window, self.read()))
        return ~(seen & ~still_seen).any()

    @property
    def positions(self) -> list[int]:
        """Place of each layer in the order of execution; in the order of registration where that was not seen."""
        return self._order.positions()

    def caps(self) -> Tensor:
        """The largest scale that each operand can get, fp32 ``[layers, 3]`` on the CPU; Inf where there is no cap."""
        caps = torch.full((len(self.names), len(ROLES)), torch.inf, dtype=torch.float32)
        for row, recipe in enumerate(self.recipes):
            for column, role in enumerate(ROLES):
                cast = main_cast(recipe, role)
                if cast is not None and cast.max_scale < MAX_SCALE:
                    cap = torch.tensor(cast.max_scale, dtype=torch.float32)
                    caps[row, column] = round_down_to_power_of_two(cap) if cast.power_of_two else cap
        return caps

    def readout(self, data: Tensor) -> Readout:
        """Interpret a reading.

        Args:
            data: fp32 ``[layers, 3, 4]``, as :meth:`read` gives it, on the CPU.
        """
        return readout(data, self.recipes)

    def select(self, patterns: Iterable[str] | str | None) -> list[int]:
        """Rows of the layers that match one of ``patterns``; all where there are none.

        Raises:
            ValueError: a pattern matches no layer.
        """
        if patterns is None:
            return list(range(len(self.names)))
        patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in self.names):
                raise ValueError(
                    f"The layer pattern {pattern!r} matches no linear layer. Patterns are shell patterns on qualified "
                    f"names, such as: {', '.join(self.names[:3]) or 'none at all'}."
                )
        return [row for row, name in enumerate(self.names) if any(fnmatchcase(name, p) for p in patterns)]


def main_cast(recipe: Recipe | None, role: Role) -> Cast | None:
    """The cast that stands for a role: the straight one, else the transposed one; ``None`` in high precision."""
    if recipe is None:
        return None
    return recipe.casts[role].straight or recipe.casts[role].transposed


def readout(data: Tensor, recipes: list[Recipe | None], amax_column: int = AMAX) -> Readout:
    """Interpret statistics.

    Args:
        data: fp32 ``[layers, 3, 4]`` on the CPU.
        recipes: of each layer.
        amax_column: the window's amax, or the last step's.
    """
    amax = data[..., amax_column]
    scale, headroom = torch.full_like(amax, torch.nan), torch.full_like(amax, torch.nan)
    for recipe in {id(r): r for r in recipes if r is not None}.values():
        rows = torch.tensor([row for row, other in enumerate(recipes) if other is recipe])
        for column, role in enumerate(ROLES):
            cast = main_cast(recipe, role)
            if cast is None:
                continue
            stored = data[rows, column, SCALE if recipe.casts[role].straight else SCALE_TRANSPOSED]
            own = amax[rows, column]
            derived = cast.scale(own)
            used = torch.where(stored > 0, stored, derived)
            scale[rows, column] = torch.where(own < 0, torch.nan, used)
            headroom[rows, column] = torch.where(own > 0, torch.log2(cast.format.max / (own * used)), torch.nan)
    return Readout(amax, scale, headroom)


def history_entry(readout: Readout) -> Tensor:
    """What a history keeps of a readout: log2(amax) and headroom, fp32 ``[layers, 3, 2]``.

    NaN where there is nothing to tell, Inf where the operand was not finite. An amax of zero counts as the smallest
    there is in fp32.
    """
    bad = ~readout.amax.isfinite()
    amax = torch.where(readout.amax < 0, torch.nan, torch.log2(readout.amax.clamp(min=2.0**-149)))
    in_fp8 = ~readout.scale.isnan()
    return torch.stack((torch.where(bad, torch.inf, amax), torch.where(bad & in_fp8, torch.inf, readout.headroom)), -1)


class ExecutionOrder:
    """Sees in which order layers run.

    Compiled code cannot tell: where there is some, layers are taken to run as they were registered. A layer that runs
    several times counts with its first; those that never ran come last.
    """

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module]) -> None:
        self._registered = {id(module): place for place, module in enumerate(model.modules())}
        self._layers = list(layers.values())
        self._seen: dict[int, int] = {}
        self._known: tuple[int, list[int]] | None = None
        compiled = in_compiled(model)
        self._handles = [
            layer.register_forward_pre_hook(self._see)
            for layer in self._layers
            if layer not in compiled and not isinstance(layer, torch.jit.ScriptModule)
        ]

    def _see(self, layer: nn.Module, args: Any) -> None:
        # The hooks stay on, doing next to nothing: compiled code would be compiled again where one is taken off.
        if not torch.compiler.is_compiling() and layer.training:
            self._seen.setdefault(id(layer), len(self._seen))

    def positions(self) -> list[int]:
        """Rank of each layer, 0 for the first; the same list as long as nothing new was seen."""
        seen = self._seen if len(self._handles) == len(self._layers) else {}
        if self._known is not None and self._known[0] == len(seen):
            return self._known[1]
        keys = [(seen.get(id(layer), len(seen)), self._registered[id(layer)]) for layer in self._layers]
        places = [0] * len(keys)
        for place, row in enumerate(sorted(range(len(keys)), key=keys.__getitem__)):
            places[row] = place
        self._known = (len(seen), places)
        return places

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on ``device``, without waiting for the copy."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


class HostCopy:
    """Brings one device tensor at a time to the host without waiting: copy now, look later."""

    def __init__(self) -> None:
        self._host: Tensor | None = None
        self._done: torch.cuda.Event | None = None

    def start(self, source: Tensor) -> None:
        """Begin to copy ``source``; what :meth:`wait` returned before is overwritten."""
        if not source.is_cuda:
            self._host = source.detach().clone()
            return
        if self._host is None or self._host.shape != source.shape or self._host.dtype != source.dtype:
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._host.copy_(source.detach(), non_blocking=True)
        if self._done is None:
            self._done = torch.cuda.Event()
        self._done.record()

    def wait(self) -> Tensor:
        """The copy, on the CPU. A step after :meth:`start` this waits for nothing."""
        if self._host is None:
            raise RuntimeError("Nothing was copied yet: call start() first.")
        if self._done is not None:
            self._done.synchronize()
        return self._host


def _named_conversions(model: nn.Module) -> list[tuple[str, Conversion]]:
    return [
        (clean_name(name), value)
        for name, module in model.named_modules()
        for value in vars(module).values()
        if isinstance(value, Conversion)
    ]


def _join(prefix: str, name: str) -> str:
    return ".".join(part for part in (prefix, name) if part)
