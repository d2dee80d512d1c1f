"""The report as one HTML page that needs no network: readable on a phone, by keyboard, in dark and light."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.recipes import ROLES
from lightning_fp8.report.charts import curve, timeline
from lightning_fp8.report.colors import ALARM, SCALE, color_range
from lightning_fp8.selection import Decision

#: Cells travel as 16-bit integers in units of this part of a power of two.
_UNIT = 64
_MISSING, _ALARM = -32768, 32767


@dataclass(frozen=True)
class Series:
    """A curve over steps: name, unit, int64 ``[n]`` and fp32 ``[n]``."""

    name: str
    unit: str
    steps: Tensor
    values: Tensor


@dataclass(frozen=True)
class Event:
    """Something that happened: when, what kind, and in words."""

    step: int
    kind: str
    text: str


@dataclass(frozen=True)
class Maps:
    """Heat maps of layers x steps.

    Attributes:
        names: of the layers.
        steps: int64 ``[n]``.
        amax: log2, fp32 ``[n, layers, 3]``; NaN where not seen, Inf where not finite.
        headroom: powers of two, the same.
        left_out: layers for which there was no room.
    """

    names: list[str]
    steps: Tensor
    amax: Tensor
    headroom: Tensor
    left_out: int = 0


@dataclass(frozen=True)
class Operand:
    """The last reading of one operand: NaN where there is none."""

    layer: str
    role: str
    amax: float
    scale: float
    headroom: float


@dataclass
class Page:
    """All that the page tells.

    Attributes:
        title: its heading.
        state: how the run stands, in words.
        failed: whether that is bad.
        facts: label and value: recipe, versions, machine.
        series: the curves.
        maps: the heat maps; ``None``: nothing was read.
        events: in the order of steps.
        operands: those with the least headroom first.
        decisions: the selection with its reasons.
    """

    title: str
    state: str
    failed: bool = False
    facts: list[tuple[str, str]] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    maps: Maps | None = None
    events: list[Event] = field(default_factory=list)
    operands: list[Operand] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def html(self) -> str:
        """The page."""
        sections = [
            ("run", "Run", _facts(self.facts)),
            ("curves", "Curves", self._curves()),
            ("layers", "Layers over steps", _maps(self.maps)),
            ("events", "Events", self._events()),
            ("operands", "Last reading", _operands(self.operands)),
            ("selection", "What runs in FP8, and why", _decisions(self.decisions)),
        ]
        links = "".join(f'<li><a href="#{key}">{escape(name)}</a></li>' for key, name, _ in sections)
        body = "".join(
            f'<section id="{key}"><h2>{escape(name)}</h2>{content}</section>' for key, name, content in sections
        )
        return _TEMPLATE.format(
            title=escape(self.title),
            policy=_POLICY,
            style=_asset("page.css"),
            state=escape(self.state),
            mood="bad" if self.failed else "good",
            links=links,
            body=body,
            data=_json(_map_data(self.maps)),
            script=_asset("page.js"),
        )

    def _curves(self) -> str:
        marks = [event.step for event in self.events]
        charts = [curve(s.name, s.unit, s.steps, s.values, marks) for s in self.series if len(s.steps)]
        return f'<div class="charts">{"".join(charts)}</div>' if charts else _remark("Nothing was measured.")

    def _events(self) -> str:
        if not self.events:
            return _remark("Nothing went wrong.")
        rows = [(str(e.step), escape(e.kind), escape(e.text)) for e in self.events]
        last = max([event.step for event in self.events] + [int(s.steps[-1]) for s in self.series if len(s.steps)])
        picture = timeline([(event.step, event.kind, event.text) for event in self.events], last)
        return picture + _table("Events", ("step", "kind", "what"), rows, ("number", "word", "text"))


#: The browser itself sees to it that the page loads nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<header>
<h1>{title}</h1>
<p class="state {mood}" role="status">{state}</p>
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main id="main">{body}</main>
<script type="application/json" id="maps">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return files("lightning_fp8.report").joinpath(name).read_text(encoding="utf-8")


def _remark(text: str) -> str:
    return f'<p class="quiet">{escape(text)}</p>'


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in facts)
    return f'<dl class="facts">{items}</dl>'


def _table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], kinds: Sequence[str]) -> str:
    """A table whose cells are HTML already; a column's kind is ``text``, ``word`` (never broken) or ``number``."""

    def cell(tag: str, column: int, content: str) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        return f'<{tag}{scope} class="{kinds[column]}">{content}</{tag}>'

    head = "".join(cell("th", i, escape(h)) for i, h in enumerate(heads))
    body = "".join("<tr>" + "".join(cell("td", i, c) for i, c in enumerate(row)) + "</tr>" for row in rows)
    # The box scrolls: so it must take the focus, and have a name.
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _operands(operands: Sequence[Operand]) -> str:
    if not operands:
        return _remark("Nothing was read.")
    rows = [(escape(o.layer), o.role, _number(o.amax), _number(o.scale), _number(o.headroom, 2)) for o in operands]
    heads = ("layer", "role", "amax", "scale", "headroom")
    note = "Headroom: powers of two up to the format's largest value; below zero, values were clamped."
    return _remark(note) + _table("Last reading", heads, rows, ("text", "word", "number", "number", "number"))


