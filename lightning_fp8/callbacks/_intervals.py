"""Every so many optimizer steps."""

from __future__ import annotations


def passes_multiple(of: int, before: int, now: int) -> bool:
    """Whether a multiple of ``of`` lies after ``before`` and not after ``now``.

    In manual optimization a batch may take several steps, and none may begin at the multiple itself.
    """
    return now // of > before // of
