"""``lightning-fp8 inspect CHECKPOINT``: what a checkpoint tells of its FP8 layers, without the model's code."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.checks import first_line
from lightning_fp8.cli_errors import CommandParser
from lightning_fp8.files import kind_of, local_copy
from lightning_fp8.formats import E4M3
from lightning_fp8.health import HealthEvent
from lightning_fp8.recipes import ROLES, Recipe, Role, get_recipe
from lightning_fp8.settings import CHECKPOINT_KEY
from lightning_fp8.statistics import AMAX, LAST_AMAX
from lightning_fp8.telemetry import main_cast, readout
from lightning_fp8.text_table import text_table

#: Headroom, in powers of two, below which values were clamped; a scale's own rounding takes a little.
_CLAMPED = -(2.0**-6)
#: The last amax is at risk of outgrowing its scale at this factor over the median of its history.
_GROWING = 3.0
#: Powers of two that the last amax may lie below the largest one that its scale follows, or that its format has, before
#: small values vanish.
_STALE = 8.0


@dataclass(frozen=True)
class Row:
    """One operand in a checkpoint; NaN where it tells nothing.

    Attributes:
        layer: qualified name.
        role: input, weight or grad_output.
        amax: of the last step that saw it.
        scale: with which it will be cast.
        headroom: powers of two up to the format's largest value.
        risks: why the layer is at risk; empty: it is not.
    """

    layer: str
    role: str
    amax: float
    scale: float
    headroom: float
    risks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint tells.

    Attributes:
        step: optimizer steps done; ``None`` where the checkpoint doesn't say.
        recipes: of each conversion.
        rows: the operands; those at risk first, then by headroom.
        events: the last ones that a health monitor saw.
        notes: what could not be told.
    """

    step: int | None
    recipes: list[str]
    rows: list[Row]
    events: list[HealthEvent]
    notes: list[str]

    def text(self, limit: int | None = None) -> str:
        """For people; at most ``limit`` operands."""
        head = [f"step {self.step}"] if self.step is not None else []
        lines = [*head, *self.recipes, *self.notes]
        at_risk = [row for row in self.rows if row.risks]
        if self.rows:
            lines.append(f"{len(at_risk)} of {len(self.rows)} operands are at risk")
            rows = self.rows[:limit]
            cells = [("layer", "role", "amax", "scale", "headroom", "risk")]
            cells += [
                (r.layer, r.role, _number(r.amax), _number(r.scale), _number(r.headroom), "; ".join(r.risks))
                for r in rows
            ]
            lines += ["", *text_table(cells, right=(2, 3, 4))]
            if len(rows) < len(self.rows):
                lines.append(f"... and {len(self.rows) - len(rows)} more: --all shows them")
        if self.events:
            lines += ["", "events:", *(event.message() for event in self.events)]
        return "\n".join(lines)


def inspect_checkpoint(path: str | Path) -> Inspection:
    """Read a checkpoint of the Trainer's or Fabric's, or weights alone: a file, or a distributed one's directory.

    A remote one (``s3://...``) is fetched first, to where temporary files go; of a distributed one what is not sharded.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it cannot be read, or holds neither FP8 state nor weights.
    """
    checkpoint = _load(path)
    rows: list[Row] = []
    recipes: list[str] = []
    notes: list[str] = []
    events: list[HealthEvent] = []
    try:
        for conversion in _conversions(checkpoint):
            runtime = conversion["runtime"]
            recipe = get_recipe(runtime["recipe"])
            recipes.append(f"{recipe!r}, {len(conversion['layers'])} layers")
            rows += _rows_of(recipe, runtime)
        for callback in (checkpoint.get("callbacks") or {}).values():
            if isinstance(callback, Mapping) and "health" in callback:
                events += [HealthEvent.from_dict(values) for values in callback.get("events", [])[-20:]]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"The FP8 state in {path} is none that this version can read ({error!r}).") from error
    if not recipes:
        notes.append("no FP8 state: shown is how the weights would fare under one scale a tensor (e4m3)")
        rows = [row for weights in _weights(checkpoint) for row in _rows_of_weights(weights)]
        if not rows and not checkpoint.keys() & {"state_dict", CHECKPOINT_KEY, "loops"}:
            raise ValueError(f"{path} is no checkpoint of Lightning's, and holds no weights.")
    rows.sort(key=lambda row: (not row.risks, row.headroom if row.headroom == row.headroom else math.inf))
    step = checkpoint.get("global_step")
    return Inspection(step if isinstance(step, int) else None, recipes, rows, events, notes)


def main(args: Sequence[str] | None = None) -> int:
    """Run the subcommand.

    Args:
        args: words after ``inspect``; ``None`` takes them from the command line.

    Returns:
        0; 1 where the checkpoint cannot be read.
    """
    parser = CommandParser("lightning-fp8 inspect", description="Scales, headroom and layers at risk.")
    parser.add_argument("checkpoint", help="a checkpoint file, or the directory of a distributed checkpoint")
    parser.add_argument("--all", action="store_true", help="show every operand, not just the first 40")
    parsed = parser.parse_args(args)
    try:
        inspection = inspect_checkpoint(parsed.checkpoint)
    except (OSError, ValueError) as error:
        parser.exit(1, f"lightning-fp8 inspect: {error}\n")
    print(inspection.text(None if parsed.all else 40))
    return 0


