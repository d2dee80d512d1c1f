"""The formats' arithmetic against ml_dtypes, bit for bit."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from core import oracle
from lightning_fp8.formats import (
    E4M3,
    E5M2,
    E8M0,
    MAX_SCALE,
    MIN_SCALE,
    Format,
    compute_e8m0_decode_scale,
    compute_scale,
    dequantize,
    get_format,
    quantize,
    round_down_to_power_of_two,
)

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
PEERS = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2, E8M0: ml_dtypes.float8_e8m0fnu}

fp32 = st.floats(width=32, allow_nan=True, allow_infinity=True)
positive = st.floats(min_value=2.0**-149, max_value=2.0**127, width=32)
scales = st.floats(min_value=2.0**-126, max_value=2.0**126, width=32)


def codes_of(x: torch.Tensor, scale: float, fmt: Format) -> np.ndarray:
    codes = quantize(x, scale, fmt)
    assert codes.dtype == fmt.dtype
    return codes.view(torch.uint8).numpy()


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E8M0], ids=str)
def test_constants_are_those_of_an_independent_implementation(fmt: Format) -> None:
    info = ml_dtypes.finfo(PEERS[fmt])
    assert fmt.max == float(info.max) == torch.finfo(fmt.dtype).max
    assert fmt.smallest_normal == float(info.smallest_normal) == torch.finfo(fmt.dtype).smallest_normal
    assert fmt.smallest_subnormal == float(info.smallest_subnormal)
    assert fmt.mantissa_bits == info.nmant
    assert fmt.bias == (127 if fmt is E8M0 else 1 - round(math.log2(fmt.smallest_normal)))


@FORMATS
def test_operand_formats_have_names(fmt: Format) -> None:
    assert get_format(fmt.name) is fmt


@pytest.mark.parametrize("name", ["e8m0", "fp8", "E4M3", ""])
def test_only_operand_formats_have_names(name: str) -> None:
    with pytest.raises(ValueError, match="choose 'e4m3' or 'e5m2'"):
        get_format(name)


@FORMATS
def test_every_code_comes_back(fmt: Format) -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(PEERS[fmt]).astype(np.float32)
    decoded = dequantize(torch.from_numpy(codes).view(fmt.dtype), 1.0).numpy()
    np.testing.assert_array_equal(decoded, values)  # Inf as Inf, NaN as NaN.
    again = codes_of(torch.from_numpy(values), 1.0, fmt)
    np.testing.assert_array_equal(again, np.where(np.isfinite(values), codes, 0x7F))


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_ties_and_their_neighbours(fmt: Format, dtype: torch.dtype) -> None:
    values = np.arange(256, dtype=np.uint8).view(PEERS[fmt]).astype(np.float32)
    finite = np.sort(values[np.isfinite(values)])
    middles = (finite[1:] + finite[:-1]) / 2
    beyond = np.float32([fmt.max * f for f in (1 + 2**-5, 1.0624, 1.0626, 1.125, 1.25, 2, 1e6)])
    points = np.concatenate([middles, np.nextafter(middles, -np.inf), np.nextafter(middles, np.inf), beyond, -beyond])
    points = np.concatenate([points, np.float32([0.0, -0.0, 1e-45, -1e-45, np.inf, -np.inf, np.nan, -np.nan])])
    x = torch.from_numpy(points.astype(np.float32)).to(dtype)
    np.testing.assert_array_equal(codes_of(x, 1.0, fmt), oracle.to_codes(x.float().numpy(), 1.0, fmt.name))


@FORMATS
def test_ties_go_to_even(fmt: Format) -> None:
    step = 2.0**-fmt.mantissa_bits
    x = torch.tensor([1 + step / 2, 1 + 3 * step / 2, -1 - step / 2])
    assert quantize(x, 1.0, fmt).float().tolist() == [1.0, 1 + 2 * step, -1.0]
    subnormal = fmt.smallest_subnormal
    x = torch.tensor([subnormal / 2, subnormal * 0.51, subnormal * 1.5, -subnormal / 2])
    assert quantize(x, 1.0, fmt).float().tolist() == [0.0, subnormal, 2 * subnormal, -0.0]


@FORMATS
def test_special_values_have_fixed_codes(fmt: Format) -> None:
    x = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, -0.0, 3e38, -3e38])
    largest = torch.tensor(fmt.max).to(fmt.dtype).view(torch.uint8).item()
    assert codes_of(x, 1.0, fmt).tolist() == [0x7F] * 4 + [0x80, largest, largest | 0x80]
    # A product that overflows fp32 is finite before the scale: it saturates, it is no NaN.
    assert codes_of(torch.tensor([3e38, -3e38]), 2.0**120, fmt).tolist() == [largest, largest | 0x80]


@FORMATS
@given(values=st.lists(fp32, min_size=1, max_size=40), scale=scales)
def test_random_values_and_scales(fmt: Format, values: list[float], scale: float) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    np.testing.assert_array_equal(codes_of(x, scale, fmt), oracle.to_codes(x.numpy(), scale, fmt.name))


@FORMATS
def test_random_bit_patterns(fmt: Format) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=torch.Generator().manual_seed(0))
    x = bits.to(torch.int32).view(torch.float32)
    for scale in (1.0, 0.3, 2.0**100, 2.0**-100):
        np.testing.assert_array_equal(codes_of(x, scale, fmt), oracle.to_codes(x.numpy(), scale, fmt.name))


def test_scales_broadcast() -> None:
    x = torch.randn(4, 6)
    scale = torch.tensor([[1.0], [2.0], [0.5], [3.0]])
    rows = [quantize(row, s, E4M3).float() for row, s in zip(x, scale.flatten(), strict=True)]
    assert torch.equal(quantize(x, scale, E4M3).float(), torch.stack(rows))
    assert torch.equal(dequantize(quantize(x, scale, E4M3), 1 / scale), torch.stack(rows) * (1 / scale))


# --- scales ----------------------------------------------------------------------------------------------------------


@FORMATS
@example(amax=7.367620164138094e-37, margin=3.0, power_of_two=True)
@given(amax=positive, margin=st.sampled_from([0.0, 0.263, 1.0, 3.0]), power_of_two=st.booleans())
def test_scale_maps_amax_onto_the_largest_value(fmt: Format, amax: float, margin: float, power_of_two: bool) -> None:
    scale = compute_scale(torch.tensor(amax), fmt.max, margin, power_of_two)
    ratio = fmt.max / amax
    exact = (ratio if ratio <= torch.finfo(torch.float32).max else math.inf) / 2.0**margin
    assert scale.dtype == torch.float32
    assert MIN_SCALE <= scale.item() <= MAX_SCALE
    if not MIN_SCALE <= exact <= MAX_SCALE:
        assert scale.item() == (MIN_SCALE if exact < MIN_SCALE else MAX_SCALE)
    elif power_of_two:
        assert math.frexp(scale.item())[0] == 0.5
        assert exact / 2 * (1 - 2**-22) < scale.item() <= exact * (1 + 2**-22)
    else:
        assert scale.item() == pytest.approx(exact, rel=2**-22)
    # Nothing saturates by more than the rounding of the scale, which the cast then hides.
    largest = quantize(torch.tensor(amax), scale, fmt).float().item()
    assert largest <= fmt.max / (2.0 ** math.floor(margin) if math.isfinite(exact) else 1.0)


def test_scale_of_amaxes_that_tell_nothing_is_one() -> None:
    amax = torch.tensor([0.0, math.nan, math.inf])
    assert compute_scale(amax, E4M3.max, margin=2.0, power_of_two=True, max_scale=0.5).tolist() == [1.0] * 3


def test_scale_stays_in_bounds() -> None:
    amax = torch.tensor([1e-45, 2.0**-149, 1e-38, 3.4e38])
    scale = compute_scale(amax, E5M2.max)
    assert scale.isfinite().all() and (scale > 0).all()
    decode = 1 / scale
    assert (decode >= 2.0**-126).all() and decode.isfinite().all()
    assert compute_scale(torch.tensor(3.4e38), E4M3.max, margin=200).item() == MIN_SCALE
    assert compute_scale(torch.tensor(1e-3), E4M3.max, max_scale=1e4).item() == 1e4
    assert compute_scale(torch.tensor(1e-3), E4M3.max, power_of_two=True, max_scale=1e4).item() == 8192
    assert compute_scale(torch.tensor(4.48), E4M3.max, max_scale=1e4).item() == pytest.approx(100)


def test_scale_takes_formats_as_a_tensor() -> None:
    amax = torch.rand(5, 3)
    maxima = torch.tensor([448.0, 448.0, 57344.0])
    together = compute_scale(amax, maxima, margin=1.0)
    for column in range(3):
        assert torch.equal(together[:, column], compute_scale(amax[:, column], maxima[column].item(), margin=1.0))


def test_scale_is_correctly_rounded() -> None:
    amax = torch.rand(10_000) * 100 + 1e-6
    exact = (448.0 / amax.double()).float()
    assert torch.equal(compute_scale(amax, 448.0), exact)


@given(x=st.floats(min_value=2.0**-126, max_value=2.0**127, width=32))
def test_round_down_to_power_of_two(x: float) -> None:
    assert round_down_to_power_of_two(torch.tensor(x)).item() == 2.0 ** (math.frexp(x)[1] - 1)


@FORMATS
@given(amax=positive)
def test_e8m0_scales_round_up(fmt: Format, amax: float) -> None:
    decode = compute_e8m0_decode_scale(torch.tensor(amax), fmt).item()
    assert math.frexp(decode)[0] == 0.5
    assert torch.tensor(decode).to(torch.float8_e8m0fnu).float().item() == decode
    if 2.0**-126 < amax / fmt.max <= 2.0**126:
        assert amax / decode <= fmt.max  # Rounded up: nothing saturates,
        assert amax / (decode / 2) > fmt.max  # and not by more than needed.


@FORMATS
def test_e8m0_scales_at_their_edges(fmt: Format) -> None:
    powers = 2.0 ** torch.arange(-20, 21, dtype=torch.float32)
    assert torch.equal(compute_e8m0_decode_scale(fmt.max * powers, fmt), powers)
    above = torch.nextafter(fmt.max * powers, torch.tensor(math.inf))
    assert torch.equal(compute_e8m0_decode_scale(above, fmt), 2 * powers)
    zero, nan, inf = compute_e8m0_decode_scale(torch.tensor([0.0, math.nan, math.inf]), fmt)
    assert zero > 0 and (1 / zero).isfinite() and nan.isnan() and inf.isnan()
