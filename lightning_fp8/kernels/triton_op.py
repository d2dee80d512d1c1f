"""``lightning_fp8::triton_cast``: the cast as an operator into which a compiler sees.

Inductor launches the kernels from the code that it generates and plans their outputs with all other memory. It finds
what they write from their code; ``tests/kernels/test_graphs.py`` holds it to exactly the outputs and the slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fp8.kernels import triton_cast
from lightning_fp8.kernels.launch import in_graph
from lightning_fp8.recipes import Cast


@torch.library.triton_op("lightning_fp8::triton_cast", mutates_args={"slot"})
def cast(
    x: Tensor, straight: str, transposed: str, slot: Tensor | None, stored: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``lightning_fp8::cast``, for a CUDA matrix that is not empty; tensorwise and rowwise."""
    return triton_cast.cast(x, Cast.parse(straight), Cast.parse(transposed), slot, stored, in_graph)
