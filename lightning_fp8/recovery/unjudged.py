"""Steps that optimizers take and nobody judges."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from lightning_fp8.uncopied import Uncopied


class UnjudgedSteps(Uncopied):
    """Notes the steps of ``optimizers``, of which none has been judged yet; until :meth:`release`.

    Attributes:
        told: whether the user was told; for the caller.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.told = False
        self._seen = False
        # Optimizers of other makers that skip torch's constructor take no hooks.
        hookable = [optimizer for optimizer in optimizers if hasattr(optimizer, "_optimizer_step_post_hooks")]
        self._hooks = [optimizer.register_step_post_hook(self._note) for optimizer in hookable]

    def _note(self, *_: Any) -> None:
        self._seen = True

    def take(self) -> bool:
        """Whether there was one since the last call."""
        seen, self._seen = self._seen, False
        return seen

    def release(self) -> None:
        """Leave the optimizers as they were."""
        for hook in self._hooks:
            hook.remove()
