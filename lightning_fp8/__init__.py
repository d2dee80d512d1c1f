"""FP8 training for PyTorch Lightning with one line: ``Trainer(plugins=[FP8Precision()])``."""

from __future__ import annotations

from lightning_fp8 import operators  # noqa: F401 (registers torch.ops.lightning_fp8.scaled_linear)
from lightning_fp8.callbacks import (
    AmaxMonitor,
    EMAOfAcceptedSteps,
    Fault,
    FaultInjector,
    FP8Communication,
    FP8HealthError,
    FP8HealthMonitor,
    FP8Report,
    FP8Throughput,
    RecoveryExhausted,
    SkipBatchException,
    SkipBatchRecovery,
)
from lightning_fp8.compiling import compile, compile_options
from lightning_fp8.fsdp_precision import FP8FSDPPrecision
from lightning_fp8.model import convert_model, revert_model, step
from lightning_fp8.precision import FP8Precision
from lightning_fp8.recipes import (
    BlockwiseScaling,
    DelayedScaling,
    MXFP8Scaling,
    RowwiseScaling,
    StaticScaling,
    TensorwiseScaling,
)
from lightning_fp8.selection import LayerSelection
from lightning_fp8.shard import shard
from lightning_fp8.version import __version__

__all__ = [
    "AmaxMonitor",
    "BlockwiseScaling",
    "DelayedScaling",
    "EMAOfAcceptedSteps",
    "FP8Communication",
    "FP8FSDPPrecision",
    "FP8HealthError",
    "FP8HealthMonitor",
    "FP8Precision",
    "FP8Report",
    "FP8Throughput",
    "Fault",
    "FaultInjector",
    "LayerSelection",
    "MXFP8Scaling",
    "RecoveryExhausted",
    "RowwiseScaling",
    "SkipBatchException",
    "SkipBatchRecovery",
    "StaticScaling",
    "TensorwiseScaling",
    "__version__",
    "compile",
    "compile_options",
    "convert_model",
    "revert_model",
    "shard",
    "step",
]
