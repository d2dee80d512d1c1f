"""Put back what a rejected step's forward moved: BatchNorm's running statistics, other buffers, frozen parameters."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_Slot = tuple[nn.Module, str]
#: What lazy buffers hold when the first forward has made them, and not yet moved them (torch's reset_running_stats).
_FIRST = {"running_mean": torch.zeros_like, "running_var": torch.ones_like}
#: In so many first steps values are compared.
_COMPARED = 2


class MovedBuffers:
    """Copies of the buffers and frozen parameters that forward moves, from before the step.

    Buffers that have not moved yet (rotary tables, masks, a codebook before its first update) are told apart by their
    version counter: they are copied once, which costs memory but no time in later steps, and that copy holds until they
    move. From then on they are copied in every step, whoever moved them. BatchNorm's kernels move theirs without
    counting, so the buffers of modules that track running statistics always are. What moves others so, such as
    ``buffer.data.copy_()``, is seen by their values in the first two steps; where it begins later, it is not. Lazy
    ones have no values before their first forward: running statistics that it moved go back to what it began with.

    Frozen parameters (a codebook that forward averages, but also a whole backbone) are not copied until they move,
    which they must begin in the first two steps. Those that get a gradient are an optimizer's; shards, and quantised
    ones of a class of their own, are let be.

    Buffers that cannot be written in place are kept as they are, and come back where another took their place.

    Args:
        module: whose buffers and frozen parameters are watched.
    """

    def __init__(self, module: nn.Module) -> None:
        owners = list(module.modules())
        self._slots: list[_Slot] = [(owner, name) for owner in owners for name in owner._buffers]
        #: Of these frozen parameters those that do not move are let go of after the first steps.
        self._frozen = [(owner, name) for owner in owners for name in owner._parameters if _is_frozen((owner, name))]
        self._lazy = [slot for slot in self._slots if _is_lazy(slot)]
        self._moving = {slot for slot in self._slots if getattr(slot[0], "track_running_stats", False)} | {*self._lazy}
        #: Those that have not moved, with their version.
        self._still: dict[_Slot, tuple[Tensor, int]] = {}
        self._kept: dict[_Slot, Tensor] = {}
        self._kept_whole: dict[_Slot, Tensor] = {}
        self._fresh: set[_Slot] = set()
        self._steps = 0
        #: Of the running step, while they are compared: from before it.
        self._sums: dict[_Slot, float] = {}

    @torch.no_grad()
    def remember(self) -> None:
        """Copy them: the step is about to begin."""
        if self._steps < _COMPARED:
            self._sums, self._steps = self._sums_now(), self._steps + 1
        else:
            self._frozen = [slot for slot in self._frozen if slot in self._moving]
        now, old = self._look(), self._kept
        self._kept_whole = {slot: t for slot in self._slots if slot not in now and (t := _tensor(slot)) is not None}
        self._lazy = [slot for slot in self._lazy if _is_lazy(slot)]
        self._kept = {
            slot: old[slot] if slot in old and _alike(old[slot], tensor) else torch.empty_like(tensor)
            for slot, tensor in now.items()
        }
        self._fresh = {slot for slot in now if slot in self._moving or slot not in old}
        if self._fresh:
            torch._foreach_copy_([self._kept[slot] for slot in self._fresh], [now[slot] for slot in self._fresh])

    @torch.no_grad()
    def restore(self, rejected: Tensor | None = None) -> None:
        """Copy them back; with ``rejected`` (bool ``[]`` on the device) only where it is True, without asking it."""
        now = self._look()
        for slot in self._lazy:
            if slot in now and slot[1] in _FIRST:
                self._kept[slot] = _FIRST[slot[1]](now[slot])
        live, kept = [], []
        for slot in [slot for slot in self._kept if slot in self._fresh or slot in self._moving]:
            before, tensor = self._kept[slot], now.get(slot)
            if tensor is not None and _alike(tensor, before):
                live.append(tensor)
                kept.append(before if rejected is None else torch.where(rejected.to(tensor.device), before, tensor))
            elif rejected is None and slot not in self._frozen:
                slot[0]._buffers[slot[1]] = before.clone()
        if live:
            torch._foreach_copy_(live, kept)
        if rejected is None:
            for (owner, name), before in self._kept_whole.items():
                owner._buffers[name] = before
        # What restoring counts is no sign of forward moving them.
        self._still = {slot: (tensor, tensor._version) for slot, (tensor, _) in self._still.items()}

    @torch.no_grad()
    def after_forward(self) -> None:
        """The step is about to be judged: parameters that have a gradient by now were frozen for a while only.

        In the first steps the host reads what has moved without counting, and which frozen parameters have. What moves
        later than here, as an average of weights that follows the step, is none of forward's.
        """
        for slot in [slot for slot in self._frozen if _is_trained(slot)]:
            self._frozen.remove(slot)
            self._kept.pop(slot, None)
        before, self._sums = self._sums, {}
        if before:
            self._moving |= {slot for slot, total in self._sums_now().items() if before.get(slot) != total}

    def _look(self) -> dict[_Slot, Tensor]:
        """What there is now to be written in place; takes note of what moved."""
        watched = [*self._slots, *(slot for slot in self._frozen if slot in self._moving)]
        now = {slot: t for slot in watched if (t := _tensor(slot)) is not None and written_in_place(t)}
        for slot, (tensor, version) in [*self._still.items()]:
            if now.get(slot) is not tensor or tensor._version != version:
                self._moving.add(slot)
                del self._still[slot]
        for slot, tensor in now.items():
            if slot not in self._moving:
                self._still[slot] = tensor, tensor._version
        return now

    def _sums_now(self) -> dict[_Slot, float]:
        """Numbers that tell values apart without a copy of these; one read on the host."""
        now = {slot: t for slot in [*self._slots, *self._frozen] if _is_plain(t := _tensor(slot)) and t.numel()}
        if not now:
            return {}
        device = next(iter(now.values())).device
        sums = torch.stack([_sum(tensor).to(device, torch.float64) for tensor in now.values()])
        return dict(zip(now, sums.tolist(), strict=True))


def written_in_place(tensor: Tensor) -> bool:
    """Whether values can be copied into it: dense, each in a place of its own, and not made in inference mode."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_inference():
        return False
    strides = tensor.stride()
    return 0 not in strides or all(stride or size <= 1 for stride, size in zip(strides, tensor.shape, strict=True))


