"""The event log: one JSON line for each thing that recovery saw or did, and how often."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

from lightning_fp8.checks import check_number
from lightning_fp8.files import append_text, located, read_text

log = logging.getLogger(__name__)

#: Lines kept in memory for the report.
RECENT = 1000
#: Actions after which the batch was, or could have been, taken.
NOT_LEFT_OUT = ("retry", "loss_scale_lowered")


class EventLog:
    """Writes events as they come, flushed, so that a killed process leaves them behind.

    Where a line cannot be written, a warning says so, the file ends there, and ``path`` is None.

    Args:
        path: of the file, appended to, or its address where fsspec reaches; None: nothing is written, only counted.
        writes: whether this process writes (rank 0 does).

    Attributes:
        counts: how often each kind of event came, over resumes.
        recent: the last events, as dicts.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, writes: bool = True) -> None:
        self.path = located(path) if path is not None else None
        self.writes = writes
        self.counts: Counter[str] = Counter()
        self.recent: list[dict[str, Any]] = []

    def add(self, event: str, **details: Any) -> dict[str, Any]:
        """Count an event and write its line."""
        line = {"event": event, **{key: _plain(value) for key, value in details.items() if value is not None}}
        self.counts[event] += 1
        self.recent = [*self.recent[-RECENT + 1 :], line]
        if self.writes and self.path is not None:
            try:
                append_text(self.path, json.dumps(line) + "\n")
            except OSError as error:
                # A line that was cut off can be read over only at the end.
                log.warning("The event log %s ends here, for it cannot be written: %s", self.path, error)
                self.path = None
        return line

    def clear(self) -> None:
        """Another run begins: count anew."""
        self.counts, self.recent = Counter(), []

    def state_dict(self) -> dict[str, int]:
        """The counts."""
        return dict(self.counts)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on counting."""
        self.counts = Counter(state)


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The events of a log; a last line that was cut off by a kill is left out.

    Raises:
        FileNotFoundError: where there is no such file.
        ValueError: where another line is no event.
    """
    lines = read_text(path).splitlines()
    events = []
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: not an event log ({error}).") from error
            continue
        if not isinstance(event, dict) or "event" not in event:
            raise ValueError(f"{path}, line {number}: not an event log (it names no event).")
        events.append(event)
    return events


def rejected_batches(events: Iterable[dict[str, Any]]) -> set[tuple[int, int]]:
    """(epoch, batch index) of every batch that was left out: what ``skip_batches`` takes.

    Not those that were tried again, nor those whose gradients overflowed under a loss scale: no fault of the data.
    """
    rejected = [event for event in events if event["event"] == "rejected" and event.get("action") not in NOT_LEFT_OUT]
    return {(event["epoch"], batch) for event in rejected for batch in event["batches"]}


def batches_to_leave_out(given: Iterable[tuple[int, int]] | str | os.PathLike[str]) -> set[tuple[int, int]]:
    """What ``skip_batches`` means: pairs (epoch, batch index), or the path of an event log, for those rejected there.

    Raises:
        TypeError: something else is given.
        ValueError: what is given holds something else.
        FileNotFoundError: there is no such log.
    """
    if isinstance(given, (str, os.PathLike)):
        try:
            return rejected_batches(read_events(given))
        except FileNotFoundError as error:
            # From a YAML file a list of something else comes as text.
            raise FileNotFoundError(
                f"skip_batches={str(given)!r} is neither a list of pairs (epoch, batch index) nor an event log that is "
                "there."
            ) from error
    if not isinstance(given, Iterable):
        raise TypeError(
            f"skip_batches must be a list of pairs (epoch, batch index) or an event log's path, got {given!r}."
        )
    batches = set()
    for pair in given:
        try:
            epoch, batch = pair
            check_number(whole=True, least=0, epoch=epoch, batch=batch)
            batches.add((int(epoch), int(batch)))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"skip_batches holds {pair!r}: give pairs (epoch, batch index), or an event log's path."
            ) from error
    return batches


def _plain(value: Any) -> Any:
    """JSON has no NaN and no Inf: they become words."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(item) for item in value]
    return value
