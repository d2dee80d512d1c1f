"""``FP8FSDPPrecision``: FP8 training under Lightning's ``FSDPStrategy`` (FSDP1)."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch.plugins.precision import FSDPPrecision
from torch import nn
from torch.optim import Optimizer

from lightning_fp8.backends import Backend
from lightning_fp8.linear import Float8Linear
from lightning_fp8.loss_scaling import LossScale
from lightning_fp8.precision import TrainerPrecision
from lightning_fp8.recipes import Recipe
from lightning_fp8.selection import LayerSelection
from lightning_fp8.shard import check_backend


class _FSDPBase(FSDPPrecision):
    """Lightning's class, made without arguments: the precision is set by whoever inherits."""

    def __init__(self) -> None:
        super().__init__("bf16-mixed")


class FP8FSDPPrecision(TrainerPrecision, _FSDPBase):  # type: ignore[misc]
    """FP8 training with ``FSDPStrategy``: ``Trainer(strategy=FSDPStrategy(...), plugins=[FP8FSDPPrecision()])``.

    The GEMMs run in FP8. FSDP1 gathers weights in bf16: it has no hook for another way. Gradients go in FP8 with the
    callback :class:`~lightning_fp8.FP8Communication`. For FP8 weights on the wire use FSDP2: ``FP8Precision`` with
    ``ModelParallelStrategy``. As with Lightning's own class for FSDP1, gradients cannot be clipped by norm.

    Args:
        recipe: as in :class:`~lightning_fp8.FP8Precision`.
        backend: as there, but not Transformer Engine.
        precision: ``"bf16-mixed"`` (fp32 shards) or ``"bf16-true"``.
        loss_scale: a constant factor on the loss, or ``None``.
        layers: as in :class:`~lightning_fp8.FP8Precision`.
        tokens: as there.

    Raises:
        ValueError: a setting is unknown or out of range, or cannot be had under FSDP1.
        TypeError: one is of another type.
    """

    _elsewhere = "only FSDPStrategy runs with it; elsewhere use lightning_fp8.FP8Precision"

    def __init__(
        self,
        recipe: Recipe | dict[str, Any] | str = "delayed",
        *,
        backend: Backend | str = "auto",
        precision: Literal["bf16-mixed", "bf16-true"] = "bf16-mixed",
        loss_scale: LossScale | None = None,
        layers: LayerSelection | Literal["auto"] = "auto",
        tokens: int | None = None,
    ) -> None:
        if precision not in ("bf16-mixed", "bf16-true"):
            raise ValueError(f"Under FSDP1 precision must be 'bf16-mixed' or 'bf16-true', got {precision!r}.")
        if loss_scale == "dynamic":
            raise ValueError("Under FSDP1 the loss scale must be a constant: ranks see the Infs of their shards only.")
        check_backend(backend)
        super().__init__(
            recipe, backend=backend, precision=precision, loss_scale=loss_scale, layers=layers, tokens=tokens
        )

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the model, before FSDP1 wraps it."""
        trainer = getattr(module, "_trainer", None)
        if trainer is not None and not any(c.__name__ == "FSDPStrategy" for c in type(trainer.strategy).__mro__):
            raise ValueError(
                f"FP8FSDPPrecision runs under FSDPStrategy only, not under {type(trainer.strategy).__name__}: use "
                "FP8Precision."
            )
        module = super().convert_module(module)
        for layer in module.modules():
            if isinstance(layer, Float8Linear):
                layer.fp8.shard_weight()
        return module

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Let the FP8 state follow the weights: FSDP1 moves them to the device without telling the layers."""
        for conversion in self.conversions:
            conversion.runtime.to(self._device)
        return super().connect(model, optimizers, lr_schedulers)

    def shard(self, module: nn.Module, mesh: Any, **options: Any) -> nn.Module:
        """FSDP1 shards by itself.

        Raises:
            TypeError: always.
        """
        raise TypeError("shard() is for FSDP2: use FP8Precision with ModelParallelStrategy. FSDP1 shards by itself.")
