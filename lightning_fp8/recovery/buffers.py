"""Put back what a rejected step's forward moved: module buffers, such as BatchNorm's running statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MovedBuffers:
    """Copies of the buffers that forward moves, from before the step.

    Buffers that never move (rotary tables, masks) are told apart by their version counter after the first step and not
    copied again; BatchNorm's kernels move theirs without counting, so the buffers of modules that track running
    statistics are always kept.

    Args:
        module: whose buffers are watched.
    """

    def __init__(self, module: nn.Module) -> None:
        owners = [owner for owner in module.modules() if owner._buffers]
        self._slots = [(owner, name) for owner in owners for name in owner._buffers]
        self._moving = {slot for slot in self._slots if getattr(slot[0], "track_running_stats", False)}
        self._seen: dict[tuple[nn.Module, str], tuple[int, int]] = {}
        self._kept: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def remember(self) -> None:
        """Copy them: the step is about to begin."""
        first = not self._seen
        for slot in self._slots:
            buffer = slot[0]._buffers.get(slot[1])
            if buffer is None:
                continue
            state = (id(buffer), buffer._version)
            if self._seen.setdefault(slot, state) != state:
                self._moving.add(slot)
                self._seen[slot] = state
        wanted = self._slots if first else [slot for slot in self._slots if slot in self._moving]
        now = [buffer for owner, name in wanted if (buffer := owner._buffers.get(name)) is not None]
        if len(now) != len(self._kept) or any(b.shape != k.shape for b, (_, k) in zip(now, self._kept, strict=True)):
            self._kept = [(buffer, torch.empty_like(buffer)) for buffer in now]
        else:
            self._kept = [(buffer, kept) for buffer, (_, kept) in zip(now, self._kept, strict=True)]
        if now:
            torch._foreach_copy_([kept for _, kept in self._kept], now)

    @torch.no_grad()
    def restore(self, rejected: Tensor | None = None) -> None:
        """Copy them back; with ``rejected`` (bool ``[]`` on the device) only where it is True, without asking it."""
        if not self._kept:
            return
        buffers = [buffer for buffer, _ in self._kept]
        kept = [kept for _, kept in self._kept]
        if rejected is not None:
            kept = [torch.where(rejected.to(b.device), k, b) for b, k in self._kept]
        torch._foreach_copy_(buffers, kept)
        # What restoring counts is no sign of forward moving them.
        for owner, name in self._slots:
            buffer = owner._buffers.get(name)
            if buffer is not None and (owner, name) not in self._moving:
                self._seen[owner, name] = (id(buffer), buffer._version)
