"""Backends by name, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from lightning_fp8.backends.base import Backend, Support
from lightning_fp8.backends.native import NativeBackend
from lightning_fp8.backends.torchao import TorchaoBackend
from lightning_fp8.backends.transformer_engine import TransformerEngineBackend
from lightning_fp8.kernels.capability import Hardware
from lightning_fp8.recipes import Recipe

_CLASSES: dict[str, type[Backend]] = {
    cls.name: cls for cls in (NativeBackend, TorchaoBackend, TransformerEngineBackend)
}
#: The words for ``backend=``.
BACKEND_NAMES: tuple[str, ...] = ("auto", *_CLASSES)
#: What is measured and listed side by side: the backends, and what an option makes another of.
NAMED_BACKENDS: dict[str, Backend] = {
    **{name: cls() for name, cls in _CLASSES.items()},
    "fbgemm": NativeBackend(gemm="fbgemm"),
}


class Choice(NamedTuple):
    """What ``backend="auto"`` stands for.

    Attributes:
        backend: the backend.
        reason: why this one, for people to read.
        support: how it runs the recipe there.
    """

    backend: Backend
    reason: str
    support: Support


def get_backend(backend: Backend | str) -> Backend:
    """A backend from its name, or itself. ``"auto"`` names none: see :func:`resolve_backend`.

    Raises:
        ValueError: the name is unknown.
        TypeError: ``backend`` is neither a name nor a backend.
    """
    if isinstance(backend, Backend):
        return backend
    if not isinstance(backend, str):
        raise TypeError(f"A backend is a name or a Backend object, got {type(backend).__name__}.")
    if backend not in _CLASSES:
        raise ValueError(f"Unknown backend {backend!r}: choose one of {', '.join(BACKEND_NAMES)}.")
    return _CLASSES[backend]()


def resolve_backend(backend: Backend | str, recipe: Recipe, device: torch.device) -> Choice:
    """The backend that runs ``recipe`` on ``device``: the one asked for, or for ``"auto"`` the one chosen.

    Raises:
        ValueError: the name is unknown, or the backend asked for cannot run the recipe there.
        TypeError: ``backend`` is neither a name nor a backend.
    """
    if backend == "auto":
        return choose_backend(recipe, device)
    asked = get_backend(backend)
    return Choice(asked, "as asked for", check_support(asked, recipe, device))


def choose_backend(recipe: Recipe, device: torch.device) -> Choice:
    """The backend that is fastest for ``recipe`` on ``device``, with what is installed, and right.

    That is the native one wherever it has tensor cores for the recipe (the fastest in every table measured so far, see
    ``docs/benchmarks``). Where it would emulate, a library with kernels for the recipe is preferred, if it is there.
    """
    hardware = Hardware.of(device)
    others = (cls() for name, cls in _CLASSES.items() if name != NativeBackend.name)
    # What is installed is looked at, and imported, only where it has kernels.
    able = (other for other in others if other.support_on(recipe, hardware).kind == "native")
    return choose(NativeBackend().support(recipe, device), ((other, other.support(recipe, device)) for other in able))


def choose(native: Support, others: Iterable[tuple[Backend, Support]]) -> Choice:
    """The choice, from what the native backend and the others say (they are asked only where it matters)."""
    if native.kind == "native":
        return Choice(NativeBackend(), "the native backend is the fastest in every table measured so far", native)
    for backend, support in others:
        if support.kind == "native":
            reason = f"{native.reason} for the native backend, and {backend.name} has kernels for it"
            return Choice(backend, reason, support)
    return Choice(NativeBackend(), "no installed library has tensor-core kernels for this recipe here", native)


def check_support(backend: Backend, recipe: Recipe, device: torch.device) -> Support:
    """How ``backend`` runs ``recipe`` on ``device``.

    Raises:
        ValueError: it does not.
    """
    support = backend.support(recipe, device)
    if support.kind == "refused":
        raise ValueError(
            f"The {backend.name} backend cannot run the {recipe.label} recipe on {device.type}: {support.reason}"
        )
    return support
