"""What a device runs on its FP8 tensor cores, through torch.

The rules are those of torch 2.11 to 2.13 (``aten/src/ATen/native/cuda/ScaledBlas.cpp``) and of cuBLASLt (the sections
on 8-bit floating-point data types in its documentation).
"""

from __future__ import annotations

import functools
import importlib.util

import torch


def supports(granularity: str, device: torch.device | str) -> tuple[bool, str]:
    """Whether a GEMM of operands with such scales runs on FP8 tensor cores there.

    Args:
        granularity: as in :class:`lightning_fp8.recipes.Cast`.
        device: any device; a CUDA device without index is the current one.

    Returns:
        Whether it does, and why not; the reason is empty if it does. Elsewhere the arithmetic is emulated.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return False, f"{device.type} has no FP8 tensor cores"
    if torch.version.hip is not None:
        return False, "AMD GPUs are not supported"
    major, minor = compute_capability(device_index(device))
    name = f"compute capability {major}.{minor}"
    if (major, minor) < (8, 9):
        return False, f"{name} has no FP8 tensor cores (8.9 is the first that has)"
    if granularity in ("1x128", "128x128"):
        if major != 9:
            return False, f"{granularity} scales need Hopper (9.0), this GPU has {name}"
        if cuda_version() < (12, 9):
            return False, f"{granularity} scales need CUDA 12.9, torch was built with {torch.version.cuda}"
    if granularity == "1x32" and not 10 <= major < 12:
        return False, f"{granularity} scales need Blackwell (10.0), this GPU has {name}"
    return True, ""


def has_fast_casts(device: torch.device) -> bool:
    """Whether the Triton casts run there: a GPU that converts to FP8, and Triton."""
    return device.type == "cuda" and _has_fast_casts(device_index(device))


@functools.cache
def compute_capability(index: int) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(index)


@functools.cache
def cuda_version() -> tuple[int, int]:
    """The CUDA version that torch was built with; ``(0, 0)`` without."""
    major, minor = (torch.version.cuda or "0.0").split(".")[:2]
    return int(major), int(minor)


@functools.cache
def _has_fast_casts(index: int) -> bool:
    return (
        torch.version.hip is None
        and compute_capability(index) >= (8, 9)
        and importlib.util.find_spec("triton") is not None
    )


def device_index(device: torch.device) -> int:
    """The index of a CUDA device; without one it is the current device."""
    return torch.cuda.current_device() if device.index is None else device.index
