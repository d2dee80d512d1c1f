"""Put back what a rejected step's forward moved: module buffers, such as BatchNorm's running statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_Slot = tuple[nn.Module, str]
#: What lazy buffers hold when the first forward has made them, and not yet moved them (torch's reset_running_stats).
_FIRST = {"running_mean": torch.zeros_like, "running_var": torch.ones_like}


class MovedBuffers:
    """Copies of the buffers that forward moves, from before the step.

    Buffers that never move (rotary tables, masks) are told apart by their version counter after the first step and not
    copied again; BatchNorm's kernels move theirs without counting, so the buffers of modules that track running
    statistics are always kept. Lazy ones have no values before their first forward: running statistics that it moved
    go back to what it began with.

    Args:
        module: whose buffers are watched.
    """

    def __init__(self, module: nn.Module) -> None:
        self._slots: list[_Slot] = [(owner, name) for owner in module.modules() for name in owner._buffers]
        self._lazy = [slot for slot in self._slots if _is_lazy(slot)]
        self._moving = {slot for slot in self._slots if getattr(slot[0], "track_running_stats", False)} | {*self._lazy}
        self._seen: dict[_Slot, tuple[int, int]] = {}
        self._kept: dict[_Slot, Tensor] = {}

    @torch.no_grad()
    def remember(self) -> None:
        """Copy them: the step is about to begin."""
        first = not self._seen
        now = self._look()
        self._lazy = [slot for slot in self._lazy if _is_lazy(slot)]
        wanted = now if first else {slot: buffer for slot, buffer in now.items() if slot in self._moving}
        old = self._kept
        self._kept = {
            slot: old[slot] if slot in old and _alike(old[slot], buffer) else torch.empty_like(buffer)
            for slot, buffer in wanted.items()
        }
        if wanted:
            torch._foreach_copy_(list(self._kept.values()), list(wanted.values()))

    @torch.no_grad()
    def restore(self, rejected: Tensor | None = None) -> None:
        """Copy them back; with ``rejected`` (bool ``[]`` on the device) only where it is True, without asking it."""
        self._look()
        for slot in self._lazy:
            if (buffer := _buffer(slot)) is not None and slot[1] in _FIRST:
                self._kept[slot] = _FIRST[slot[1]](buffer)
        live, kept = [], []
        for slot, before in self._kept.items():
            buffer = _buffer(slot)
            if buffer is not None and _alike(buffer, before):
                live.append(buffer)
                kept.append(before if rejected is None else torch.where(rejected.to(buffer.device), before, buffer))
            elif rejected is None:
                slot[0]._buffers[slot[1]] = before.clone()
        if live:
            torch._foreach_copy_(live, kept)
        # What restoring counts is no sign of forward moving them.
        for slot in self._kept.keys() - self._moving:
            if (buffer := _buffer(slot)) is not None:
                self._seen[slot] = _state(buffer)

    def _look(self) -> dict[_Slot, Tensor]:
        """The present buffers; takes note of those that moved."""
        now = {slot: buffer for slot in self._slots if (buffer := _buffer(slot)) is not None}
        for slot, buffer in now.items():
            if self._seen.setdefault(slot, _state(buffer)) != _state(buffer):
                self._moving.add(slot)
        return now


def _buffer(slot: _Slot) -> Tensor | None:
    """Of a slot that has one with values."""
    owner, name = slot
    return None if _is_lazy(slot) else owner._buffers.get(name)


def _is_lazy(slot: _Slot) -> bool:
    owner, name = slot
    buffer = owner._buffers.get(name)
    return buffer is not None and is_lazy(buffer)


def _state(buffer: Tensor) -> tuple[int, int]:
    return id(buffer), buffer._version


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
