"""Measured times of linear layers: the tables that are shipped, and those that a machine makes for itself."""

from __future__ import annotations

import json
import logging
import math
import os
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

log = logging.getLogger(__name__)

#: Token counts and sizes of the tables. Between them times are interpolated in the logarithms.
TOKENS = (1024, 4096, 16384, 65536)
SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384)
#: Larger products than this are left out: their rates are those of the largest that are in.
MOST_WORK = 2**41

Point = tuple[int, int, int]


class Times(Protocol):
    """Anything that knows how long a layer takes, forward and backward."""

    def milliseconds(self, variant: str, tokens: int, in_features: int, out_features: int) -> float:
        """On the GPU, where ``variant`` is ``"bf16"`` or an FP8 one."""

    def host_milliseconds(self, variant: str, compiled: bool) -> float:
        """What the host needs to issue it, in eager mode or in a compiled model, whatever its size."""


@dataclass
class LayerTable:
    """Milliseconds of forward and backward of one linear layer, on one kind of GPU.

    Attributes:
        gpu: the GPU's name.
        torch: torch's version at the measurement.
        date: of the measurement, ISO.
        times: by variant (``"bf16"`` or a recipe's name), then by ``(tokens, in_features, out_features)``.
        host: by variant, what the host of that machine needed to issue the layer in eager mode.
        host_compiled: the same in a compiled model.
    """

    gpu: str
    torch: str
    date: str
    times: dict[str, dict[Point, float]] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
    host_compiled: dict[str, float] = field(default_factory=dict)

    def milliseconds(self, variant: str, tokens: int, in_features: int, out_features: int) -> float:
        """The time of a layer of any size.

        Raises:
            KeyError: the variant was not measured.
            ValueError: it has no times.
        """
        points = self.times[variant]
        axes = [sorted({point[axis] for point in points}) for axis in range(3)]
        return _interpolate(points, axes, (tokens, in_features, out_features))

    def host_milliseconds(self, variant: str, compiled: bool) -> float:
        """The host's time.

        Raises:
            KeyError: the variant was not measured.
        """
        return (self.host_compiled if compiled else self.host)[variant]

    def to_json(self) -> str:
        """Text that :meth:`from_json` reads."""
        times = {
            variant: [[*point, round(ms, 5)] for point, ms in sorted(points.items())]
            for variant, points in self.times.items()
        }
        hosts = {
            name: {variant: round(ms, 5) for variant, ms in getattr(self, name).items()}
            for name in ("host", "host_compiled")
        }
        return json.dumps({"gpu": self.gpu, "torch": self.torch, "date": self.date, **hosts, "times": times})

    @staticmethod
    def from_json(text: str) -> LayerTable:
        """The inverse of :meth:`to_json`.

        Raises:
            KeyError: a part is missing.
            TypeError: one is of another type.
            ValueError: one is damaged, or a variant has no times.
        """
        data: dict[str, Any] = json.loads(text)
        times = {
            variant: {(int(t), int(i), int(o)): float(ms) for t, i, o, ms in rows}
            for variant, rows in data["times"].items()
        }
        if not all(times.get(variant) for variant in ("bf16", *times)):
            raise ValueError("Every variant of a table has times, and bf16 is one.")
        return LayerTable(data["gpu"], data["torch"], data["date"], times, data["host"], data["host_compiled"])


def grid() -> list[Point]:
    """The points that a table holds."""
    return [(t, i, o) for t in TOKENS for i in SIZES for o in SIZES if 2 * t * i * o <= MOST_WORK]


def shipped_tables() -> dict[str, LayerTable]:
    """The tables that come with the package, by GPU name."""
    folder = resources.files("lightning_fp8.tuning") / "data"
    files = [file for file in folder.iterdir() if file.name.endswith(".json")] if folder.is_dir() else []
    tables = [LayerTable.from_json(file.read_text()) for file in sorted(files, key=lambda file: file.name)]
    return {table.gpu: table for table in tables}


