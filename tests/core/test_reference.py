"""The reference casts and GEMM against the oracle, and against torchao where the formulas are shared."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from core import oracle
from lightning_fp8.casts import Cast
from lightning_fp8.formats import E4M3, E5M2
from lightning_fp8.kernels import reference
from lightning_fp8.recipes import GEMMS_OF, RowwiseScaling, TensorwiseScaling, get_recipe
from lightning_fp8.statistics import AMAX, NOT_SEEN, SCALE, SCALE_TRANSPOSED, StatisticsTable

GRANULARITIES = ["tensorwise", "rowwise", "1x128", "128x128", "1x32"]


def wide(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Values over many binades, with zeros, an all-zero row and a tiny one."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= 2.0 ** torch.randint(-12, 6, (rows, columns), generator=generator)
    x[torch.rand(rows, columns, generator=generator) < 0.05] = 0
    if rows > 4:
        x[1] = 0
        x[3] *= 1e-30
    return x.to(dtype)


def assert_operand(codes: Tensor, decode: Tensor, x: Tensor, cast: Cast, scale: float | None = None) -> None:
    expected, scales = oracle.cast_operand(x, cast, scale)
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), expected)
    spread = decode.repeat_interleave(x.shape[0] // decode.shape[0], 0)
    spread = spread.repeat_interleave(x.shape[1] // decode.shape[1], 1)
    np.testing.assert_array_equal(spread.numpy(), np.float32(1) / scales)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codes_and_scales_are_the_oracles(granularity: str, fmt: object, dtype: torch.dtype) -> None:
    for rows, power_of_two, margin in [(17, False, 0.0), (130, True, 0.263)]:
        cast = Cast(fmt, granularity, power_of_two, margin)  # type: ignore[arg-type]
        x = wide(rows, 256, dtype)
        codes, decode, codes_t, decode_t = reference.cast(x, cast, cast, None, False)
        padded = torch.nn.functional.pad(x, (0, 0, 0, -rows % cast.multiple))
        assert codes.shape == padded.shape and codes_t.shape == padded.t().shape
        assert codes.dtype == codes_t.dtype == cast.format.dtype
        assert decode.shape == reference.decode_scale_shape(*padded.shape, cast)
        assert decode_t.shape == reference.decode_scale_shape(*padded.t().shape, cast)
        assert_operand(codes, decode, padded, cast)
        assert_operand(codes_t, decode_t, padded.t(), cast)


def test_the_two_casts_may_differ_and_be_left_out() -> None:
    x = wide(32, 64)
    straight, transposed = Cast(E4M3, "rowwise"), Cast(E5M2, "tensorwise", True)
    both = reference.cast(x, straight, transposed, None, False)
    assert_operand(both[0], both[1], x, straight)
    assert_operand(both[2], both[3], x.t(), transposed)
    only = reference.cast(x, straight, None, None, False)
    assert torch.equal(only[0].float(), both[0].float()) and only[2].numel() == only[3].numel() == 0
    only = reference.cast(x, None, transposed, None, False)
    assert torch.equal(only[2].float(), both[2].float()) and only[0].numel() == only[1].numel() == 0


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_values_stay_visible(granularity: str, value: float) -> None:
    x = torch.randn(128, 256)
    x[5, 130] = value
    cast = Cast(E4M3, granularity)  # type: ignore[arg-type]
    table = StatisticsTable(["layer"])
    codes, decode, codes_t, decode_t = reference.cast(x, cast, cast, table.slot(0, "input"), False)
    straight = reference.dequantize_operand(codes, decode)
    transposed = reference.dequantize_operand(codes_t, decode_t)
    assert straight[5, 130].isnan() and transposed[130, 5].isnan()
    assert not table.amax[0, 0].isfinite()
    assert straight[6:, :128].isfinite().all() or granularity in ("128x128",)
    assert (codes.view(torch.uint8)[codes.float().isnan()] == 0x7F).all()


def test_zero_rows_and_empty_matrices() -> None:
    for granularity in GRANULARITIES:
        cast = Cast(E4M3, granularity)  # type: ignore[arg-type]
        codes, decode, codes_t, decode_t = reference.cast(torch.zeros(128, 128), cast, cast, None, False)
        assert (codes.view(torch.uint8) == 0).all() and decode.isfinite().all()
        assert (codes_t.view(torch.uint8) == 0).all() and decode_t.isfinite().all()
        slot = torch.tensor([NOT_SEEN, 0.0, 0.0, NOT_SEEN])
        for stored in (False, True):
            codes, decode, codes_t, _ = reference.cast(torch.empty(0, 128), cast, cast, slot, stored)
            assert codes.shape == (0, 128) and codes_t.shape == (128, 0)
            assert slot.tolist() == [NOT_SEEN, 0.0, 0.0, NOT_SEEN]


# --- statistics ------------------------------------------------------------------------------------------------------

TENSORWISE = Cast(E4M3, "tensorwise")


def test_amax_joins_the_window() -> None:
    table = StatisticsTable(["a", "b"])
    slot = table.slot(1, "weight")
    assert table.amax.eq(NOT_SEEN).all()
    for largest, expected in [(2.0, 2.0), (1.0, 2.0), (-5.0, 5.0), (math.inf, math.inf)]:
        x = torch.full((16, 16), 0.5)
        x[3, 4] = largest
        reference.cast(x, TENSORWISE, None, slot, False)
        assert table.amax[1, 1].item() == expected
    reference.cast(torch.full((16, 16), math.nan), TENSORWISE, None, slot, False)
    reference.cast(torch.ones(16, 16), TENSORWISE, None, slot, False)
    assert table.amax[1, 1].isnan()  # Kept, though a finite tensor followed.
    assert table.amax.eq(NOT_SEEN).sum() == 5
    assert table.data[..., SCALE].eq(0).all()  # Not stored: no scale is written.


def test_stored_scales_are_taken_from_the_first_data() -> None:
    straight, transposed = Cast(E4M3, "tensorwise", margin=1.0), Cast(E5M2, "tensorwise")
    table = StatisticsTable(["a"])
    slot = table.slot(0, "grad_output")
    x = wide(32, 48)
    amax = x.abs().max().item()
    first = reference.cast(x, straight, transposed, slot, True)
    stored = table.data[0, 2]
    assert stored[SCALE].item() == np.float32(224) / np.float32(amax)
    assert stored[SCALE_TRANSPOSED].item() == np.float32(57344) / np.float32(amax)
    assert_operand(first[0], first[1], x, straight)
    assert_operand(first[2], first[3], x.t(), transposed)
    scales = stored.clone()
    later = reference.cast(x * 3, straight, transposed, slot, True)  # Saturates by design: the scale is known ahead.
    assert stored[SCALE] == scales[SCALE] and stored[SCALE_TRANSPOSED] == scales[SCALE_TRANSPOSED]
    assert_operand(later[0], later[1], x * 3, straight, scales[SCALE].item())
    assert_operand(later[2], later[3], (x * 3).t(), transposed, scales[SCALE_TRANSPOSED].item())
    assert stored[AMAX].item() == pytest.approx(3 * amax)


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_data_that_tell_no_scale_leave_it_unset(value: float) -> None:
    table = StatisticsTable(["a"])
    reference.cast(torch.full((16, 16), value), TENSORWISE, TENSORWISE, table.slot(0, "input"), True)
    assert table.data[0, 0, SCALE].item() == 0 and table.data[0, 0, SCALE_TRANSPOSED].item() == 0


def test_slots_are_aligned_and_write_through() -> None:
    table = StatisticsTable([f"layer{i}" for i in range(5)])
    for layer, role in itertools.product(range(5), ("input", "weight", "grad_output")):
        slot = table.slot(layer, role)  # type: ignore[arg-type]
        assert slot.data_ptr() % 16 == 0 and slot.is_contiguous() and not slot.requires_grad
        slot[AMAX] = layer + 0.5
    assert table.amax.tolist() == [[layer + 0.5] * 3 for layer in range(5)]


# --- GEMM ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_scaled_mm_is_within_accumulated_rounding(granularity: str, out_dtype: torch.dtype) -> None:
    cast_a = Cast(E5M2, "1x128" if granularity == "128x128" else granularity)  # type: ignore[arg-type]
    cast_b = Cast(E4M3, granularity)  # type: ignore[arg-type]
    a, b = torch.randn(128, 256) * 1e-2, torch.randn(128, 256)
    aq, a_decode, *_ = reference.cast(a, cast_a, None, None, False)
    bq, b_decode, *_ = reference.cast(b, cast_b, None, None, False)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # Autocast must not reach the accumulation.
        actual = reference.scaled_mm(aq, bq, a_decode, b_decode, out_dtype)
    assert actual.dtype == out_dtype
    oracle.assert_product(actual, oracle.operand(a, cast_a), oracle.operand(b, cast_b))


def test_the_bound_is_sharp_enough_to_see_a_wrong_scale_or_a_low_accumulation() -> None:
    a, b = torch.randn(16, 256), torch.randn(16, 256)
    exact_a, exact_b = oracle.operand(a, TENSORWISE), oracle.operand(b, TENSORWISE)
    good = torch.from_numpy(exact_a @ exact_b.T)
    oracle.assert_product(good.float(), exact_a, exact_b)
    with pytest.raises(AssertionError):
        oracle.assert_product((good * (1 + 2**-8)).float(), exact_a, exact_b)
    with pytest.raises(AssertionError):
        oracle.assert_product((a @ b.t()).bfloat16(), exact_a, exact_b)
    with pytest.raises(AssertionError):
        oracle.assert_product(good.bfloat16().float(), exact_a, exact_b)


# --- torchao ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_gw_hp"])
def test_codes_and_scales_are_torchaos(name: str, dtype: torch.dtype) -> None:
    """Every operand of every FP8 GEMM that torchao's recipe of the same name casts."""
    config = pytest.importorskip("torchao.float8.config")
    utils = pytest.importorskip("torchao.float8.float8_scaling_utils")
    peer = config.Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp" if name == "rowwise_gw_hp" else name)
    recipe = get_recipe(name)
    peers = {
        ("input", "output"): peer.cast_config_input,
        ("weight", "output"): peer.cast_config_weight,
        ("grad_output", "grad_input"): peer.cast_config_grad_output,
        ("weight", "grad_input"): peer.cast_config_weight_for_grad_input,
        ("grad_output", "grad_weight"): peer.cast_config_grad_output_for_grad_weight,
        ("input", "grad_weight"): peer.cast_config_input_for_grad_weight,
    }
    mm = utils.LinearMMConfig(*3 * [utils.LinearMMConfig().output])
    seen = 0
    for (role, gemm), peer_cast in peers.items():
        x = torch.randn(64, 48, generator=torch.Generator().manual_seed(len(role))).to(dtype)
        place = GEMMS_OF[role].index(gemm)  # type: ignore[index, arg-type]
        cast = (recipe.casts[role].straight, recipe.casts[role].transposed)[place]  # type: ignore[index]
        if peer_cast.scaling_type is config.ScalingType.DISABLED:
            assert cast is None
            continue
        assert cast is not None
        ours = reference.cast(x, *((cast, None) if place == 0 else (None, cast)), None, False)[2 * place :][:2]
        rowwise = peer_cast.scaling_granularity is config.ScalingGranularity.AXISWISE
        theirs = utils.hp_tensor_to_float8_dynamic(
            x.t().contiguous() if place else x,
            peer_cast.target_dtype,
            mm,
            scaling_granularity=peer_cast.scaling_granularity,
            axiswise_dim=-1 if rowwise else None,
            round_scales_to_power_of_2=peer.round_scales_to_power_of_2,
        )
        assert torch.equal(ours[0].view(torch.uint8), theirs._data.view(torch.uint8)), (role, gemm)
        assert torch.equal(ours[1], (1 / theirs._scale).reshape(ours[1].shape)), (role, gemm)
        seen += 1
    assert seen == (4 if name == "rowwise_gw_hp" else 6)


def test_defaults_that_torchao_shares() -> None:
    assert RowwiseScaling().power_of_two and not TensorwiseScaling().power_of_two
