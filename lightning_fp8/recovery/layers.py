"""What recovery asks of the FP8 layers of a model: their amaxes, to forget a step, to leave FP8 for a while."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8.host_copy import on_cpu
from lightning_fp8.model import Conversion
from lightning_fp8.recipes import ROLES
from lightning_fp8.statistics import LAST_AMAX, NOT_SEEN
from lightning_fp8.telemetry import Telemetry, named_layers


class FP8Layers:
    """All converted layers of a model as one table.

    Args:
        model: holds :class:`~lightning_fp8.model.Conversion` s, or none.

    Attributes:
        names: of the layers, as ``model`` names them without the parts that wrappers add.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._conversions: list[Conversion] = []
        self._rows: dict[str, tuple[Conversion, str]] = {}
        for conversion, names in named_layers(model):
            self._conversions.append(conversion)
            for name, row in zip(names, conversion.runtime.table.names, strict=True):
                self._rows[name] = (conversion, row)
        self.names = list(self._rows)
        self._switched_off: set[str] = set()

    def amax(self) -> Tensor:
        """Of the running step, fp32 ``[layers, roles]``, negative where not seen."""
        return torch.cat([conversion.runtime.table.amax for conversion in self._conversions])

    def last_amax(self) -> Tensor:
        """Of the last step that was taken, the same."""
        return torch.cat([conversion.runtime.table.data[..., LAST_AMAX] for conversion in self._conversions])

    def forget_last_amax(self) -> None:
        """Let the next amaxes be as if they were the first."""
        for conversion in self._conversions:
            conversion.runtime.table.data[..., LAST_AMAX] = NOT_SEEN

    def multiply_amax(self, name: str, role: str | None, factor: float) -> None:
        """Falsify a running amax, to rehearse; ``role`` None is all of them."""
        conversion, row = self._rows[name]
        amax = conversion.runtime.table.amax[conversion.runtime.table.names.index(row)]
        for index, each in enumerate(ROLES):
            if role in (None, each):
                amax[index] *= factor

    def discard(self, rejected: Tensor | bool = True) -> None:
        """Forget the running step, if ``rejected``; layers in high precision that somebody watches forget it too."""
        for conversion in self._conversions:
            conversion.runtime.discard(rejected)
        Telemetry.discard(self._model, rejected)

    def set_enabled(self, names: Iterable[str], enabled: bool) -> None:
        """Switch layers to high precision, or back to FP8."""
        for name in names:
            if name in self._rows:
                conversion, row = self._rows[name]
                conversion.runtime.set_enabled([row], enabled)
                (self._switched_off.discard if enabled else self._switched_off.add)(name)

    def all_back(self) -> None:
        """Switch every layer back to FP8 that was switched to high precision here."""
        self.set_enabled(tuple(self._switched_off), True)

    def live_state(self) -> dict[str, Any]:
        """The scale state of all of them, its tensors where they are."""
        return {str(index): conversion.live_state() for index, conversion in enumerate(self._conversions)}

    def state_dict(self) -> dict[str, Any]:
        """The same, on the CPU."""
        return on_cpu(self.live_state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to ``state``."""
        for index, conversion in enumerate(self._conversions):
            conversion.load_state_dict(state[str(index)])
