"""In which order the layers of a model run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_fp8.selection import in_compiled
from lightning_fp8.uncopied import UncopiedHook


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
            layer.register_forward_pre_hook(UncopiedHook(self._see))
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
