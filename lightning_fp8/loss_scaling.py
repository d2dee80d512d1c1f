"""Loss scaling: one factor on the loss, undone on the gradients before they are used.

It is a thing apart from the scales of FP8 operands: it keeps fp16 (and, where asked for, bf16) gradients between the
layers from underflowing.
"""

from __future__ import annotations

from numbers import Real
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_fp8.clipping import are_mixed, local_parts
from lightning_fp8.formats import MAX_SCALE, MIN_SCALE
from lightning_fp8.optimizers import gradients_of, parameters_of
from lightning_fp8.ranks import local_values, world_size

LossScale = Literal["dynamic"] | float


class LossScaler:
    """A constant factor, or ``torch.amp.GradScaler``'s dynamic one.

    Dynamic scaling skips a step whose gradients are not finite and reads the device once a step to know; a constant
    does neither.

    Args:
        loss_scale: ``"dynamic"`` or a positive number, from 2**-126 to 2**126: neither it nor its reciprocal, which the
            gradients are multiplied by, leaves the normal numbers of fp32.

    Raises:
        ValueError: anything else.
    """

    def __init__(self, loss_scale: LossScale) -> None:
        if loss_scale != "dynamic":
            is_number = isinstance(loss_scale, Real) and not isinstance(loss_scale, bool)
            if not is_number or not MIN_SCALE <= loss_scale <= MAX_SCALE:
                raise ValueError(
                    f"loss_scale must be 'dynamic', a positive number or None, got {loss_scale!r}; a number must lie "
                    "between 2**-126 and 2**126."
                )
            loss_scale = float(loss_scale)
        self.loss_scale: LossScale = loss_scale
        self._scaler: torch.amp.GradScaler | None = None
        self._loaded: dict[str, Any] | None = None
        # In the order of unscaling, which is the same on every rank, as are those in it: they talk about them.
        self._unscaled: list[Optimizer] = []

    def check(self, optimizer: Optimizer) -> None:
        """Look at what ``optimizer`` steps, before training.

        Raises:
            ValueError: the factor is dynamic, and some parameters are split otherwise than others.
        """
        if self.loss_scale == "dynamic" and are_mixed(parameters_of(optimizer)):
            raise ValueError(
                "torch's GradScaler does not take tensor-parallel parameters beside others: give a constant factor, "
                "loss_scale=..., or use precision='bf16-mixed', which needs none."
            )

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to run backward from."""
        self._forget_dropped_gradients()
        if self.loss_scale != "dynamic":
            return loss * self.loss_scale
        self._update()
        return self._dynamic(loss.device.type).scale(loss)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the factor, in place.

        Once, until it steps or until its gradients are dropped: whoever skips a step calls ``zero_grad``.
        """
        if optimizer in self._unscaled:
            return
        self._unscaled.append(optimizer)
        gradients = gradients_of(optimizer)
        if not gradients:
            return
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)
        elif self.loss_scale != "dynamic":
            torch._foreach_mul_(local_parts(gradients), 1.0 / self.loss_scale)

    def step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Step ``optimizer``, with its gradients unscaled."""
        self.unscale_(optimizer)
        self._unscaled.remove(optimizer)
        # Without gradients GradScaler would miss its look at them, and there is nothing to step.
        if self._scaler is None or not gradients_of(optimizer):
            return optimizer.step(**kwargs)
        return self._scaler.step(optimizer, **kwargs)

    def leave_out(self, optimizer: Optimizer) -> None:
        """Let a dynamic factor be: a step of ``optimizer`` is left out on purpose, its gradients are dropped by now."""
        # What was found before, in a step that was taken, still counts.
        if self._scaler is not None and optimizer in self._unscaled:
            self._scaler._per_optimizer_states.pop(id(optimizer), None)

    def begin(self) -> None:
        """Training begins: gradients of an interrupted run are none of its own."""
        self._unscaled.clear()

    @property
    def factor(self) -> float:
        """What the next loss is multiplied by; a dynamic one is read from the device."""
        if self.loss_scale != "dynamic":
            return self.loss_scale
        self._update()
        if self._loaded and self._scaler is None:
            return float(self._loaded["scale"])
        return float((self._scaler or torch.amp.GradScaler("cpu")).get_scale())

    def factor_on(self, device: torch.device) -> Tensor:
        """What losses were last multiplied by, fp32 ``[]`` on ``device``; neither moved nor read on the host."""
        if self.loss_scale != "dynamic":
            return torch.full((), self.loss_scale, dtype=torch.float32, device=device)
        return self._dynamic(device.type).scale(torch.ones((), device=device))

    def state_dict(self) -> dict[str, Any]:
        """The dynamic factor's state; empty for a constant."""
        self._update()
        if self._scaler is not None:
            return self._scaler.state_dict()
        return self._loaded or {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave; a constant stays what it is."""
        if self.loss_scale != "dynamic":
            return
        self._loaded = state or None
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)

    def _update(self) -> None:
        """Move the dynamic factor before the next backward, not after each step.

        Several optimizers may step from one backward, and all their gradients carry the factor that it had then.
        """
        # GradScaler refuses to move where it has looked at no gradients since it last did.
        if self._scaler is not None and self._scaler._per_optimizer_states and not self._unscaled:
            self._scaler.update()

    def _forget_dropped_gradients(self) -> None:
        """Of steps that were skipped or interrupted between unscaling and stepping.

        Gradients that were set to zero, not to None, are read on the host: only where backward runs between the two.
        Ranks ask together, for of a sharded gradient one of them may hold zeros only, or nothing.
        """
        if not self._unscaled:
            return
        held = [any(local_values(g).any() for g in gradients_of(optimizer)) for optimizer in self._unscaled]
        if world_size() > 1:
            flags = torch.tensor(held, dtype=torch.float32, device=parameters_of(self._unscaled[0])[0].device)
            dist.all_reduce(flags, dist.ReduceOp.MAX)
            held = flags.bool().tolist()
        self._unscaled = [optimizer for optimizer, holds in zip(self._unscaled, held, strict=True) if holds]

    def _dynamic(self, device_type: str) -> torch.amp.GradScaler:
        # Made at the first loss: only then is the device known.
        if self._scaler is None:
            self._scaler = torch.amp.GradScaler(device_type)
            if self._loaded:
                self._scaler.load_state_dict(self._loaded)
        return self._scaler
