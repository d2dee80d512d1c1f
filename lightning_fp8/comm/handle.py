"""A collective of several phases that is under way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch


class Waitable(Protocol):
    """What a backend gives for a collective under way."""

    def wait(self) -> object: ...


class WorkList:
    """Several sends and receives as one piece of work."""

    def __init__(self, works: Sequence[Waitable]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()


class Handle:
    """A collective on its way.

    On a CPU group the later phases of a collective are started by :meth:`wait`, so every rank must wait in the same
    order, as it must start the collectives themselves. On a GPU all phases are queued on a stream of their own from the
    start, and :meth:`wait` makes the current stream wait for them, not the host.
    """

    def __init__(self, phases: Iterator[Waitable]) -> None:
        self._phases = phases
        self._work = next(phases, None)
        self._event: torch.cuda.Event | None = None
        self._device: torch.device | None = None
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Return when the result may be used.

        Raises:
            MessageError: ranks called with different shapes, block sizes or formats (seen on CPU groups; on a GPU such
                a message decodes to NaN).
            RuntimeError: a rank did not answer within the group's timeout, or died.
        """
        if self._error is not None:
            raise self._error
        try:
            while self._work is not None:
                self._work.wait()
                self._work = next(self._phases, None)
        except BaseException as error:
            # A collective that failed stays failed: waiting again must not look like success.
            self._error = error
            raise
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def finish_on(self, stream: torch.cuda.Stream) -> None:
        """Queue all phases on ``stream``, which must be the current one; :meth:`wait` then waits for it."""
        self.wait()
        self._event, self._device = stream.record_event(), stream.device
