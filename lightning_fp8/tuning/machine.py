"""What this machine runs natively, emulates and refuses, and with which versions: ``lightning-fp8 doctor``."""

from __future__ import annotations

import importlib.util
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from lightning_fp8.kernels.capability import has_fast_casts
from lightning_fp8.support_table import support_here
from lightning_fp8.text_table import text_table
from lightning_fp8.tuning.peaks import peak_of
from lightning_fp8.tuning.table import shipped_tables
from lightning_fp8.version import __version__

#: Import name and distribution name of what may be installed, and what it is for.
_OPTIONAL = (
    ("triton", "triton", "this package's kernels on GPUs"),
    ("torchao", "torchao", "the torchao backend"),
    ("transformer_engine", "transformer-engine", "the transformer_engine backend"),
    ("fbgemm_gpu", "fbgemm-gpu-genai", 'NativeBackend(gemm="fbgemm")'),
    ("matplotlib", "matplotlib", "pictures"),
)


def examine() -> dict[str, Any]:
    """Plain values: versions, GPUs, optional libraries, and the support of every backend and recipe here."""
    return {
        "versions": {
            "lightning_fp8": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "lightning": version("lightning"),
        },
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "optional": {name: {"version": _version(name, dist), "for": use} for name, dist, use in _OPTIONAL},
        "support": [
            {"backend": row.backend, "recipe": row.recipe, "kind": row.support[0].kind, "reason": row.support[0].reason}
            for row in support_here()
        ],
        "shipped_tables": {gpu: table.date for gpu, table in shipped_tables().items()},
    }


def describe(found: dict[str, Any]) -> str:
    """What :func:`examine` found, for people to read."""
    lines = ["Versions: " + ", ".join(f"{name} {text or 'none'}" for name, text in found["versions"].items())]
    for gpu in found["gpus"]:
        casts = "Triton casts" if gpu["fast_casts"] else "casts in plain torch"
        peak = f", dense peaks {gpu['bf16_tflops']:g} (bf16) and {gpu['fp8_tflops']:g} (FP8) TFLOP/s"
        lines.append(
            f"GPU {gpu['index']}: {gpu['name']}, compute capability {gpu['capability']}, {gpu['memory_gib']:.0f} GiB, "
            f"{casts}{peak if gpu['bf16_tflops'] else ''}"
        )
    if not found["gpus"]:
        lines.append("GPU: none that torch sees; FP8 is emulated on the CPU")
    for name, library in found["optional"].items():
        lines.append(f"{name}: {library['version'] or 'not installed'} (for {library['for']})")
    tables = ", ".join(f"{gpu} ({date})" for gpu, date in found["shipped_tables"].items()) or "none"
    lines += [f"Measured times shipped for: {tables}", ""]
    rows = [("backend", "recipe", "here", "why")]
    rows += [(row["backend"], row["recipe"], row["kind"], row["reason"]) for row in found["support"]]
    return "\n".join([*lines, *text_table(rows)])


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    peak = peak_of(properties.name)
    return {
        "index": index,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": properties.total_memory / 2**30,
        "fast_casts": has_fast_casts(torch.device("cuda", index)),
        "bf16_tflops": peak.bf16 if peak else None,
        "fp8_tflops": peak.fp8 if peak else None,
    }


def _version(module: str, distribution: str) -> str | None:
    """The installed version; ``"unknown"`` for a module that came another way, ``None`` if there is none."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"
