"""A history of any length in constant memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.checks import check_number

#: Values that a history holds at most: 16 MiB.
_MAX_VALUES = 2**22


def capacity_for(shape: Sequence[int], wished: int) -> int:
    """How many readings of ``shape`` to keep: as many as ``wished``, fewer where they are large."""
    return max(2, min(wished, _MAX_VALUES // max(1, math.prod(shape)))) // 2 * 2


def rows_of(names: Sequence[str], there: Sequence[str]) -> list[int | None]:
    """For each of ``names`` its place in ``there``; ``None`` where it is not."""
    places = {name: place for place, name in enumerate(there)}
    return [places.get(name) for name in names]


class ThinnedHistory:
    """Readings over steps; when it is full, every second goes and from then on only every second comes in.

    Args:
        shape: of a reading.
        capacity: readings at most; even.

    Attributes:
        shape: as given.
        stride: of how many readings one is kept.
    """

    def __init__(self, shape: Sequence[int] = (), capacity: int = 256) -> None:
        check_number(whole=True, capacity=capacity)
        if capacity < 2 or capacity % 2:
            raise ValueError(f"capacity must be an even number, at least 2, got {capacity}.")
        self.capacity = capacity
        self.shape = tuple(shape)
        self.stride = 1
        self._values = torch.full((capacity, *shape), torch.nan, dtype=torch.float32)
        self._steps = torch.zeros(capacity, dtype=torch.int64)
        self._length = 0
        self._offered = 0

    def __len__(self) -> int:
        return self._length

    @property
    def steps(self) -> Tensor:
        """int64 ``[n]``."""
        return self._steps[: self._length]

    @property
    def values(self) -> Tensor:
        """fp32 ``[n, *shape]``."""
        return self._values[: self._length]

    def append(self, step: int, value: Tensor | float) -> None:
        """Offer a reading, on the CPU."""
        offered, self._offered = self._offered, self._offered + 1
        if offered % self.stride:
            return
        if self._length == self.capacity:
            self._length //= 2
            self._values[: self._length] = self._values[::2].clone()
            self._steps[: self._length] = self._steps[::2].clone()
            self.stride *= 2
            if offered % self.stride:
                return
        self._values[self._length] = value
        self._steps[self._length] = step
        self._length += 1

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        return {
            "stride": self.stride,
            "offered": self._offered,
            "steps": self.steps.clone(),
            "values": self.values.clone(),
        }

    def load_state_dict(self, state: dict[str, Any], rows: Sequence[int | None] | None = None) -> None:
        """Go on; a history of another shape or capacity starts anew.

        Args:
            state: as :meth:`state_dict` gave it.
            rows: for each row of a reading (its first dimension) the row there, ``None`` where there is none; by
                default rows are the same.
        """
        length, values = len(state["steps"]), state["values"]
        if rows is not None:
            absent = torch.full((length, 1, *values.shape[2:]), torch.nan)
            values = torch.cat((values, absent), 1)[:, [-1 if row is None else row for row in rows]]
        if values.shape[1:] != self._values.shape[1:] or length > self.capacity:
            return
        self.stride, self._offered, self._length = int(state["stride"]), int(state["offered"]), length
        self._steps[:length] = state["steps"]
        self._values[:length] = values
