"""Between device and host, without waiting where that is possible."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on ``device``, without waiting for the copy."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def on_cpu(live_state: dict[str, Any]) -> dict[str, Any]:
    """A state with copies of its tensors on the CPU; waits for the device."""
    copied: dict[str, Any] = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), live_state)
    return copied


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
