"""What callbacks do as a run ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


@contextmanager
def while_ending(who: str, when: str = "while another exception ends the run") -> Iterator[None]:
    """Only tell of an error in here: others have an end of their own to make, or an exception that is to be seen.

    Args:
        who: is named in the warning.
        when: and this.
    """
    try:
        yield
    except Exception as error:
        log.warning("%s, %s: %s: %s", who, when, type(error).__name__, error)
