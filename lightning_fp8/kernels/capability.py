"""What a device runs on its FP8 tensor cores, through torch.

The rules are those of torch 2.11 to 2.13 (``aten/src/ATen/native/cuda/ScaledBlas.cpp``) and of cuBLASLt (the sections
on 8-bit floating-point data types in its documentation).
"""

from __future__ import annotations

import functools
import importlib.util
from typing import NamedTuple

import torch

from lightning_fp8.formats import E4M3, Format


class Hardware(NamedTuple):
    """What decides which FP8 products run on a device.

    Attributes:
        type: the device's type, as torch calls it.
        capability: compute capability of a CUDA device.
        cuda: the CUDA version that torch was built with.
    """

    type: str
    capability: tuple[int, int] = (0, 0)
    cuda: tuple[int, int] = (0, 0)

    @staticmethod
    def of(device: torch.device | str) -> Hardware:
        """That of a device; a CUDA device without index is the current one."""
        device = torch.device(device)
        if device.type != "cuda" or torch.version.hip is not None:
            return Hardware("AMD GPU" if device.type == "cuda" else device.type)
        return Hardware("cuda", compute_capability(device_index(device)), cuda_version())


def supports(granularity: str, device: torch.device | str | Hardware, fmt: Format = E4M3) -> tuple[bool, str]:
    """Whether a GEMM of operands with such scales runs on FP8 tensor cores there.

    Args:
        granularity: as in :class:`lightning_fp8.casts.Cast`.
        device: any device, or a description of one.
        fmt: format of the operand.

    Returns:
        Whether it does, and why not; the reason is empty if it does. Elsewhere the arithmetic is emulated.
    """
    hardware = device if isinstance(device, Hardware) else Hardware.of(device)
    if hardware.type != "cuda":
        return False, f"{hardware.type} has no FP8 tensor cores"
    major, minor = hardware.capability
    name = f"compute capability {major}.{minor}"
    if (major, minor) < (8, 9):
        return False, f"{name} has no FP8 tensor cores (8.9 is the first that has)"
    if granularity in ("1x128", "128x128"):
        if major != 9:
            return False, f"{granularity} scales need Hopper (9.0), this GPU has {name}"
        if fmt is not E4M3:
            return False, f"{granularity} scales need E4M3 operands, not {fmt.name.upper()}: torch has no such kernel"
        if hardware.cuda < (12, 9):
            version = ".".join(map(str, hardware.cuda))
            return False, f"{granularity} scales need CUDA 12.9, torch was built with {version}"
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
