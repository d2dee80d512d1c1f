"""One device table of statistics, ``[layer, role, statistic]``: what monitors and recovery read.

The casts of FP8 layers write into it as they go; layers that run in higher precision are written by whoever watches
them. Reading it costs one copy of the table, whenever the reader likes.

Each (layer, role) has a *slot* of four fp32 values, 16 bytes apart as cuBLASLt wants its scale pointers. A slot is a
tensor with a storage of its own over the table's memory: to the compiler, slots of different layers are unrelated
tensors, so that changing one in place does not tie the layers' graphs together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import dlpack

from lightning_fp8.recipes import ROLES, Role

#: Largest magnitude since the step began. Negative: the operand was not seen, or empty. NaN or Inf: it held one.
AMAX = 0
#: Scale of the straight operand, where scales are stored. 0: unset.
SCALE = 1
#: Scale of the transposed operand, where scales are stored. 0: unset.
SCALE_TRANSPOSED = 2
#: Amax of the last completed step in which the operand was seen.
LAST_AMAX = 3

SLOT_SIZE = 4
NOT_SEEN = -1.0


class StatisticsTable:
    """Statistics of a set of layers on one device.

    Args:
        names: qualified names of the layers, in the order of the table's rows.
        device: where the table lives.

    Attributes:
        names: as given.
        data: fp32 ``[layers, 3, 4]``; roles in the order input, weight, grad_output.
    """

    def __init__(self, names: Iterable[str], device: torch.device | str = "cpu") -> None:
        self.names = list(names)
        self.data = torch.zeros(len(self.names), len(ROLES), SLOT_SIZE, dtype=torch.float32, device=device)
        self.data[..., AMAX] = NOT_SEEN
        self.data[..., LAST_AMAX] = NOT_SEEN

    @property
    def device(self) -> torch.device:
        """Where the table lives."""
        return self.data.device

    def to(self, device: torch.device) -> None:
        """Move the table; slots handed out before stay behind and must be taken anew."""
        self.data = self.data.to(device)

    def slot(self, layer: int, role: Role) -> Tensor:
        """The statistics of one layer and role: fp32 ``[4]`` over the table's memory."""
        return _own_storage(self.data[layer, ROLES.index(role)])

    @property
    def amax(self) -> Tensor:
        """Amaxes of the step that is running, fp32 ``[layers, 3]``, a view."""
        return self.data[..., AMAX]

    def finish_step(self) -> None:
        """Keep the amaxes of the step that ends, and begin a new window. Layers that did not run keep their last."""
        amax, last = self.data[..., AMAX], self.data[..., LAST_AMAX]
        # NaN compares false with everything: ~(x < 0) counts it as seen.
        last.copy_(torch.where(amax < 0, last, amax))
        amax.fill_(NOT_SEEN)

    def discard(self, rejected: Tensor | bool = True) -> None:
        """Forget the window's amaxes, as if the step had not run.

        Args:
            rejected: whether to; a bool tensor (scalar, on the table's device) decides without a host read.
        """
        if not isinstance(rejected, Tensor):
            rejected = torch.full((), rejected, device=self.device)
        self.amax.copy_(torch.where(rejected, NOT_SEEN, self.amax))

    def live_state(self) -> dict[str, Any]:
        """Plain values, and the tensors themselves: for copies that do not wait for the device."""
        return {"names": list(self.names), "data": self.data}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Load the rows whose names are known here.

        Returns:
            Names of layers of this table that ``state`` does not have; they start anew.
        """
        rows = {name: row for row, name in enumerate(state["names"])}
        for index, name in enumerate(self.names):
            if name in rows:
                self.data[index].copy_(state["data"][rows[name]])
        return [name for name in self.names if name not in rows]


def _own_storage(view: Tensor) -> Tensor:
    """A tensor over the memory of ``view`` that shares no storage object with it (it keeps that memory alive)."""
    tensor = dlpack.from_dlpack(dlpack.to_dlpack(view))
    if view.is_cuda:
        # CUDA graphs may then write to it: its address does not change between replays.
        torch._dynamo.mark_static_address(tensor, guard=False)
    return tensor
