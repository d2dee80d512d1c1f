"""What an optimizer steps."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Those of all parameter groups, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """The gradients that its parameters have now."""
    return [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]
