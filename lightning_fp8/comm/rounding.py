"""Stochastic rounding from a counter-based generator: no state, the same bits on every device.

The random word of an element depends only on the seed and on the element's place, so the torch reference here and the
Triton kernel round alike, and a resumed run rounds as the run that never stopped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fp8.formats import Format

# Constants of Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11).
_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


class RoundingKeys:
    """Keys of stochastic rounding: 64-bit seeds of which no two messages of a run get the same.

    Collectives that round side by side take theirs from one object.

    Attributes:
        place: how many were taken, on this rank as on every other; restore it to repeat a run.
    """

    def __init__(self, place: int = 0) -> None:
        self.place = place

    def next(self, rank: int, stage: int) -> int:
        """The next key.

        Args:
            rank: of this process.
            stage: 0 or 1, for messages of the same call.
        """
        self.place += 1
        return (self.place & _WORD) | (2 * rank + stage) << 32


def philox(seed: int, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """The first word of Philox4x32-10.

    Args:
        seed: 64-bit key, its low word first.
        counter: four int64 tensors holding 32-bit words, broadcastable against each other.

    Returns:
        int64 values in ``[0, 2**32)``.
    """
    c0, c1, c2, c3 = counter
    key = (seed & _WORD, seed >> 32 & _WORD)
    for _ in range(10):
        product0, product1 = c0 * _MULTIPLIER[0], c2 * _MULTIPLIER[1]
        # int64 wraps around, which leaves all 64 bits of the product right; the mask makes the shift a logical one.
        high0, high1 = product0 >> 32 & _WORD, product1 >> 32 & _WORD
        c0, c1, c2, c3 = high1 ^ c1 ^ key[0], product1 & _WORD, high0 ^ c3 ^ key[1], product0 & _WORD
        key = (key[0] + _WEYL[0] & _WORD, key[1] + _WEYL[1] & _WORD)
    return c0


def uniform(seed: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """fp32 ``[rows, columns]`` in ``[0, 1)``, 24 random bits each; the counter of ``(r, c)`` is ``(c, r, 0, 0)``."""
    column = torch.arange(columns, dtype=torch.int64, device=device).expand(rows, columns)
    row = torch.arange(rows, dtype=torch.int64, device=device)[:, None]
    zero = torch.zeros_like(column)
    return (philox(seed, (column, row, zero, zero)) >> 8).float() * 2.0**-24


def round_stochastically(x: Tensor, noise: Tensor, fmt: Format) -> Tensor:
    """Round each value to one of its two neighbours in ``fmt``, to the nearer one with the higher probability.

    Args:
        x: fp32, within ``fmt``'s range.
        noise: fp32 in ``[0, 1)``, shaped as ``x``.
        fmt: the format whose grid to round to.

    Returns:
        fp32 values that ``fmt`` holds exactly; non-finite values as they were.
    """
    magnitude = x.abs()
    # The exponent field of the spacing between neighbours; subnormals share that of the smallest normal.
    exponent = (magnitude.view(torch.int32) >> 23).clamp(128 - fmt.bias, 254) - fmt.mantissa_bits
    spacing = (exponent << 23).view(torch.float32)
    per_spacing = ((254 - exponent) << 23).view(torch.float32)
    return torch.copysign(torch.floor(magnitude * per_spacing + noise) * spacing, x)
