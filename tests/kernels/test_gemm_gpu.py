"""GEMMs on tensor cores against a float64 product of the same quantised operands; capability; the fused update."""

from __future__ import annotations

import itertools

import pytest
import torch

from lightning_fp8 import kernels
from lightning_fp8.casts import Cast
from lightning_fp8.formats import E4M3, E5M2
from lightning_fp8.kernels import gemm, reference
from lightning_fp8.kernels.capability import Hardware, supports
from lightning_fp8.recipes import DelayedScaling
from tests.kernels.updates import RECIPES, check_update

GRANULARITIES = ("tensorwise", "rowwise", "1x128", "128x128", "1x32")
PAIRS = [
    ("tensorwise", "tensorwise"),
    ("rowwise", "rowwise"),
    ("rowwise", "tensorwise"),
    ("tensorwise", "rowwise"),
    ("1x128", "1x128"),
    ("1x128", "128x128"),
    ("1x32", "1x32"),
]


def operand(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Rows and columns of unlike size, whose products fp16 still holds."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return (x * torch.rand(rows, 1, generator=generator) * torch.rand(columns, generator=generator)).bfloat16()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def double_product(a: torch.Tensor, b: torch.Tensor, decode_a: torch.Tensor, decode_b: torch.Tensor) -> torch.Tensor:
    left, right = reference.dequantize_operand(a, decode_a), reference.dequantize_operand(b, decode_b)
    return left.double() @ right.double().t()


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_product_of_quantised_operands(pair: tuple[str, str], out_dtype: torch.dtype) -> None:
    limit = {torch.bfloat16: 4e-3, torch.float16: 2e-3, torch.float32: 2e-3}[out_dtype]
    for formats in ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)):
        casts = Cast(formats[0], pair[0]), Cast(formats[1], pair[1])
        for m, n, k in ((256, 384, 640), (128, 128, 128), (384, 1024, 512)):
            a, decode_a, _, _ = kernels.cast(operand(m, k).cuda(), casts[0], None, None, False)
            b, decode_b, _, _ = kernels.cast(operand(n, k, seed=1).cuda(), casts[1], None, None, False)
            want = double_product(a, b, decode_a, decode_b)
            for fast_accum in (False, True):
                got = kernels.scaled_mm(a, b, decode_a, decode_b, casts, out_dtype, fast_accum)
                assert got.shape == (m, n) and got.dtype == out_dtype
                assert relative_error(got, want) < (limit if not fast_accum else 2e-2), (m, n, k, fast_accum)


@pytest.mark.gpu
def test_sizes_that_are_multiples_of_16_only() -> None:
    for granularity in ("tensorwise", "rowwise"):
        casts = Cast(E4M3, granularity), Cast(E4M3, granularity)
        for m, n, k in ((16, 16, 16), (37, 48, 80), (1, 16, 16)):
            a, decode_a, _, _ = kernels.cast(operand(m, k).cuda(), casts[0], None, None, False)
            b, decode_b, _, _ = kernels.cast(operand(n, k, seed=1).cuda(), casts[1], None, None, False)
            got = kernels.scaled_mm(a, b, decode_a, decode_b, casts, torch.float32, False)
            assert relative_error(got, double_product(a, b, decode_a, decode_b)) < 2e-3


@pytest.mark.gpu
def test_transposed_operands_make_the_weight_gradient() -> None:
    for granularity, fmt in itertools.product(GRANULARITIES[:3], (E4M3, E5M2)):
        casts = Cast(fmt, granularity), Cast(E4M3, granularity)
        g, x = operand(200, 256).cuda(), operand(200, 384, seed=1).cuda()
        _, _, gt, decode_g = kernels.cast(g, None, casts[0], None, False)
        _, _, xt, decode_x = kernels.cast(x, None, casts[1], None, False)
        got = kernels.scaled_mm(gt, xt, decode_g, decode_x, casts, torch.float32, False)
        assert relative_error(got, double_product(gt, xt, decode_g, decode_x)) < 2e-3


