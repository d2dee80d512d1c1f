"""Backends by name, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

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


class Choice(NamedTuple):
    """What ``backend="auto"`` stands for.

    Attributes:
        backend: the backend.
        reason: why this one, for people to read.
    """

    backend: Backend
    reason: str


def get_backend(backend: Backend | str, recipe: Recipe | None = None, device: torch.device | None = None) -> Backend:
    """A backend from its name, or itself.

    Args:
        backend: a name or a backend; ``"auto"`` is what :func:`choose_backend` chooses, and the native one while
            recipe and device are unknown.
        recipe: what will run.
        device: where it will run.

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
    if backend == "auto":
        return NativeBackend() if recipe is None or device is None else choose_backend(recipe, device).backend
    return _CLASSES[backend]()


def choose_backend(recipe: Recipe, device: torch.device) -> Choice:
    """The backend that is fastest for ``recipe`` on ``device``, with what is installed, and right.

    That is the native one wherever it has tensor cores for the recipe (the fastest in every table measured so far, see
    ``docs/benchmarks``). Where it would emulate, a library with kernels for the recipe is preferred, if it is there.
    """
    others = (cls() for name, cls in _CLASSES.items() if name != NativeBackend.name)
    return choose(NativeBackend().support(recipe, device), ((other, other.support(recipe, device)) for other in others))


def choose(native: Support, others: Iterable[tuple[Backend, Support]]) -> Choice:
    """The choice, from what the native backend and the others say (they are asked only where it matters)."""
    if native.kind == "native":
        return Choice(NativeBackend(), "the native backend is the fastest in every table measured so far")
    for backend, support in others:
        if support.kind == "native":
            return Choice(backend, f"{native.reason} for the native backend, and {backend.name} has kernels for it")
    return Choice(NativeBackend(), "no installed library has tensor-core kernels for this recipe here")


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
