"""What is put on a module for a while, and must not go along where somebody copies or pickles the module meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class UncopiedHook:
    """A hook of one module; its copies get one that does nothing.

    Args:
        hook: what is called.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._hook(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _idle_hook, ()


class StandIn:
    """Stands in for a method of one module; its copies have the method itself.

    Args:
        method: which one, bound.
        call: what is called instead.
    """

    def __init__(self, method: Callable[..., Any], call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        # Lightning looks through one wrapper only for a method's own code, and FSDP2 puts another around this.
        self.__code__ = getattr(method, "__code__", None)
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # A bound method is copied along with its object.
        return _itself, (self.__wrapped__,)  # type: ignore[attr-defined]


class Uncopied:
    """An attribute of one module, which is ``None`` in its copies."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _idle_hook() -> Callable[..., None]:
    return _do_nothing


def _itself(value: Any) -> Any:
    return value
