"""Verdicts on their way to the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fp8.recovery.verdict import Layout


class PendingVerdict:
    """What was found of a step on the device, of which the host reads the flag first, and later.

    Args:
        layout: what the entries of ``message`` and ``scores`` are about.
        flag: bool ``[]``: the step is rejected.
        message: what the ranks saw, as :meth:`~lightning_fp8.recovery.verdict.Judge.judge` left it, reduced.
        scores: of its signals, fp32 ``[signals]``.
        context: what the caller said about the step.
        window: the number of the batch that the step belongs to.
        late: the host learns of the flag with the next step.
    """

    def __init__(
        self,
        layout: Layout,
        flag: Tensor,
        message: Tensor,
        scores: Tensor,
        context: dict[str, Any],
        window: int,
        late: bool = True,
    ) -> None:
        self.layout, self.flag, self.message, self.scores, self.context = layout, flag, message, scores, context
        self.window, self.late = window, late
        self._copied: torch.cuda.Event | None = None

    def copy_flag(self) -> None:
        """Begin the copy of the flag."""
        if self.flag.is_cuda:
            host = torch.empty((), dtype=torch.bool, pin_memory=True)
            self.flag = host.copy_(self.flag, non_blocking=True)
            self._copied = torch.cuda.current_stream().record_event()

    def rejected(self) -> bool:
        """Waits for the flag."""
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self.flag)

    def state_dict(self) -> dict[str, Any]:
        """Plain values but the window, and tensors on the CPU."""
        tensors = {"flag": torch.tensor(self.rejected()), "message": self.message.cpu(), "scores": self.scores.cpu()}
        return {"layout": self.layout.state_dict(), **tensors, "context": self.context, "late": self.late}
