"""``lightning_fp8::triton_cast``: the cast as an operator into which a compiler sees.

Inductor launches the kernels from the code that it generates and plans their outputs with all other memory. It finds
what they write from their code; ``tests/kernels/test_graphs.py`` holds it to exactly the outputs and the slot.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fp8.casts import Cast
from lightning_fp8.kernels import triton_block, triton_cast, triton_data, triton_foreseen, triton_stored
from lightning_fp8.kernels.launch import in_graph


@torch.library.triton_op("lightning_fp8::triton_cast", mutates_args={"slot"})
def cast(
    x: Tensor, straight: str, transposed: str, slot: Tensor | None, stored: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``lightning_fp8::cast``, for a CUDA matrix that is not empty."""
    return triton_cast.cast(x, Cast.parse(straight), Cast.parse(transposed), slot, stored, in_graph)


# Compiled graphs that are kept on disk must not outlive a change of the kernels. torch looks for kernels in the
# function above alone, and finds none there. The table is private to torch: a test tells where it has moved.
_kernels_of: dict[str, list[Any]] = getattr(torch._library.triton, "triton_ops_to_kernels", {})
_kernels_of["lightning_fp8::triton_cast"] = [
    triton_stored.cast_stored,
    triton_foreseen.foresee,
    triton_foreseen.cast_again,
    triton_data.amax_partials,
    triton_data.row_and_column_scales,
    triton_data.cast_from_amaxes,
    triton_data.cast_rows,
    triton_block.cast_blocks_128,
    triton_block.cast_blocks_32,
]
