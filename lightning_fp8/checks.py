"""Types of settings, looked at where they are given: from YAML and mappings anything may come."""

from __future__ import annotations

from numbers import Real
from typing import Any


def check_number(*, whole: bool = False, none: bool = False, **settings: Any) -> None:
    """Look whether settings are numbers; their ranges are another matter.

    Args:
        whole: only whole numbers will do.
        none: ``None`` will do too.
        settings: by name.

    Raises:
        TypeError: one is no number; a bool is none.
    """
    for name, value in settings.items():
        if value is None and none:
            continue
        if isinstance(value, bool) or not isinstance(value, Real) or (whole and value % 1 != 0):
            raise TypeError(f"{name} must be a {'whole ' if whole else ''}number, got {value!r}.")


def check_flag(**settings: Any) -> None:
    """Look whether settings are true or false; the text ``"false"`` would count as true.

    Raises:
        TypeError: one is no bool.
    """
    for name, value in settings.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be true or false, got {value!r}.")


def first_line(error: Exception) -> str:
    """What an error of a library says, without the pages that some add; its class where it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)