def _number(value: float, places: int | None = None) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.{places}f}" if places is not None else f"{value:.4g}"


def _decisions(decisions: Sequence[Decision]) -> str:
    if not decisions:
        return _remark("The model was not converted to FP8.")
    rows = [
        (escape(d.name or "(root)"), "FP8" if d.converted else "high precision", escape(d.reason)) for d in decisions
    ]
    count = sum(d.converted for d in decisions)
    return f"<p>{count} of {len(decisions)} linear layers.</p>" + _table(
        "Selection", ("layer", "runs in", "why"), rows, ("text", "word", "text")
    )


def _maps(maps: Maps | None) -> str:
    if maps is None or not len(maps.steps) or not maps.names:
        return _remark("Nothing was read.")
    data = _map_data(maps)["maps"]
    quantities = list(dict.fromkeys(m["quantity"] for m in data))
    roles = [role for role in ROLES if any(m["role"] == role for m in data)]
    colors = ", ".join(f"rgb{color}" for color in SCALE)
    note = f" {maps.left_out} layers with more headroom are left out." if maps.left_out else ""
    return f"""
{_radios("quantity", "Quantity", quantities)}{_radios("role", "Operand", roles)}
<figure>
<figcaption>{len(maps.names)} layers from top to bottom, steps {int(maps.steps[0])} to {int(maps.steps[-1])}
from left to right.{note}</figcaption>
<noscript><p>The heat map needs scripting; the last reading below does not.</p></noscript>
<canvas id="map" tabindex="0" role="img" aria-label="Heat map" aria-describedby="told"></canvas>
<output id="told" aria-live="polite"></output>
<div class="key"><span id="low"></span><span class="bar" style="background: linear-gradient(to right, {colors})"></span>
<span id="high"></span><span><i></i> not seen</span>
<span><i style="background: rgb{ALARM}"></i> NaN or Inf</span></div>
</figure>"""


def _radios(name: str, legend: str, values: Sequence[str]) -> str:
    inputs = "".join(
        f'<label><input type="radio" name="{name}" value="{value}"{" checked" if index == 0 else ""}>{value}</label>'
        for index, value in enumerate(values)
    )
    return f"<fieldset><legend>{legend}</legend>{inputs}</fieldset>"


def _map_data(maps: Maps | None) -> dict[str, Any]:
    data: dict[str, Any] = {"maps": [], "names": [], "steps": []}
    if maps is None:
        return data
    data |= {"names": maps.names, "steps": maps.steps.tolist(), "unit": _UNIT}
    data |= {"colors": SCALE, "alarm": ALARM}
    for quantity, values in (("headroom", maps.headroom), ("amax", maps.amax)):
        for column, role in enumerate(ROLES):
            cells = values[:, :, column]
            finite = cells[cells.isfinite()]
            if not finite.numel():
                continue
            low, high = color_range(finite, quantity == "headroom")
            data["maps"].append(
                {"quantity": quantity, "role": role, "low": low, "high": high, "values": _encode(cells.t())}
            )
    return data


def _encode(cells: Tensor) -> str:
    """Little-endian 16-bit integers in base64, row by row."""
    numbers = (cells * _UNIT).round().clamp(_MISSING + 1, _ALARM - 1).nan_to_num(_MISSING)
    numbers = torch.where(cells.isinf(), float(_ALARM), numbers).to(torch.int16)
    return base64.b64encode(numbers.contiguous().numpy().astype("<i2").tobytes()).decode()


def _json(value: Any) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(value).replace("<", "\\u003c")
