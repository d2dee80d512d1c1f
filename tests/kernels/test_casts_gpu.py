"""The casts on a GPU, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from lightning_fp8 import kernels
from lightning_fp8.casts import Cast
from lightning_fp8.formats import E4M3, E5M2
from lightning_fp8.kernels import reference
from tests.kernels.agreement import (
    FORESEEN,
    SETTINGS,
    UNSET,
    assert_same,
    casts,
    check_cast,
    check_foreseen,
    every_16_bit_value,
    mixed_values,
    up_to,
)

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
KINDS = [("tensorwise", "tensorwise"), ("rowwise", "rowwise"), ("rowwise", "tensorwise"), ("tensorwise", "rowwise")]
BLOCKS = [
    (straight, transposed)
    for kinds in ((None, "1x128", "128x128"), (None, "1x32"))
    for straight, transposed in itertools.product(kinds, repeat=2)
    if straight or transposed
]


def block_casts(straight: str | None, transposed: str | None) -> tuple[Cast | None, Cast | None]:
    return straight and Cast(E4M3, straight), transposed and Cast(E5M2, transposed, True)


def random_floats() -> torch.Tensor:
    """fp32 of any bits: NaN, Inf and subnormals among them."""
    bits = torch.randint(-(2**31), 2**31, (256, 256), generator=torch.Generator().manual_seed(1))
    return bits.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("scale", [1.0, 3.7, 2.0**126, 2.0**-126, 1e-3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_value_is_cast_as_the_reference_does(dtype: torch.dtype, scale: float) -> None:
    """All 16-bit values: so every tie and every one of the 256 codes, saturation, Inf, NaN, subnormals."""
    x = random_floats() if dtype is torch.float32 else every_16_bit_value(dtype)
    for setting in ("plain", "e5m2"):
        check_cast(x.to(DEVICE), *casts(setting, "tensorwise", "tensorwise"), (-1.0, scale, scale, -1.0), stored=True)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_scales_of_tensors_and_rows(kind: tuple[str, str], setting: str) -> None:
    x = mixed_values(200, 272).to(DEVICE)
    for values in (x, x[:37, 16:64], x[:1, :16], x.t().contiguous()[:, :193].t()):
        check_cast(values, *casts(setting, *kind), UNSET)
    check_cast(mixed_values(384, 256).to(DEVICE), *casts(setting, *kind))


def test_matrices_that_are_not_aligned() -> None:
    """A kernel that was compiled for aligned ones must not be launched on them."""
    x = mixed_values(200, 273).to(DEVICE)
    for values in (x[:, :272].contiguous(), x[:, 1:], x.flatten()[1 : 1 + 200 * 272].view(200, 272)):
        for kind in KINDS:
            check_cast(values, *casts("plain", *kind), UNSET)
        check_cast(values, *casts("plain", "tensorwise", "tensorwise"), UNSET, stored=True)


@pytest.mark.parametrize("kind", BLOCKS, ids=str)
def test_scales_of_blocks(kind: tuple[str | None, str | None]) -> None:
    x = mixed_values(200, 640).to(DEVICE)
    same = [use and Cast(E4M3, use) for use in kind]
    for values in (x, x[:37, 128:384], mixed_values(256, 128).to(DEVICE)):
        check_cast(values, *same, UNSET)
        check_cast(values, *block_casts(*kind), UNSET)
        check_cast(values, *block_casts(*kind))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_values_that_are_not_finite_stay_visible(dtype: torch.dtype) -> None:
    x = random_floats() if dtype is torch.float32 else every_16_bit_value(dtype)
    pairs = [casts("hybrid", *kind) for kind in KINDS] + [
        block_casts(kind, kind) for kind in ("1x128", "128x128", "1x32")
    ]
    for pair in pairs:
        check_cast(x.to(DEVICE), *pair, UNSET)
    single = mixed_values(256, 256, dtype)
    for value in (torch.inf, -torch.inf, torch.nan):
        single[200, 100] = value
        for pair in pairs:
            check_cast(single.to(DEVICE), *pair, (3.0, 0.0, 0.0, 1.0))
            check_cast(single.to(DEVICE), *pair, (3.0, 0.0, 2.0, 1.0), stored=True)


@pytest.mark.parametrize("x", [torch.zeros(64, 128), torch.full((64, 128), 1e-41), torch.full((64, 128), -3e38)])
def test_extreme_tensors(x: torch.Tensor) -> None:
    for pair in [casts("hybrid", *kind) for kind in KINDS] + [block_casts("1x32", "1x32")]:
        check_cast(x.to(DEVICE), *pair, UNSET)
    check_cast(x.to(DEVICE), *casts("hybrid", "tensorwise", "tensorwise"), UNSET, stored=True)


@pytest.mark.parametrize("setting", SETTINGS)
def test_unset_scales_come_from_the_data_once(setting: str) -> None:
    pair = casts(setting, "tensorwise", "tensorwise")
    large, tall = mixed_values(1024, 1024), mixed_values(4099, 112)
    for slot in (UNSET, (1e6, 0.0, 0.0, 5.0), (0.1, 0.0, 3.0, -1.0), (0.1, 0.25, 0.0, -1.0), (9.0, 2.0, 4.0, 0.0)):
        for x in (large, tall, torch.zeros(512, 512)):
            check_cast(x.to(DEVICE), *pair, slot, stored=True)
    slot = torch.tensor(UNSET, device=DEVICE)
    for seed in range(5):
        x = mixed_values(512, 1024, seed=seed).to(DEVICE)
        before = slot.tolist()
        kernels.cast(x, *pair, slot, True)
        if seed:
            assert slot.tolist()[1:3] == before[1:3]


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name.startswith("foreseen")])
@pytest.mark.parametrize("slot", FORESEEN, ids=str)
def test_a_scale_is_the_data_s_whatever_was_foreseen(slot: tuple[float, ...], setting: str) -> None:
    pair = casts(setting, "tensorwise", "tensorwise")
    not_finite = every_16_bit_value(torch.bfloat16)
    # The last has more tiles than there are programs that cast again.
    for x in (up_to(12.0, 200, 272), not_finite, torch.zeros(64, 128), up_to(12.0, 4096, 4096)):
        check_cast(x.to(DEVICE), *pair, slot)
    assert check_foreseen(up_to(12.0, 4096, 272).to(DEVICE), setting, slot) is FORESEEN[slot]


def test_results_do_not_depend_on_the_order_of_programs() -> None:
    x = mixed_values(2048, 4096).to(DEVICE)
    for kind, stored in ((("tensorwise", "tensorwise"), True), (("rowwise", "rowwise"), False)):
        outcomes = []
        for _ in range(10):
            slot = torch.tensor(UNSET, device=DEVICE)
            outcomes.append((*kernels.cast(x, *casts("hybrid", *kind), slot, stored), slot))
        for outcome in outcomes[1:]:
            for got, want in zip(outcome, outcomes[0], strict=True):
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_long_rows() -> None:
    for columns in (768, 14336, 28672, 32768 + 16):
        check_cast(mixed_values(24, columns).to(DEVICE), *casts("straight", "rowwise", "rowwise"), UNSET)


def test_empty_matrices() -> None:
    x = torch.empty(0, 128, device=DEVICE, dtype=torch.bfloat16)
    for kind in ("tensorwise", "rowwise", "1x128", "128x128", "1x32"):
        pair = Cast(E4M3, kind), Cast(E5M2, kind)
        slots = torch.tensor(UNSET, device=DEVICE), torch.tensor(UNSET)
        outputs = zip(
            kernels.cast(x, *pair, slots[0], True), reference.cast(x.cpu(), *pair, slots[1], True), strict=True
        )
        for got, want in outputs:
            assert got.shape == want.shape and got.dtype == want.dtype
        assert_same(*slots, kind)


def test_offsets_beyond_32_bits() -> None:
    x = torch.randn(65536 + 16, 32768, device=DEVICE, dtype=torch.bfloat16)
    slot = torch.tensor([-1.0, 16.0, 16.0, -1.0], device=DEVICE)
    for granularity in ("tensorwise", "rowwise"):
        # Powers of two: the decode scale's reciprocal is the scale.
        cast = Cast(E4M3, granularity, power_of_two=True)
        codes, decode, codes_t, decode_t = kernels.cast(x, cast, cast, slot, True)
        for part in (slice(0, 16), slice(-16, None)):
            values = x[part].float()
            scale, scale_t = 1 / (decode if decode.numel() == 1 else decode[part]), 1 / decode_t.t()
            for got, want in (
                (codes[part], reference.quantize(values, scale, E4M3)),
                (codes_t[:, part].t().contiguous(), reference.quantize(values, scale_t, E4M3)),
            ):
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
        del codes, codes_t
    assert slot[0] == x.abs().amax().float()


def test_decode_scales_suit_cublas() -> None:
    x = torch.randn(256, 512, device=DEVICE)
    pairs = [("1x128", "1x128"), ("128x128", "128x128"), ("1x128", "128x128"), ("1x32", "1x32")]
    for straight, transposed in [*KINDS, *pairs]:
        pair = Cast(E4M3, straight), Cast(E4M3, transposed)
        operands = kernels.cast(x, *pair, None, False), kernels.empty_operands(x, 256, *pair)
        for decode, like in zip(operands[0][1::2], operands[1][1::2], strict=True):
            assert decode.data_ptr() % 16 == 0
            assert (decode.shape, decode.stride()) == (like.shape, like.stride())


def test_casts_neither_wait_for_the_device_nor_break_a_graph() -> None:
    x = mixed_values(512, 512).to(DEVICE)
    slot = torch.tensor(UNSET, device=DEVICE)
    pairs = [casts("plain", *kind) for kind in KINDS] + [
        block_casts("1x128", "1x128"),
        block_casts("128x128", "128x128"),
    ]
    jobs = [(pair, True) for pair in pairs] + [(casts("foreseen", "tensorwise", "tensorwise"), False)]
    for pair, stored in jobs:
        kernels.cast(x, *pair, slot, stored)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for pair, stored in jobs:
            kernels.cast(x, *pair, slot, stored)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    pair = casts("plain", "tensorwise", "tensorwise")
    slot.copy_(torch.tensor(UNSET))
    with torch.cuda.graph(graph):
        outputs = kernels.cast(x, *pair, slot, True)
    want_slot = torch.tensor(UNSET)
    for seed in range(3):
        values = mixed_values(512, 512, seed=seed + 1)
        x.copy_(values)
        graph.replay()
        want = reference.cast(values, *pair, want_slot, True)
        for got, expected in zip(outputs, want, strict=True):
            assert torch.equal(got.cpu().view(torch.uint8), expected.view(torch.uint8))
        assert_same(slot, want_slot, "slot")
