"""What callbacks do in ``on_exception``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


@contextmanager
def while_ending(who: str) -> Iterator[None]:
    """Only tell of an error in here: the exception that ends the run is what its user is to see.

    Args:
        who: is named in the warning.
    """
    try:
        yield
    except Exception as error:
        log.warning("%s, while another exception ends the run: %s: %s", who, type(error).__name__, error)