@pytest.mark.gpu
def test_nothing_to_multiply() -> None:
    for pair in PAIRS:
        casts = Cast(E4M3, pair[0]), Cast(E4M3, pair[1])
        x, w = torch.empty(0, 256, device="cuda"), torch.randn(128, 256, device="cuda")
        a, decode_a, at, decode_at = kernels.cast(x, casts[0], casts[0], None, False)
        b, decode_b, _, _ = kernels.cast(w, casts[1], None, None, False)
        assert kernels.scaled_mm(a, b, decode_a, decode_b, casts, torch.bfloat16, True).shape == (0, 128)
        same = casts[0], casts[0]
        product = kernels.scaled_mm(at, at, decode_at, decode_at, same, torch.float32, True)
        assert product.shape == (256, 256) and not product.any()


@pytest.mark.gpu
def test_tensor_cores_are_used_where_they_exist() -> None:
    major = torch.cuda.get_device_capability()[0]
    a = torch.empty(16, 16, device="cuda")
    native = {pair: gemm.native_mode(a, (Cast(E4M3, pair[0]), Cast(E4M3, pair[1]))) is not None for pair in PAIRS}
    assert native[PAIRS[0]] == native[PAIRS[1]] == native[PAIRS[2]] == (torch.cuda.get_device_capability() >= (8, 9))
    assert native["1x128", "128x128"] == (major == 9 and supports("1x128", "cuda")[0])
    assert native["1x32", "1x32"] == (10 <= major < 12)


@pytest.mark.gpu
def test_formats_without_a_kernel_are_emulated() -> None:
    a = torch.empty(128, 128, device="cuda")
    for pair in PAIRS:
        assert gemm.native_mode(a, (Cast(E5M2, pair[0]), Cast(E5M2, pair[1]))) is None
    for pair in (("1x128", "1x128"), ("1x128", "128x128")):
        assert gemm.native_mode(a, (Cast(E5M2, pair[0]), Cast(E4M3, pair[1]))) is None


def test_why_blocks_of_e5m2_are_emulated() -> None:
    hopper = Hardware("cuda", (9, 0), (13, 0))
    assert supports("1x128", hopper) == (True, "")
    native, reason = supports("1x128", hopper, E5M2)
    assert not native and "E4M3" in reason
    assert supports("rowwise", hopper, E5M2) == (True, "")
    native, reason = supports("1x32", hopper)
    assert not native and "Blackwell" in reason


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_fused_update_moves_scales_as_the_reference_does(recipe: DelayedScaling) -> None:
    from lightning_fp8.kernels.scale_update import step_scales

    check_update(step_scales, recipe, "cuda")


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_cpu_has_no_tensor_cores(granularity: str) -> None:
    native, reason = supports(granularity, "cpu")
    assert not native and "cpu" in reason


def test_the_reference_multiplies_on_the_cpu() -> None:
    for pair in PAIRS:
        casts = Cast(E4M3, pair[0]), Cast(E5M2, pair[1])
        a, decode_a, _, _ = kernels.cast(operand(140, 256), casts[0], None, None, False)
        b, decode_b, _, _ = kernels.cast(operand(128, 256), casts[1], None, None, False)
        got = kernels.scaled_mm(a, b, decode_a, decode_b, casts, torch.float32, True)
        assert relative_error(got, double_product(a, b, decode_a, decode_b)) < 1e-5


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_no_rows_on_the_cpu(granularity: str) -> None:
    cast = Cast(E4M3, granularity)
    x, w = torch.empty(0, 256), torch.randn(128, 256)
    a, decode_a, at, decode_at = kernels.cast(x, cast, cast, None, False)
    b, decode_b, _, _ = kernels.cast(w, cast, None, None, False)
    assert kernels.scaled_mm(a, b, decode_a, decode_b, (cast, cast), torch.float32, True).shape == (0, 128)
    assert not kernels.scaled_mm(at, at, decode_at, decode_at, (cast, cast), torch.float32, True).any()


def test_mx_scales_lie_where_tensor_cores_read_them() -> None:
    """Byte by byte, from cuBLAS's description of the layout."""
    rows, blocks = 150, 6
    decode = torch.randint(-20, 20, (rows, blocks)).float().exp2()
    laid_out, _ = gemm._mx_scale(torch.empty(rows, 32 * blocks), decode)
    got = laid_out.float()
    assert got.shape == (256 * 8,)
    for row in range(rows):
        for block in range(blocks):
            tile = row // 128 * 2 + block // 4
            offset = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
            assert got[offset] == decode[row, block]
