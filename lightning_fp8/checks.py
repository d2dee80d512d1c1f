"""Types of settings, looked at where they are given: from YAML and mappings anything may come."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any


def check_number(*, whole: bool = False, none: bool = False, least: int | None = None, **settings: Any) -> None:
    """Look whether settings are numbers; of their ranges only what many have in common.

    Args:
        whole: only whole numbers will do: ints, for a float would fail wherever it counts or gives a size.
        none: ``None`` will do too.
        least: the least that will do.
        settings: by name.

    Raises:
        TypeError: one is no number; a bool is none.
        ValueError: one is below ``least``, or so large that no tensor holds it: an int beyond 64 bits where only whole
            numbers will do, else one beyond a float.
    """
    or_none = " or None" if none else ""
    for name, value in settings.items():
        if value is None and none:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
            raise TypeError(f"{name} must be a {'whole number (int)' if whole else 'number'}{or_none}, got {value!r}.")
        if not _fits(value, whole):
            raise ValueError(f"{name} must be a number that fits {'64 bits' if whole else 'a float'}, got {value!r}.")
        if least is not None and not float(value) >= least:
            raise ValueError(f"{name} must be at least {least}{or_none}, got {value!r}.")


def _fits(value: Any, whole: bool) -> bool:
    if whole:
        return bool(abs(value) < 2**63)
    try:
        float(value)
    except OverflowError:
        return False
    return True


def keep_as_floats(settings: object, *names: str) -> None:
    """Turn the numbers of a frozen dataclass into floats, in place: torch takes no int beyond 64 bits.

    Args:
        settings: the dataclass.
        names: of its fields, looked at before; ``None`` stays.
    """
    for name in names:
        value = getattr(settings, name)
        object.__setattr__(settings, name, None if value is None else float(value))


def check_flag(*, none: bool = False, **settings: Any) -> None:
    """Look whether settings are true or false; the text ``"false"`` would count as true.

    Args:
        none: ``None`` will do too.
        settings: by name.

    Raises:
        TypeError: one is no bool.
    """
    _check("true or false", lambda value: isinstance(value, bool) or (none and value is None), settings)


def check_text(**settings: Any) -> None:
    """Look whether settings are text.

    Raises:
        TypeError: one is not.
    """
    _check("text", lambda value: isinstance(value, str), settings)


def check_path(**settings: Any) -> None:
    """Look whether settings are paths of files or ``None``.

    Raises:
        TypeError: one is neither.
        ValueError: one names a directory.
    """
    _check("a path or None", lambda value: value is None or isinstance(value, (str, os.PathLike)), settings)
    for name, value in settings.items():
        if isinstance(value, str) and value.endswith(("/", os.sep)):
            raise ValueError(f"{name}={value!r} names a directory: give the path of a file in it.")


def check_function(of: str, **settings: Any) -> None:
    """Look whether settings are functions or ``None``.

    Args:
        of: what they take, for the message.
        settings: by name.

    Raises:
        TypeError: one is neither.
    """
    _check(f"a function of {of} or None", lambda value: value is None or callable(value), settings)


def _check(kind: str, fits: Callable[[Any], bool], settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        if not fits(value):
            raise TypeError(f"{name} must be {kind}, got {value!r}.")


def as_patterns(name: str, patterns: Iterable[str] | str | None) -> tuple[str, ...]:
    """The patterns of the setting ``name``: of one, of several, or none.

    Raises:
        TypeError: something else is among them.
    """
    if patterns is None:
        return ()
    found = (patterns,) if isinstance(patterns, str) or not isinstance(patterns, Iterable) else tuple(patterns)
    if not all(isinstance(pattern, str) for pattern in found):
        raise TypeError(f"{name} must be a list of patterns, got {patterns!r}.")
    return found


def first_line(error: Exception) -> str:
    """What an error of a library says, without the pages that some add; its class where it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)
