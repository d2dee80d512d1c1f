"""An independent reference for casts and GEMMs: numpy and ml_dtypes, nothing of the package's arithmetic."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from lightning_fp8.casts import Cast

DTYPES = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}
BLOCKS = {"1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32)}
MULTIPLES = {"tensorwise": 16, "rowwise": 16, "1x128": 128, "128x128": 128, "1x32": 32}
#: Unit roundoffs.
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
#: Half the distance between the smallest values: what underflow may cost.
TINY = {torch.float32: 2.0**-150, torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}


def to_codes(values: np.ndarray, scale: np.ndarray | float, name: str) -> np.ndarray:
    """uint8 codes of ``values * scale``: saturating, non-finite values as 0x7F."""
    dtype, largest = DTYPES[name]
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = values.astype(np.float32) * np.asarray(scale, np.float32)
        codes = np.clip(scaled, -largest, largest).astype(dtype).view(np.uint8)
    return np.where(np.isfinite(values), codes, np.uint8(0x7F))


def scale_of(amax: np.float32, cast: Cast) -> np.float32:
    """The scale of one amax, in exact arithmetic but for the division, whose fp32 rounding is specified."""
    largest = DTYPES[cast.format.name][1]
    if cast.granularity == "1x32":
        if not np.isfinite(amax):
            return np.float32(np.nan)
        mantissa, exponent = math.frexp(float(amax) / largest)
        decode_exponent = exponent - 1 if mantissa == 0.5 else exponent
        if amax == 0:
            decode_exponent = -126
        return np.float32(2.0 ** -min(max(decode_exponent, -126), 126))
    if not (np.isfinite(amax) and amax > 0):
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = np.float32(largest) / np.float32(amax)
    if cast.margin:
        scale = scale * np.float32(2.0**-cast.margin)
    scale = min(max(float(scale), 2.0**-126), cast.max_scale)
    if cast.power_of_two:
        scale = 2.0 ** (math.frexp(scale)[1] - 1)
    return np.float32(scale)


def cast_operand(x: Tensor, cast: Cast, scale: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """uint8 codes and the scale of each of them, both ``[rows, columns]``, of an operand contracted over columns.

    Args:
        x: a matrix, already padded.
        cast: how to cast.
        scale: a known tensorwise scale.
    """
    values = x.detach().float().numpy()
    rows, columns = values.shape
    height, width = {"tensorwise": (rows, columns), "rowwise": (1, columns), **BLOCKS}[cast.granularity]
    scales = np.empty_like(values)
    for top in range(0, rows, height or 1):
        for left in range(0, columns, width):
            block = values[top : top + height, left : left + width]
            amax = np.abs(block).max()
            scales[top : top + height, left : left + width] = scale_of(amax, cast) if scale is None else scale
    return to_codes(values, scales, cast.format.name), scales


def decode(codes: np.ndarray, scales: np.ndarray, name: str) -> np.ndarray:
    """float64 values of codes: each with the reciprocal of its scale in fp32, as the kernels have it."""
    reciprocal = (np.float32(1) / scales.astype(np.float32)).astype(np.float64)
    return codes.view(DTYPES[name][0]).astype(np.float64) * reciprocal


def operand(x: Tensor, cast: Cast, scale: float | None = None) -> np.ndarray:
    """The quantised values of an operand in float64, its rows padded as the recipes' blocks want."""
    multiple = MULTIPLES[cast.granularity]
    pad = [(0, -size % multiple) for size in x.shape]
    padded = torch.from_numpy(np.pad(x.detach().float().numpy(), pad))
    codes, scales = cast_operand(padded, cast, scale)
    return decode(codes, scales, cast.format.name)[: x.shape[0], : x.shape[1]]


def assert_product(actual: Tensor, a: np.ndarray, b: np.ndarray, *, extra: np.ndarray | None = None) -> None:
    """``actual`` is ``a @ b.T`` (plus ``extra``) within accumulated rounding.

    Codes are multiplied exactly. fp32 sums of K terms in any order err by at most K u sum|a b| (Higham, 4.2); decoding
    both operands, or scaling the product twice, adds four roundings at most. The result is then rounded to its dtype;
    a bias adds one more rounding of the sum, and one of the bias itself.
    """
    exact = a @ b.T
    magnitude = np.abs(a) @ np.abs(b).T
    depth = a.shape[1]
    u = UNIT[actual.dtype]
    bound = (depth + 4) * 1.01 * 2.0**-24 * magnitude
    bound = bound + u * (np.abs(exact) + bound) + TINY[actual.dtype]
    if extra is not None:
        exact = exact + extra
        bound = bound + u * np.abs(extra) + u * (np.abs(exact) + bound + u * np.abs(extra))
    error = np.abs(actual.detach().double().numpy() - exact)
    assert actual.shape == exact.shape
    assert (error <= bound).all(), f"error {error.max()} is {(error / np.maximum(bound, 1e-300)).max():.2f} bounds"
