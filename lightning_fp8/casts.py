"""A cast: how one operand of one GEMM becomes FP8."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fp8.formats import (
    MAX_SCALE,
    Format,
    compute_e8m0_decode_scale,
    compute_scale,
    get_format,
    round_down_to_power_of_two,
)

Granularity = Literal["tensorwise", "rowwise", "1x128", "128x128", "1x32"]

#: Rows and columns of the blocks that share a scale; ``None``: all there are.
BLOCK_SIZES: dict[str, tuple[int | None, int | None]] = {
    "tensorwise": (None, None),
    "rowwise": (1, None),
    "1x128": (1, 128),
    "128x128": (128, 128),
    "1x32": (1, 32),
}
#: Operand sizes must be multiples of this: 16 is cuBLASLt's rule for FP8, the others are the blocks' own lengths.
SIZE_MULTIPLE: dict[str, int] = {granularity: width or 16 for granularity, (_, width) in BLOCK_SIZES.items()}


@dataclass(frozen=True)
class Cast:
    """How one operand of one GEMM is cast.

    Attributes:
        format: E4M3 or E5M2.
        granularity: which values share a scale: ``tensorwise`` all of them, ``rowwise`` those that are summed with
            each other, ``1x128`` and ``1x32`` that many neighbours along the contracted dimension, ``128x128`` a tile.
        power_of_two: scales are rounded down to powers of two (``1x32`` decode scales always round up).
        margin: headroom kept below the format's maximum, in powers of two.
        max_scale: upper bound of the scale.
    """

    format: Format
    granularity: Granularity
    power_of_two: bool = False
    margin: float = 0.0
    max_scale: float = MAX_SCALE
    _text: str = field(init=False, repr=False, compare=False)

    @property
    def multiple(self) -> int:
        """What both sizes of the operand must be multiples of."""
        return SIZE_MULTIPLE[self.granularity]

    @property
    def largest_scale(self) -> float:
        """What ``max_scale`` lets a scale be, in fp32 and, where scales are such, as a power of two."""
        cap = torch.tensor(self.max_scale, dtype=torch.float32, device="cpu")
        return (round_down_to_power_of_two(cap) if self.power_of_two else cap).item()

    def scale(self, amax: Tensor) -> Tensor:
        """The scale of values up to ``amax``, fp32, any shape; see :mod:`lightning_fp8.formats`."""
        if self.granularity == "1x32":
            return 1 / compute_e8m0_decode_scale(amax, self.format)
        return compute_scale(amax, self.format.max, self.margin, self.power_of_two, self.max_scale)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_text", self._describe())

    def __str__(self) -> str:
        # Made beforehand: under dynamic=True a compiler sees symbols in place of floats, and cannot write them out.
        return self._text

    def _describe(self) -> str:
        parts = [self.format.name, self.granularity]
        if self.power_of_two:
            parts.append("pow2")
        if self.margin:
            parts.append(f"margin={self.margin!r}")
        if self.max_scale != MAX_SCALE:
            parts.append(f"max_scale={self.max_scale!r}")
        return "/".join(parts)

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def parse(text: str) -> Cast | None:
        """The inverse of ``str(cast)``; the empty string is no cast. Custom operators carry casts as strings.

        Raises:
            ValueError: a word is unknown.
        """
        if not text:
            return None
        name, _, rest = text.partition("/")
        granularity, *options = rest.split("/")
        if granularity not in SIZE_MULTIPLE:
            raise ValueError(
                f"Unknown granularity {granularity!r} in {text!r}: a cast is written as e4m3/rowwise; choose one of "
                f"{', '.join(SIZE_MULTIPLE)}."
            )
        settings: dict[str, Any] = {"power_of_two": "pow2" in options}
        for option in options:
            key, _, value = option.partition("=")
            if option != "pow2":
                if key not in ("margin", "max_scale"):
                    raise ValueError(f"Unknown option {option!r} in {text!r}: choose pow2, margin= or max_scale=.")
                settings[key] = float(value)
        return Cast(get_format(name), granularity, **settings)  # type: ignore[arg-type]


def are_foreseeable(*uses: Cast | None) -> bool:
    """Whether scales from the data are mostly what they were in the step before, for all of what is cast at once."""
    return all(use.granularity == "tensorwise" and use.power_of_two for use in uses if use is not None)


@dataclass(frozen=True)
class OperandCasts:
    """The two casts of one role; ``None`` where that GEMM takes the operand in high precision."""

    straight: Cast | None
    transposed: Cast | None

    @property
    def uses(self) -> tuple[Cast, ...]:
        """Those of the two that are there, the straight one first."""
        return tuple(cast for cast in (self.straight, self.transposed) if cast is not None)
