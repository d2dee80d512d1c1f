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

    Buffers that have not moved yet (rotary tables, masks, a codebook before its first update) are told apart by their
    version counter: they are copied once, which costs memory but no time in later steps, and that copy holds until they
    move. From then on they are copied in every step, whoever moved them. BatchNorm's kernels move theirs without
    counting, so the buffers of modules that track running statistics always are; what moves others so, such as
    ``buffer.data.copy_()``, is put back in the first step only. Lazy ones have no values before their first forward:
    running statistics that it moved go back to what it began with.

    Args:
        module: whose buffers are watched.
    """

    def __init__(self, module: nn.Module) -> None:
        self._slots: list[_Slot] = [(owner, name) for owner in module.modules() for name in owner._buffers]
        self._lazy = [slot for slot in self._slots if _is_lazy(slot)]
        self._moving = {slot for slot in self._slots if getattr(slot[0], "track_running_stats", False)} | {*self._lazy}
        #: Those that have not moved, with their version.
        self._still: dict[_Slot, tuple[Tensor, int]] = {}
        self._kept: dict[_Slot, Tensor] = {}
        self._fresh: set[_Slot] = set()

    @torch.no_grad()
    def remember(self) -> None:
        """Copy them: the step is about to begin."""
        now, old = self._look(), self._kept
        self._lazy = [slot for slot in self._lazy if _is_lazy(slot)]
        self._kept = {
            slot: old[slot] if slot in old and _alike(old[slot], buffer) else torch.empty_like(buffer)
            for slot, buffer in now.items()
        }
        self._fresh = {slot for slot in now if slot in self._moving or slot not in old}
        if self._fresh:
            torch._foreach_copy_([self._kept[slot] for slot in self._fresh], [now[slot] for slot in self._fresh])

    @torch.no_grad()
    def restore(self, rejected: Tensor | None = None) -> None:
        """Copy them back; with ``rejected`` (bool ``[]`` on the device) only where it is True, without asking it."""
        self._look()
        for slot in self._lazy:
            if (buffer := _buffer(slot)) is not None and slot[1] in _FIRST:
                self._kept[slot] = _FIRST[slot[1]](buffer)
        live, kept = [], []
        for slot in [slot for slot in self._kept if slot in self._fresh or slot in self._moving]:
            before, buffer = self._kept[slot], _buffer(slot)
            if buffer is not None and _alike(buffer, before):
                live.append(buffer)
                kept.append(before if rejected is None else torch.where(rejected.to(buffer.device), before, buffer))
            elif rejected is None:
                slot[0]._buffers[slot[1]] = before.clone()
        if live:
            torch._foreach_copy_(live, kept)
        # What restoring counts is no sign of forward moving them.
        self._still = {slot: (buffer, buffer._version) for slot, (buffer, _) in self._still.items()}

    def _look(self) -> dict[_Slot, Tensor]:
        """The present buffers; takes note of those that moved."""
        now = {slot: buffer for slot in self._slots if (buffer := _buffer(slot)) is not None}
        for slot, (buffer, version) in [*self._still.items()]:
            if now.get(slot) is not buffer or buffer._version != version:
                self._moving.add(slot)
                del self._still[slot]
        for slot, buffer in now.items():
            if slot not in self._moving:
                self._still[slot] = buffer, buffer._version
        return now


def _buffer(slot: _Slot) -> Tensor | None:
    """Of a slot that has one with values."""
    owner, name = slot
    return None if _is_lazy(slot) else owner._buffers.get(name)


def _is_lazy(slot: _Slot) -> bool:
    owner, name = slot
    buffer = owner._buffers.get(name)
    return buffer is not None and is_lazy(buffer)


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
