"""FLOPs of a training step, those of FP8 layers apart from the rest."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lightning_fp8.linear import input_of
from lightning_fp8.uncopied import UncopiedHook

#: What torch (2.11 to 2.13) has no formula for, and what counts alike.
_SAME_AS: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention
}
#: Which arguments of a product are multiplied; of all others in the registry those from the first on.
_MULTIPLIED = {torch.ops.aten.addmm: slice(1, 3), torch.ops.aten.baddbmm: slice(1, 3)}


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

    FP8 layers are counted by their shapes, for some backends' kernels are hidden from torch, and emulated products are
    padded (layers that run as one with others by their weights, for what goes in and out is not their own); everything
    else by torch's own formulas (``torch.utils.flop_counter``: products, convolutions, attention without regard to a
    mask). Backward counts one product for each operand that takes a gradient, twice the forward for attention; so what
    is frozen or runs under ``no_grad`` counts less. A backward that runs meanwhile counts nothing more, nor does what
    activation checkpointing computes again in it: FLOPs are the model's. Inside an autograd function, as reentrant
    checkpointing is one, it is not seen what takes a gradient: everything there is taken to.

    Args:
        fp8_layers: the layers that multiply in FP8.
        emulated: the layers that only emulate it, and so multiply in high precision.
    """

    def __init__(self, fp8_layers: Iterable[nn.Linear], emulated: Iterable[nn.Linear] = ()) -> None:
        self._fp8_layers = list(fp8_layers)
        self._emulated = list(emulated)
        self._mode = _Counter()
        self._fp8 = 0.0
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
        return Flops(self._fp8, self._mode.total)

    def __enter__(self) -> StepFlops:
        for layers, leave in ((self._fp8_layers, self._leave_fp8), (self._emulated, self._leave_emulated)):
            for layer in layers:
                self._handles.append(layer.register_forward_pre_hook(UncopiedHook(self._enter_layer)))
                self._handles.append(layer.register_forward_hook(UncopiedHook(leave), with_kwargs=True))
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

    def _leave_fp8(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if _in_counted_backward():
            return
        self._mode.total = self._before
        self._fp8 += _layer_flops(layer, input_of(args, kwargs), output)

    def _leave_emulated(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if _in_counted_backward():
            return
        self._mode.total = self._before + _layer_flops(layer, input_of(args, kwargs), output)


def _layer_flops(layer: Any, x: Tensor, output: Tensor) -> float:
    """Those of one call of a converted layer, and of its backward."""
    weight: Tensor = layer.weight
    fused = not layer.sees_operands
    hidden = _inside_function()
    products = 1
    if torch.is_grad_enabled() or hidden:
        products += (fused or hidden or x.requires_grad) + weight.requires_grad
    # Nested tensors have no shape, but these.
    in_features = x.size(-1)
    sizes = weight.numel() if fused else in_features * output.size(-1)
    return 2.0 * products * (x.numel() // in_features) * sizes


def forward_flops(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> float:
    """FLOPs of one operation by torch's formulas; 0 where there is none."""
    packet = _packet(func)
    return float(flop_registry[packet](*args, **kwargs, out_val=result)) if packet in flop_registry else 0.0


def _packet(func: Any) -> Any:
    """What the formula of an operation is registered for."""
    return _SAME_AS.get(func._overloadpacket, func._overloadpacket)


class _Counter(TorchDispatchMode):
    """Sums FLOPs by torch's formulas (``FlopCounterMode`` would hook every module, forward and backward, as well)."""

    # Flex attention is one, which has no formula; it would be an error.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0
        self._of_dtensors = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        packet = _packet(func)
        counts = packet in flop_registry and not _in_counted_backward()
        if any(issubclass(cls, DTensor) for cls in types):
            # It goes on with what is local here, and that counts. Local tensors take no gradients themselves.
            self._of_dtensors = _gradients(packet, args) if counts else 0
            return NotImplemented
        result = func(*args, **kwargs)
        # Before its first product of a kind DTensor runs it on fake tensors, to know the shape of the result.
        if counts and not any(issubclass(cls, FakeTensor) for cls in types):
            gradients = max(self._of_dtensors, _gradients(packet, args))
            self._of_dtensors = 0
            self.total += (1 + gradients) * flop_registry[packet](*args, **kwargs, out_val=result)
        return result


def _gradients(packet: Any, args: tuple[Any, ...]) -> int:
    """How often backward takes the FLOPs of forward: once for each matrix that takes a gradient; attention twice."""
    if not torch.is_grad_enabled():
        return 2 * _inside_function()
    operands = args[_MULTIPLIED.get(packet, slice(0, 3))]
    return min(2, sum(isinstance(x, Tensor) and x.requires_grad and x.dim() > 1 for x in operands))


def _in_counted_backward() -> bool:
    """Whether a backward runs that its forward has counted; with ``create_graph`` it is a forward as well."""
    if torch._C._current_graph_task_id() < 0:
        return False
    return not (torch.is_grad_enabled() and torch._C._autograd._get_current_graph_task_keep_graph())


def _inside_function() -> bool:
    """Whether this is the forward of an autograd function, where gradients are not recorded but will be taken."""
    if torch.is_grad_enabled():
        return False
    apply = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not apply:
        frame = frame.f_back
    return frame is not None
