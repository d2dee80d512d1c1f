"""Statistics of linear layers that run in high precision, so that whoever watches the FP8 layers sees these too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8.amaxes import record_amax, record_gradient
from lightning_fp8.linear import input_of
from lightning_fp8.recipes import ROLES
from lightning_fp8.statistics import StatisticsTable
from lightning_fp8.uncopied import UncopiedHook


class Watch:
    """Fills a table of its own while layers train; values and gradients stay what they were.

    Forward hooks do it, so it must begin before a layer is compiled: compiled code does not look for later hooks. A
    layer that is not called, because its weight is used without it, is not seen.

    Args:
        layers: by name; each has a ``weight``.
        device: where the layers run.

    Attributes:
        table: the statistics; scales are unset.
    """

    def __init__(self, layers: Mapping[str, nn.Module], device: torch.device | str) -> None:
        self.table = StatisticsTable(layers, device)
        self._handles = [
            # Ahead of FSDP2's own hook, which frees the weight of a layer that is sharded by itself.
            layer.register_forward_hook(
                _RecordOperands(tuple(self.table.slot(row, role) for role in ROLES)), with_kwargs=True, prepend=True
            )
            for row, layer in enumerate(layers.values())
        ]

    def finish_step(self) -> None:
        """A training step begins after a completed optimizer step: begin a new window of amaxes."""
        self.table.finish_step()

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()


class _RecordOperands(UncopiedHook):
    """The forward hook of one layer. Evaluation records nothing."""

    def __init__(self, slots: tuple[Tensor, ...]) -> None:
        super().__init__(self._record)
        self.slots = slots

    def _record(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        if not layer.training:
            return output
        input_slot, weight_slot, grad_slot = self.slots
        record_amax(input_of(args, kwargs), input_slot)
        record_amax(layer.weight, weight_slot)  # type: ignore[arg-type]
        return record_gradient(output, grad_slot)
