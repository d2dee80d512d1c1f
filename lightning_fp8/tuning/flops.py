"""FLOPs of a training step, those of FP8 layers apart from the rest."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

#: What torch (2.11 to 2.13) has no formula for, and what counts alike.
_SAME_AS: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention
}


class Flops(NamedTuple):
    """FLOPs on one device: a product of ``[m, k]`` and ``[k, n]`` counts ``2 m k n``.

    Attributes:
        fp8: of products in FP8.
        high: of all other products, attention and convolutions.
    """

    fp8: float
    high: float


class StepFlops:
    """Counts while it is entered: forwards of a training step, their backward with them.

    FP8 layers are counted by their shapes, for some backends' kernels are hidden from torch (layers that run as one
    with others by their weights, for what goes in and out is not their own); everything else by torch's own formulas
    (``torch.utils.flop_counter``: products, convolutions, attention without regard to a mask). Backward counts twice
    the forward; for FP8 layers one product for each operand that takes a gradient. What is computed again under
    activation checkpointing does not count: FLOPs are the model's.

    Args:
        fp8_layers: the layers that multiply in FP8.
    """

    def __init__(self, fp8_layers: Iterable[nn.Linear]) -> None:
        self._layers = list(fp8_layers)
        self._mode = _Counter()
        self._fp8 = 0.0
        self._hidden = 0.0
        self._before = 0.0
        self._active = False
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def stop(self) -> None:
        """Leave, if it was entered; it may be entered again."""
        if self._active:
            self.__exit__(None, None, None)

    @property
    def flops(self) -> Flops:
        """What was counted so far."""
        return Flops(self._fp8, 3 * (self._mode.total - self._hidden))

    def __enter__(self) -> StepFlops:
        for layer in self._layers:
            self._handles.append(layer.register_forward_pre_hook(self._enter_layer))
            self._handles.append(layer.register_forward_hook(self._leave_layer, with_kwargs=True))
        self._mode.__enter__()
        self._active = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, trace)
        self._active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter_layer(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        self._before = self._mode.total

    def _leave_layer(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._hidden += self._mode.total - self._before
        x: Tensor = args[0] if args else kwargs["input"]
        weight: Any = layer.weight
        fused = not layer.sees_operands
        products = 1 + (fused or x.requires_grad) + weight.requires_grad
        sizes = weight.numel() if fused else x.shape[-1] * output.shape[-1]
        self._fp8 += 2 * products * x.shape[:-1].numel() * sizes


class _Counter(TorchDispatchMode):
    """Sums FLOPs by torch's formulas (``FlopCounterMode`` would hook every module, forward and backward, as well)."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # It goes on with what is local here, and that counts.
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = _SAME_AS.get(func._overloadpacket, func._overloadpacket)
        if packet in flop_registry:
            self.total += flop_registry[packet](*args, **kwargs, out_val=result)
        return result
