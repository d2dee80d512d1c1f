"""Curves as inline SVG, and the time line of events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from torch import Tensor

WIDTH, HEIGHT = 360, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 8, 10, 22


def curve(name: str, unit: str, steps: Tensor, values: Tensor, marks: Sequence[int] = ()) -> str:
    """A figure with one curve; gaps where values are not finite.

    Args:
        name: what is shown.
        unit: of the values; may be empty.
        steps: int64 ``[n]``, at least one.
        values: fp32 ``[n]``.
        marks: steps at which something happened.
    """
    xs, ys = steps.tolist(), values.tolist()
    finite = [y for y in ys if math.isfinite(y)]
    title = f"{name} ({unit})" if unit else name
    if not finite:
        return f'<figure><figcaption>{escape(title)}</figcaption><p class="quiet">No finite value.</p></figure>'
    low, high = min(finite), max(finite)
    pad = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    low, high = low - pad, high + pad
    first, last = xs[0], max(xs[-1], xs[0] + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        right = _LEFT + (x - first) / (last - first) * (WIDTH - _LEFT - _RIGHT)
        down = _TOP + (high - y) / (high - low) * (HEIGHT - _TOP - _BOTTOM)
        return round(right, 1), round(down, 1)

    lines: list[list[tuple[float, float]]] = []
    line: list[tuple[float, float]] = []
    for x, y in zip(xs, ys, strict=True):
        if math.isfinite(y):
            line.append(place(x, y))
        elif line:
            lines, line = [*lines, line], []
    lines.append(line)
    curves = "".join(
        f'<polyline class="curve" points="{" ".join(f"{x},{y}" for x, y in points)}"/>' for points in lines if points
    )
    shown = [step for step in marks if first <= step <= last]
    ends = f'y1="{_TOP}" y2="{_TOP + 8}"'
    ticks = "".join(f'<line class="mark" x1="{x}" x2="{x}" {ends}/>' for x in (place(s, low)[0] for s in shown))
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    middle = (low + high) / 2
    labels = "".join(
        f'<text x="{_LEFT - 4}" y="{place(first, y)[1] + 4}" text-anchor="end">{_short(y)}</text>'
        f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{place(first, y)[1]}" y2="{place(first, y)[1]}"/>'
        for y in (low + pad, middle, high - pad)
    )
    span = f"least {_short(min(finite))}, most {_short(max(finite))}"
    told = f"{title}: from {_short(finite[0])} to {_short(finite[-1])}, {span}"
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(told)}">{labels}{curves}{ticks}'
        f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
        f'<text x="{_LEFT}" y="{HEIGHT - 6}">step {first}</text>'
        f'<text x="{right}" y="{HEIGHT - 6}" text-anchor="end">{xs[-1]}</text></svg></figure>'
    )


def timeline(events: Sequence[tuple[int, str, str]], last: int) -> str:
    """A figure with a mark for each event, a lane for each kind.

    Args:
        events: step, kind and words.
        last: the last step of the run.
    """
    lanes = []
    for kind in dict.fromkeys(kind for _, kind, _ in events):
        marks = "".join(
            f'<i style="left: {100 * step / max(last, 1):.2f}%" title="{escape(text)}"></i>'
            for step, other, text in events
            if other == kind
        )
        lanes.append(f'<div class="lane"><span>{escape(kind)}</span><div class="track">{marks}</div></div>')
    lanes.append(f'<div class="lane"><span></span><div class="ends"><span>step 0</span><span>{last}</span></div></div>')
    # The table that follows says the same in words.
    return f'<figure class="timeline" aria-hidden="true">{"".join(lanes)}</figure>'


def _short(value: float) -> str:
    return f"{value:.3g}"