def cache_folder() -> Path:
    """Where a machine keeps its own tables: ``$XDG_CACHE_HOME/lightning_fp8``, by default under ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_fp8"


class MeasuredTimes:
    """Times measured on this machine, kept on disk for each GPU and torch version.

    Args:
        gpu: the GPU's name.
        torch: torch's version.
        measure: ``measure(variant, tokens, in_features, out_features)`` in milliseconds, for what is not known yet.
        measure_host: ``measure_host(variant, compiled)`` in milliseconds.
        folder: where the file lies.

    Attributes:
        path: the file.
    """

    def __init__(
        self,
        gpu: str,
        torch: str,
        measure: Callable[[str, int, int, int], float],
        measure_host: Callable[[str, bool], float],
        folder: Path | None = None,
    ) -> None:
        self._measure = measure
        self._measure_host = measure_host
        name = "".join(c if c.isalnum() else "-" for c in f"{gpu}-{torch}").lower()
        self.path = (folder or cache_folder()) / f"{name}.json"
        self._times = _read(self.path)

    def milliseconds(self, variant: str, tokens: int, in_features: int, out_features: int) -> float:
        """The time of a layer, measured if it is not known."""
        where = (tokens, in_features, out_features)
        return self._known(f"{variant} {tokens} {in_features} {out_features}", lambda: self._measure(variant, *where))

    def host_milliseconds(self, variant: str, compiled: bool) -> float:
        """The host's time, measured if it is not known."""
        key = f"{variant} host{' compiled' if compiled else ''}"
        return self._known(key, lambda: self._measure_host(variant, compiled))

    def _known(self, key: str, measure: Callable[[], float]) -> float:
        if key not in self._times:
            self._times[key] = measure()
            self._save()
        return self._times[key]

    def _save(self) -> None:
        # Written beside and moved, so that a process that reads meanwhile never sees half a file.
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(self._times, indent=0, sort_keys=True))
            temporary.replace(self.path)
        except OSError as error:
            log.warning("The measured times of linear layers cannot be kept in %s: %s", self.path, error)


def _read(path: Path) -> dict[str, float]:
    """What was measured before; nothing where the file is missing or was damaged."""
    try:
        return {str(key): float(ms) for key, ms in json.loads(path.read_text()).items()}
    except (OSError, ValueError):
        return {}


def _interpolate(points: dict[Point, float], axes: list[list[int]], where: tuple[int, ...]) -> float:
    """Multilinear in the logarithms; beyond the table along its outermost cell."""
    if not points:
        raise ValueError("The table is empty: benchmarks/layer_table.py measures one.")
    corners: list[tuple[Point, float]] = [((), 1.0)]  # type: ignore[list-item]
    for axis, value in zip(axes, where, strict=True):
        high = min(max(bisect_left(axis, value), 1), len(axis) - 1) if len(axis) > 1 else 0
        low = max(high - 1, 0)
        span = math.log(axis[high] / axis[low]) if high != low else 1.0
        share = math.log(max(value, 1) / axis[low]) / span if high != low else 0.0
        corners = [
            ((*point, axis[index]), weight * part)  # type: ignore[misc]
            for point, weight in corners
            for index, part in ((low, 1 - share), (high, share))
            if part != 0
        ]
    logs = [(weight, points.get(point)) for point, weight in corners]
    if any(ms is None for _, ms in logs):
        return _scaled_from_nearest(points, where)
    return math.exp(sum(weight * math.log(ms) for weight, ms in logs if ms is not None))


def _scaled_from_nearest(points: dict[Point, float], where: tuple[int, ...]) -> float:
    """Beyond the most work measured: the nearest point's time, in proportion to the work."""

    def distance(point: Point) -> float:
        return sum(abs(math.log(a / b)) for a, b in zip(point, where, strict=True))

    nearest = min(points, key=distance)
    return points[nearest] * math.prod(where) / math.prod(nearest)
