"""FBGEMM's FP8 products as an alternative to torch's (``fbgemm-gpu-genai``; signatures as of version 1.6).

Its kernels write bf16 and take E4M3 alone. A product with another output, with an E5M2 operand, or of two 1x128
operands (the weight gradient of the blockwise recipe) is left to torch's kernels.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util

import torch
from torch import Tensor

from lightning_fp8.casts import Cast
from lightning_fp8.checks import first_line
from lightning_fp8.formats import E4M3
from lightning_fp8.kernels.capability import Hardware
from lightning_fp8.recipes import Recipe

_REMEDY = "use gemm='torch'."
_TAKEN = {("tensorwise", "tensorwise"), ("rowwise", "rowwise"), ("1x128", "128x128")}


def why_not(recipe: Recipe, hardware: Hardware) -> str | None:
    """Why ``gemm="fbgemm"`` makes no sense for ``recipe`` there, with the remedy; ``None`` if it does."""
    if hardware.type != "cuda" or hardware.capability[0] != 9:
        return f"FBGEMM's FP8 kernels are built for Hopper (compute capability 9.0): {_REMEDY}"
    pairs = [recipe.gemm_casts("output"), recipe.gemm_casts("grad_input"), recipe.gemm_casts("grad_weight")]
    if not any(pair is not None and _takes_casts(pair) for pair in pairs):
        return f"FBGEMM has no kernel for any product of this recipe: {_REMEDY}"
    return None


def why_not_installed() -> str | None:
    """What to install; ``None`` if the library loads."""
    if importlib.util.find_spec("fbgemm_gpu") is None:
        return f"FBGEMM is not installed: pip install 'fbgemm-gpu-genai>=1.6' (built for your torch), or {_REMEDY}"
    try:
        load()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        remedy = f"install the fbgemm-gpu-genai built for your torch, or {_REMEDY}"
        return f"FBGEMM does not load ({first_line(error)}): {remedy}"
    return None


@functools.cache
def load() -> None:
    """Register FBGEMM's operators.

    Raises:
        ImportError, OSError, RuntimeError, AttributeError: the library is missing, or was built for another torch.
    """
    importlib.import_module("fbgemm_gpu.experimental.gen_ai")


def takes(a: Tensor, casts: tuple[Cast, Cast], out_dtype: torch.dtype) -> bool:
    """Whether FBGEMM multiplies operands cast so."""
    return a.is_cuda and a.numel() > 0 and out_dtype is torch.bfloat16 and _takes_casts(casts)


def scaled_mm(
    a: Tensor, b: Tensor, decode_a: Tensor, decode_b: Tensor, casts: tuple[Cast, Cast], fast_accum: bool
) -> Tensor:
    """``a @ b^T``, where :func:`takes` says that FBGEMM does it.

    Args:
        a: E4M3 ``[m, k]``.
        b: E4M3 ``[n, k]``.
        decode_a: fp32 decode scales of ``a``.
        decode_b: fp32 decode scales of ``b``.
        casts: how ``a`` and ``b`` were cast.
        fast_accum: accumulate with fewer bits; block scales ignore it.

    Returns:
        ``[m, n]`` bf16.
    """
    load()
    granularity = casts[0].granularity
    if granularity == "tensorwise":
        return torch.ops.fbgemm.f8f8bf16(a, b, (decode_a * decode_b).view(1), fast_accum)
    if granularity == "rowwise":
        return torch.ops.fbgemm.f8f8bf16_rowwise(a, b, decode_a.view(-1), decode_b.view(-1), None, fast_accum)
    # Its scales are [blocks of k, rows] and [blocks of k, blocks of rows], both contiguous.
    return torch.ops.fbgemm.f8f8bf16_groupwise(a, b, decode_a.t().contiguous(), decode_b.t().contiguous())


def _takes_casts(casts: tuple[Cast, Cast]) -> bool:
    return (casts[0].granularity, casts[1].granularity) in _TAKEN and casts[0].format is casts[1].format is E4M3
