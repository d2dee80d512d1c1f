"""GEMMs of FP8 operands on tensor cores, through torch (cuBLASLt and, for some rowwise ones, CUTLASS)."""

from __future__ import annotations

import functools
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8.casts import Cast, Granularity
from lightning_fp8.formats import E5M2
from lightning_fp8.kernels.capability import compute_capability, cuda_version, device_index, supports
from lightning_fp8.kernels.reference import round_up

Mode = Literal["tensorwise", "rowwise", "mixed", "blockwise", "mx"]

_MODES: dict[tuple[Granularity, Granularity], Mode] = {
    ("tensorwise", "tensorwise"): "tensorwise",
    ("rowwise", "rowwise"): "rowwise",
    ("rowwise", "tensorwise"): "mixed",
    ("tensorwise", "rowwise"): "mixed",
    ("1x128", "1x128"): "blockwise",
    ("1x128", "128x128"): "blockwise",
    ("128x128", "1x128"): "blockwise",
    ("1x32", "1x32"): "mx",
}


def native_mode(a: Tensor, casts: tuple[Cast, Cast]) -> Mode | None:
    """How the device of ``a`` multiplies operands cast so; ``None`` if it cannot or there is nothing to multiply."""
    if not a.is_cuda or not a.numel():
        return None
    # Texts keep their hash, casts do not.
    return _native_mode(device_index(a.device), str(casts[0]), str(casts[1]))


@functools.cache
def _native_mode(index: int, text_a: str, text_b: str) -> Mode | None:
    device = torch.device("cuda", index)
    a, b = Cast.parse(text_a), Cast.parse(text_b)
    if a is None or b is None or (a.format is E5M2 and b.format is E5M2):  # cuBLASLt has no product of two E5M2.
        return None
    if not all(supports(operand.granularity, device, operand.format)[0] for operand in (a, b)):
        return None
    return _MODES.get((a.granularity, b.granularity))


@torch._dynamo.assume_constant_result
def mode_in_graph(device: torch.device, text_a: str, text_b: str) -> str:
    """The mode of a product that a traced graph may hold as an operator of torch; empty if it may not.

    Args:
        device: where the operands are.
        text_a: the cast of the left operand, as text.
        text_b: the cast of the right one.
    """
    mode = _native_mode(device_index(device), text_a, text_b) if device.type == "cuda" else None
    if mode == "tensorwise" or (mode == "rowwise" and _rowwise_by_cublas(device_index(device))):
        return mode
    return ""


def scaled_mm(
    a: Tensor, b: Tensor, decode_a: Tensor, decode_b: Tensor, mode: Mode, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """``a @ b^T`` on FP8 tensor cores; sizes are multiples of what the casts ask for.

    Where the hardware's kernels do not write ``out_dtype``, they write a wider or, if there is none, another 16-bit
    type first: bf16 for rowwise scales before Hopper and on Blackwell (CUTLASS kernels), fp32 for fp16 from blocks.

    Args:
        a: FP8 ``[m, k]``.
        b: FP8 ``[n, k]``.
        decode_a: fp32 decode scales of ``a``.
        decode_b: fp32 decode scales of ``b``.
        mode: what :func:`native_mode` gave.
        out_dtype: fp32, bf16 or fp16.
        fast_accum: let Hopper accumulate with fewer bits; ignored for block scales.

    Returns:
        ``[m, n]`` in ``out_dtype``.
    """
    if mode == "mixed":
        # Both scales must be vectors then.
        decode_a = decode_a.expand(a.shape[0], 1).contiguous()
        decode_b = decode_b.expand(b.shape[0], 1).contiguous()
    if mode in ("tensorwise", "rowwise", "mixed"):
        native = out_dtype if mode == "tensorwise" or _rowwise_by_cublas(device_index(a.device)) else torch.bfloat16
        out = torch._scaled_mm(a, b.t(), decode_a, decode_b.t(), out_dtype=native, use_fast_accum=fast_accum)
        return out if native is out_dtype else out.to(out_dtype)
    native = torch.float32 if out_dtype is torch.float16 else out_dtype
    scale = _block_scale if mode == "blockwise" else _mx_scale
    out = F.scaled_mm(a, b.t(), *scale(a, decode_a), *scale(b, decode_b), *_swizzles(mode), output_dtype=native)
    return out if native is out_dtype else out.to(out_dtype)


@functools.cache
def _rowwise_by_cublas(index: int) -> bool:
    """Since CUDA 12.9 cuBLASLt scales rows, on Hopper; CUTLASS does elsewhere, and writes bf16 only."""
    return compute_capability(index)[0] == 9 and cuda_version() >= (12, 9)


def _block_scale(operand: Tensor, decode: Tensor) -> tuple[Tensor, F.ScalingType]:
    """Decode scales of 1x128 or 128x128 blocks as ``torch.nn.functional.scaled_mm`` takes them."""
    if decode.shape[0] == operand.shape[0]:
        return decode, F.ScalingType.BlockWise1x128
    # Its layout is [blocks of k, blocks of rows], the first of them contiguous and padded to a multiple of 4.
    blocks = decode.shape[1]
    padded = round_up(blocks, 4)
    if padded != blocks:
        decode = F.pad(decode, (0, padded - blocks))
    return decode.t(), F.ScalingType.BlockWise128x128


def _mx_scale(operand: Tensor, decode: Tensor) -> tuple[Tensor, F.ScalingType]:
    """Decode scales of 1x32 blocks as E8M0, in the order that tensor cores read them.

    Tiles of 128 rows by 4 blocks follow each other; within one, row ``32 * i + j`` lies at byte ``16 * j + 4 * i``
    (cuBLAS documentation, "1D Block Scaling Factors Layout").
    """
    rows, blocks = decode.shape
    decode = F.pad(decode, (0, round_up(blocks, 4) - blocks, 0, round_up(rows, 128) - rows), value=1.0)
    tiles = decode.view(-1, 4, 32, decode.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.to(torch.float8_e8m0fnu).contiguous().flatten(), F.ScalingType.BlockWise1x32


def _swizzles(mode: Mode) -> tuple[F.SwizzleType, F.SwizzleType]:
    swizzle = F.SwizzleType.SWIZZLE_32_4_4 if mode == "mx" else F.SwizzleType.NO_SWIZZLE
    return swizzle, swizzle