def _load(path: str | Path) -> Mapping[str, Any]:
    kind = kind_of(path)
    if kind is None:
        raise FileNotFoundError(f"{path} does not exist.")
    if kind == "directory":
        # What is not sharded in a distributed checkpoint of Lightning's.
        folder, path = path, f"{str(path).rstrip('/')}/meta.pt"
        if kind_of(path) != "file":
            raise FileNotFoundError(f"{folder} is no distributed checkpoint of Lightning's: it has no meta.pt.")
    with local_copy(path) as copy:
        try:
            # Of a user's own classes, such as hyperparameters, nothing is needed and no code is run.
            unknown: list[Any] = [
                (_Unknown, name) for name in torch.serialization.get_unsafe_globals_in_checkpoint(copy)
            ]
            with torch.serialization.safe_globals(unknown):
                checkpoint = torch.load(copy, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises many kinds, with pages of advice.
            if not zipfile.is_zipfile(copy):
                raise ValueError(f"{path} is no file as torch.save writes it (zip), or is cut short.") from error
            raise ValueError(f"{path} cannot be read as a checkpoint: {first_line(error)}") from error
    if not isinstance(checkpoint, Mapping):
        raise ValueError(f"{path} is no checkpoint: it holds a {type(checkpoint).__name__}.")
    return checkpoint


class _Unknown:
    """Stands for an object of a class that is not known here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _conversions(checkpoint: Mapping[str, Any]) -> list[Any]:
    """The Trainer's FP8 state lies under its own key; in Fabric's the user chose one for ``precision.state_dict()``."""
    states = [checkpoint[CHECKPOINT_KEY]] if CHECKPOINT_KEY in checkpoint else list(checkpoint.values())
    return [
        conversion for state in states if isinstance(state, Mapping) for conversion in state.get("conversions") or []
    ]


def _weights(checkpoint: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The state_dict of the Trainer's, what Fabric's users saved as a model, or the whole: weights alone."""
    if "state_dict" in checkpoint:
        return [checkpoint["state_dict"]]
    if any(isinstance(value, Tensor) for value in checkpoint.values()):
        return [checkpoint]
    return [
        value
        for value in checkpoint.values()
        if isinstance(value, Mapping) and any(isinstance(weight, Tensor) for weight in value.values())
    ]


def _rows_of(recipe: Recipe, runtime: Mapping[str, Any]) -> list[Row]:
    names, data = runtime["table"]["names"], runtime["table"]["data"].clone()
    # Where a step was done and the scales have not moved yet, its amaxes are still in the window.
    data[..., LAST_AMAX] = torch.where(data[..., AMAX] < 0, data[..., LAST_AMAX], data[..., AMAX])
    told = readout(data, [recipe] * len(names), LAST_AMAX)
    history: Tensor | None = runtime.get("history")
    rows = []
    for index, name in enumerate(names):
        for column, role in enumerate(ROLES):
            amax, scale, headroom = (float(part[index, column]) for part in told)
            past = history[index, column] if history is not None else torch.zeros(1)
            risks = _risks(recipe, role, amax, scale, headroom, past[past > 0])
            rows.append(Row(name, role, amax if not amax < 0 else math.nan, scale, headroom, risks))
    return rows


def _risks(recipe: Recipe, role: Role, amax: float, scale: float, headroom: float, past: Tensor) -> tuple[str, ...]:
    """Why an operand is at risk; ``past`` are its earlier amaxes, fp32 ``[n]``."""
    if amax < 0:
        return ("never seen",)
    if not math.isfinite(amax):
        return ("NaN or Inf in the last step",)
    risks = []
    if role == "grad_output" and amax == 0:
        risks.append("the whole gradient is zero")
    if headroom < _CLAMPED:
        risks.append("clamped in the last step")
    cast = main_cast(recipe, role)
    if cast is not None and scale >= cast.largest_scale:
        risks.append("the scale stands at its cap")
    if past.numel() and amax > _GROWING * (median := float(past.median())):
        risks.append(f"amax is {amax / median:.3g} times its median")
    if past.numel() and 0 < amax < float(past.max()) * 2**-_STALE:
        risks.append("the scale follows an amax long past, small values may vanish")
    elif headroom > _STALE:
        risks.append(f"{headroom:.0f} powers of two lie unused above it, small values may vanish")
    return tuple(risks)


def _rows_of_weights(state_dict: Any) -> list[Row]:
    """Matrices only; their spread tells what one scale a tensor would lose."""
    rows = []
    for name, weight in state_dict.items() if isinstance(state_dict, Mapping) else ():
        if not (isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point() and weight.numel()):
            continue
        if weight.layout is not torch.strided or weight.is_meta or weight.element_size() == 1:
            continue  # Its values are elsewhere, or FP8's already.
        magnitudes = weight.float().abs()
        amax = float(magnitudes.max())
        scale = E4M3.max / amax if amax and math.isfinite(amax) else math.nan
        risks: list[str] = []
        if not math.isfinite(amax):
            risks.append("NaN or Inf")
        else:
            lost = float(((magnitudes * scale < E4M3.smallest_subnormal / 2) & (magnitudes > 0)).float().mean())
            if lost > 0.01:
                risks.append(f"{lost:.1%} of the values would vanish")
        rows.append(Row(name.removesuffix(".weight"), "weight", amax, scale, math.nan, tuple(risks)))
    return rows


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"
