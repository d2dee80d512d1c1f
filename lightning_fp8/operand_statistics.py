"""What the casts of a running step do to their operands, and what those of other recipes would."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8.cast_statistics import STATISTICS, cast_statistics, fits
from lightning_fp8.casts import Cast
from lightning_fp8.eager import run_eagerly
from lightning_fp8.linear import input_of
from lightning_fp8.ranks import local_values
from lightning_fp8.recipes import ROLES, Recipe, StaticScaling
from lightning_fp8.statistics import SLOT_SIZE
from lightning_fp8.telemetry import Telemetry, main_cast


class OperandStatistics:
    """Casts the operands of layers a second time while a step runs, and notes what that does to them.

    Args:
        model: what runs.
        telemetry: its layers, and the scales that their casts take.
        rows: which of them.
        what_if: further recipes, with scales from the data.
        sample_rows: rows of an operand that are compared; ``None``: all.

    Attributes:
        values: fp32 ``[rows, 3, 1 + recipes, 6]`` on the device, NaN where not seen; in the order of
            :data:`~lightning_fp8.cast_statistics.STATISTICS`, the layer's own recipe first.
    """

    def __init__(
        self,
        model: nn.Module,
        telemetry: Telemetry,
        rows: Sequence[int],
        what_if: Sequence[Recipe],
        sample_rows: int | None,
    ) -> None:
        self._model = model
        self._telemetry, self._rows, self._what_if, self._sample_rows = telemetry, list(rows), what_if, sample_rows
        shape = (len(rows), len(ROLES), 1 + len(what_if), len(STATISTICS))
        self.values = torch.full(shape, torch.nan, dtype=torch.float32, device=telemetry.device)
        self._stack: ExitStack | None = None

    def begin(self) -> None:
        """Look from here on. Compiled code runs eagerly, for hooks do not reach into it."""
        self.end()
        self.values.fill_(torch.nan)
        self._stack = ExitStack()
        self._stack.callback(run_eagerly(self._model))
        for index, row in enumerate(self._rows):
            layer = self._telemetry.layers[self._telemetry.names[row]]
            # Ahead of FSDP2's own hook, which frees the weight of a layer that is sharded by itself.
            handle = layer.register_forward_hook(self._hook(index), with_kwargs=True, prepend=True)
            self._stack.callback(handle.remove)

    @property
    def running(self) -> bool:
        """Whether it looks."""
        return self._stack is not None

    def end(self) -> None:
        """Look no longer."""
        if self._stack is not None:
            self._stack.close()
            self._stack = None

    def _hook(self, index: int) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if not layer.training:
                return
            self._note(index, 1, layer.weight)  # type: ignore[arg-type]
            if not getattr(layer, "sees_operands", True):
                return  # It runs as one with others: what goes in and out is not its own.
            self._note(index, 0, input_of(args, kwargs))
            if output.requires_grad:
                output.register_hook(lambda gradient: self._note(index, 2, gradient))

        return hook

    def _note(self, index: int, column: int, x: Tensor) -> None:
        row, role = self._rows[index], ROLES[column]
        x = local_values(x)
        if x.is_nested or not x.numel():
            return
        recipe = self._telemetry.recipes[row]
        casts: list[Cast | None] = [main_cast(recipe, role), *(main_cast(other, role) for other in self._what_if)]
        for place, cast in enumerate(casts):
            if cast is None or not fits(x.shape[-1], cast):
                continue
            other = self._what_if[place - 1] if place else None
            slot = None
            if place == 0 and recipe is not None and recipe.source != "data":
                slot = self._telemetry.slot(row, role)
            elif isinstance(other, StaticScaling):
                slot = torch.full((SLOT_SIZE,), other.scale_of(role), dtype=torch.float32, device=x.device)
            self.values[index, column, place] = cast_statistics(x, cast, slot, self._sample_rows)

    def scalars(self, values: Tensor) -> dict[str, float]:
        """Names and values of what :attr:`values` held, copied to the CPU and flattened."""
        scalars = {}
        table = values.view(self.values.shape).tolist()
        for index, row in enumerate(self._rows):
            for column, role in enumerate(ROLES):
                for place, prefix in enumerate(["", *(f"{label}/" for label in _labels(self._what_if))]):
                    for name, value in zip(STATISTICS, table[index][column][place], strict=True):
                        if value == value:
                            scalars[f"fp8/{self._telemetry.names[row]}/{role}/{prefix}{name}"] = value
        return scalars


def _labels(recipes: Sequence[Recipe]) -> list[str]:
    """A name for each, none twice."""
    names = [recipe.label for recipe in recipes]
    return [
        f"{name}_{number}" if (number := names[: place + 1].count(name)) > 1 else name
        for place, name in enumerate(names)
    ]
