"""The libraries that multiply, behind one protocol."""

from __future__ import annotations

from lightning_fp8.backends.base import Backend, Runtime, Support
from lightning_fp8.backends.native import NativeBackend
from lightning_fp8.backends.registry import BACKEND_NAMES, NAMED_BACKENDS, Choice, get_backend, resolve_backend
from lightning_fp8.backends.torchao import TorchaoBackend
from lightning_fp8.backends.transformer_engine import TransformerEngineBackend

__all__ = [
    "BACKEND_NAMES",
    "NAMED_BACKENDS",
    "Backend",
    "Choice",
    "NativeBackend",
    "Runtime",
    "Support",
    "TorchaoBackend",
    "TransformerEngineBackend",
    "get_backend",
    "resolve_backend",
]
