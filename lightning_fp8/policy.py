"""The precision of everything around the FP8 GEMMs, in Lightning's own words."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, get_args

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn

Precision = Literal["bf16-mixed", "bf16-true", "16-mixed"]


class PrecisionPolicy:
    """Dtypes of parameters and of the arithmetic that is not FP8.

    Args:
        precision: ``"bf16-mixed"`` (fp32 parameters, bf16 autocast), ``"bf16-true"`` (all bf16) or ``"16-mixed"``
            (fp32 parameters, fp16 autocast).

    Raises:
        ValueError: another word.

    Attributes:
        mixed: whether autocast chooses the dtypes.
        dtype: dtype of the arithmetic.
    """

    def __init__(self, precision: Precision) -> None:
        if precision not in get_args(Precision):
            known = ", ".join(repr(name) for name in get_args(Precision))
            raise ValueError(f"precision must be one of {known}, got {precision!r}.")
        self.precision = precision
        self.mixed = precision.endswith("-mixed")
        self.dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Give the parameters their dtype."""
        return module if self.mixed else module.to(self.dtype)

    def init_context(self) -> AbstractContextManager[Any]:
        """New parameters get their dtype."""
        return _default_dtype(torch.get_default_dtype() if self.mixed else self.dtype)

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """Surrounds forward and loss."""
        if self.mixed:
            return torch.autocast(device_type, dtype=self.dtype, cache_enabled=False)
        return _default_dtype(self.dtype)

    def convert_input(self, data: Any) -> Any:
        """Floating-point tensors in the dtype of the arithmetic."""
        return _to_dtype(data, self.dtype)

    def convert_output(self, data: Any) -> Any:
        """Floating-point tensors in torch's default dtype."""
        return _to_dtype(data, torch.get_default_dtype())


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None, None, None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def _to_dtype(data: Any, dtype: torch.dtype) -> Any:
    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return apply_to_collection(data, Tensor, convert)
