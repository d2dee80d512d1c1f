"""Backends by name, and the choice among them."""

from __future__ import annotations

import torch

from lightning_fp8.backends.base import Backend, Support
from lightning_fp8.backends.native import NativeBackend
from lightning_fp8.backends.torchao import TorchaoBackend
from lightning_fp8.backends.transformer_engine import TransformerEngineBackend
from lightning_fp8.recipes import Recipe

_CLASSES: dict[str, type[Backend]] = {
    cls.name: cls for cls in (NativeBackend, TorchaoBackend, TransformerEngineBackend)
}
BACKEND_NAMES: tuple[str, ...] = ("auto", *_CLASSES)


def get_backend(backend: Backend | str) -> Backend:
    """A backend from its name, or itself. ``"auto"`` is the native one: the fastest in every table measured so far.

    Raises:
        ValueError: the name is unknown.
        TypeError: ``backend`` is neither a name nor a backend.
    """
    if isinstance(backend, Backend):
        return backend
    if not isinstance(backend, str):
        raise TypeError(f"A backend is a name or a Backend object, got {type(backend).__name__}.")
    if backend not in BACKEND_NAMES:
        raise ValueError(f"Unknown backend {backend!r}: choose one of {', '.join(BACKEND_NAMES)}.")
    return _CLASSES["native" if backend == "auto" else backend]()


def check_support(backend: Backend, recipe: Recipe, device: torch.device) -> Support:
    """How ``backend`` runs ``recipe`` on ``device``.

    Raises:
        ValueError: it does not.
    """
    support = backend.support(recipe, device)
    if support.kind == "refused":
        raise ValueError(
            f"The {backend.name} backend cannot run the {recipe.name} recipe on {device.type}: {support.reason}"
        )
    return support