def _sum(tensor: Tensor) -> Tensor:
    """Of absolute values, ``[]``; of integers, and of types of one byte, which are read as such, of what they are."""
    if tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8).sum()
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.sum()
    narrow = tensor.dtype in (torch.bfloat16, torch.float16)
    return torch.linalg.vector_norm(tensor, 1, dtype=torch.float32 if narrow else None)


def _tensor(slot: _Slot) -> Tensor | None:
    """Of a slot that has one with values."""
    owner, name = slot
    tensor = owner._buffers.get(name) if name in owner._buffers else owner._parameters.get(name)
    return None if tensor is None or is_lazy(tensor) else tensor


def _is_lazy(slot: _Slot) -> bool:
    owner, name = slot
    buffer = owner._buffers.get(name)
    return buffer is not None and is_lazy(buffer)


def _is_plain(tensor: Tensor | None) -> TypeGuard[Tensor]:
    """Not lazy, sharded, or of another class, which may know few operations."""
    return tensor is not None and type(tensor) in (Tensor, nn.Parameter) and written_in_place(tensor)


def _is_frozen(slot: _Slot) -> bool:
    return _is_plain(parameter := _tensor(slot)) and not parameter.requires_grad


def _is_trained(slot: _Slot) -> bool:
    tensor = _tensor(slot)
    return tensor is not None and (tensor.requires_grad or tensor.grad is not None)


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
