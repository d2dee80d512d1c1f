"""Casts and GEMMs on tensors: fast kernels where the device has them, the reference elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fp8.casts import Cast
from lightning_fp8.kernels import gemm, reference
from lightning_fp8.kernels.capability import has_fast_casts
from lightning_fp8.kernels.gemm import mode_in_graph
from lightning_fp8.kernels.layout import empty_operands, lay_out


def cast(
    x: Tensor, straight: Cast | None, transposed: Cast | None, slot: Tensor | None, stored: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast a matrix for its two GEMMs, and note its amax: see :func:`lightning_fp8.kernels.reference.cast`.

    Decode scales are laid out as :func:`~lightning_fp8.kernels.layout.empty_decode_scale` says.
    """
    if has_fast_casts(x.device) and x.numel() and (straight is not None or transposed is not None):
        # Triton is optional, and slow to import.
        from lightning_fp8.kernels import triton_cast

        return triton_cast.cast(x, straight, transposed, slot, stored)
    codes, decode, codes_t, decode_t = reference.cast(x, straight, transposed, slot, stored)
    return codes, lay_out(decode, straight), codes_t, lay_out(decode_t, transposed)


@torch._dynamo.assume_constant_result
def cast_in_graph(device: torch.device, straight: str, transposed: str) -> bool:
    """Whether a traced graph may cast by ``lightning_fp8::triton_cast``, which this registers if so.

    Args:
        device: where the matrix is.
        straight: the cast of the straight operand as text, empty to leave it out.
        transposed: that of the transposed one.
    """
    if not ((straight or transposed) and has_fast_casts(device)):
        return False
    from lightning_fp8.kernels import triton_op  # noqa: F401

    return True


def scaled_mm(
    a: Tensor,
    b: Tensor,
    decode_a: Tensor,
    decode_b: Tensor,
    casts: tuple[Cast, Cast],
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """``a @ b^T`` of two quantised operands, on FP8 tensor cores where the device has them for such scales.

    Args:
        a: FP8 ``[m, k]``.
        b: FP8 ``[n, k]``.
        decode_a: fp32 decode scales of ``a``.
        decode_b: fp32 decode scales of ``b``.
        casts: how ``a`` and ``b`` were cast.
        out_dtype: fp32, bf16 or fp16.
        fast_accum: accumulate with fewer bits where the tensor cores can (Hopper); block scales ignore it.

    Returns:
        ``[m, n]`` in ``out_dtype``.
    """
    mode = gemm.native_mode(a, casts)
    if mode is None:
        return reference.scaled_mm(a, b, decode_a, decode_b, out_dtype)
    return gemm.scaled_mm(a, b, decode_a, decode_b, mode, out_dtype, fast_accum)


__all__ = ["cast", "cast_in_graph", "empty_operands", "mode_in_graph", "scaled_mm"]
