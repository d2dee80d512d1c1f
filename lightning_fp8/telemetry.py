"""The statistics of all linear layers of a model as one, FP8 or not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_fp8.casts import Cast
from lightning_fp8.checks import as_patterns
from lightning_fp8.execution_order import ExecutionOrder
from lightning_fp8.formats import MAX_SCALE
from lightning_fp8.model import Conversion, named_conversions
from lightning_fp8.recipes import ROLES, Recipe, Role
from lightning_fp8.selection import clean_name, join_names, linear_layers, matching
from lightning_fp8.statistics import AMAX, SCALE, SCALE_TRANSPOSED
from lightning_fp8.uncopied import Uncopied
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


class Telemetry(Uncopied):
    """The tables of a model, read as one.

    Several users share one: :meth:`attach` makes it or finds it, :meth:`release` takes it down with the last user. A
    copy of the model has none.

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
        for conversion, names in named_layers(model):
            self.conversions.append(conversion)
            self.names += names
            self.recipes += [conversion.recipe] * len(names)
        taken = set(self.names)
        rest = {name: layer for name, layer in linear_layers(model).items() if name not in taken}
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._watch = Watch(rest, self.device)
        self.names += rest
        self.recipes += [None] * len(rest)
        self.layers = {name: modules[name] for name in self.names}
        self._stepped = False
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

    def begin_batch(self) -> None:
        """A training batch begins: after an optimizer step with new windows of layers in high precision.

        FP8 layers begin theirs by themselves, after their step as well.
        """
        if self._stepped:
            self._watch.finish_step()
        self._stepped = False

    def begin_optimizer_step(self) -> None:
        """The windows are complete: what the next batch shows belongs to another step."""
        self._stepped = True

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
                    caps[row, column] = cast.largest_scale
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
        chosen = set(matching(self.names, as_patterns("layers", patterns)))
        return [row for row, name in enumerate(self.names) if name in chosen]


def named_layers(model: nn.Module) -> list[tuple[Conversion, list[str]]]:
    """Each conversion in ``model``, with the names of its table's layers that patterns match."""
    return [
        (conversion, [join_names(clean_name(prefix), name) for name in conversion.runtime.table.names])
        for prefix, conversion in named_conversions(model)
    ]


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
            # What is not finite tells no scale.
            derived = torch.where(own.isfinite(), cast.scale(own), 1.0)
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
