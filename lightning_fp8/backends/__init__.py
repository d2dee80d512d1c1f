"""The libraries that multiply, behind one protocol."""

from __future__ import annotations

from lightning_fp8.backends.base import Backend, Runtime, Support
from lightning_fp8.backends.registry import BACKEND_NAMES, check_support, get_backend

__all__ = ["BACKEND_NAMES", "Backend", "Runtime", "Support", "check_support", "get_backend"]
