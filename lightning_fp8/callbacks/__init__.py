"""Lightning callbacks, one a file."""

from __future__ import annotations

from lightning_fp8.callbacks.amax_monitor import AmaxMonitor
from lightning_fp8.callbacks.communication import FP8Communication
from lightning_fp8.callbacks.ema import EMAOfAcceptedSteps
from lightning_fp8.callbacks.fault_injector import Fault, FaultInjector
from lightning_fp8.callbacks.health_monitor import FP8HealthError, FP8HealthMonitor
from lightning_fp8.callbacks.recovery import RecoveryExhausted, SkipBatchException, SkipBatchRecovery
from lightning_fp8.callbacks.report import FP8Report
from lightning_fp8.callbacks.throughput import FP8Throughput

__all__ = [
    "AmaxMonitor",
    "EMAOfAcceptedSteps",
    "FP8Communication",
    "FP8HealthError",
    "FP8HealthMonitor",
    "FP8Report",
    "FP8Throughput",
    "Fault",
    "FaultInjector",
    "RecoveryExhausted",
    "SkipBatchException",
    "SkipBatchRecovery",
]
