"""What the fast casts are held to: the codes, decode scales and statistics of the reference, on the CPU."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.casts import Cast
from lightning_fp8.formats import E4M3, E5M2
from lightning_fp8.kernels import reference, triton_cast, triton_foreseen, triton_stored
from lightning_fp8.kernels.launch import at_once, by_triton

UNSET = (-1.0, 0.0, 0.0, -1.0)
#: Slots beside what a cast of values up to 12 finds: the amax so far or of the step before, and whether it tells the
#: scales.
FORESEEN = {
    (-1.0, 0.0, 0.0, 12.0): True,
    (-1.0, 0.0, 0.0, 8.0): True,  # Up to 14, in E4M3, one power of two does, and so it does in E5M2.
    (-1.0, 0.0, 0.0, 6.5): False,
    (-1.0, 0.0, 0.0, 15.0): False,
    (13.0, 0.0, 0.0, 3.0): True,
    (3.0, 0.0, 0.0, 13.0): False,
    (-1.0, 0.0, 0.0, math.nan): False,
    (math.inf, 0.0, 0.0, 12.0): True,
    (0.0, 0.0, 0.0, 12.0): True,
    (0.0, 0.0, 0.0, math.inf): False,
    UNSET: False,
}
#: Settings of tensorwise and rowwise casts, straight and transposed.
SETTINGS = {
    "plain": ((E4M3, {}), (E4M3, {})),
    "hybrid": ((E4M3, {"margin": 0.263}), (E5M2, {"power_of_two": True, "max_scale": 100.0})),
    "e5m2": ((E5M2, {}), (E5M2, {"margin": 1.0})),
    "foreseen": ((E4M3, {"power_of_two": True}), (E5M2, {"power_of_two": True, "margin": 1.0})),
    "foreseen straight": ((E4M3, {"power_of_two": True}), None),
    "foreseen transposed": (None, (E5M2, {"power_of_two": True})),
    "straight": ((E4M3, {}), None),
    "transposed": (None, (E5M2, {})),
}


def casts(setting: str, straight: str, transposed: str) -> tuple[Cast | None, Cast | None]:
    """The two casts of a setting with these granularities."""
    pair = zip(SETTINGS[setting], (straight, transposed), strict=True)
    first, second = (use and Cast(use[0], granularity, **use[1]) for use, granularity in pair)
    return first, second


def every_16_bit_value(dtype: torch.dtype) -> Tensor:
    """All values of bf16 or fp16: ties, subnormals, both zeros, Inf and NaN among them. ``[256, 256]``."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)


def mixed_values(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Rows and columns of very different size, one of each zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.randn(rows, 1, generator=generator).mul(2).exp() * torch.randn(columns, generator=generator).exp()
    x[rows // 2] = 0
    x[:, columns // 2] = 0
    return x.to(dtype)


def up_to(amax: float, rows: int, columns: int) -> Tensor:
    """Values of all sizes, the largest of which is ``amax``."""
    x = mixed_values(rows, columns).float()
    return (x * (amax / x.abs().amax())).bfloat16()


def check_cast(
    x: Tensor,
    straight: Cast | None,
    transposed: Cast | None,
    slot: tuple[float, ...] | None = None,
    stored: bool = False,
    codes_tolerance: float = 0.0,
) -> None:
    """The Triton cast of ``x`` against the reference's of the same values.

    ``codes_tolerance``: relative, for the interpreter, whose conversions round wrongly and know no NaN.
    """
    slots = [None if slot is None else torch.tensor(slot, device=device) for device in (x.device, "cpu")]
    got = triton_cast.cast(x, straight, transposed, slots[0], stored)
    want = reference.cast(x.cpu(), straight, transposed, slots[1], stored)
    what = f"{tuple(x.shape)} {x.dtype} {straight} {transposed} {slot} stored={stored}"
    for name, g, w in zip(("codes", "decode", "codes_t", "decode_t"), got, want, strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype, f"{what}: {name} {g.shape} {g.dtype}"
        if w.dtype.itemsize > 1:
            assert_same(g, w, f"{what}: {name}")
        elif codes_tolerance:
            g, w = g.float().cpu(), w.float()
            far = (g - w).abs() > codes_tolerance * w.abs() + 2.0**-9
            assert not far.any(), f"{what}: {name} {g[far][:4]} {w[far][:4]} at {far.nonzero()[:4].tolist()}"
        else:
            differ = g.view(torch.uint8).cpu() != w.view(torch.uint8)
            assert not differ.any(), (
                f"{what}: {int(differ.sum())} {name}, {g.cpu()[differ][:4]} for {w[differ][:4]} "
                f"at {differ.nonzero()[:4].tolist()}"
            )
    if slot is not None:
        assert_same(slots[0], slots[1], f"{what}: slot")


def check_later(
    x: Tensor, straight: Cast, transposed: Cast, slot: tuple[float, ...], cast: Any = triton_cast.cast_stored
) -> None:
    """A cast made in two, against the one that makes both operands at once."""
    padded = -(-x.shape[0] // 16) * 16
    slots = [torch.tensor(slot, device=x.device) for _ in range(2)]
    want = cast(x, padded, straight, transposed, slots[0])
    kept = torch.empty(1, 1, device=x.device)
    codes_t, decode_t = torch.empty_like(want[2]), torch.empty_like(want[3])

    def first(kernel: Any, programs: int, tensors: Any, sizes: Any, constants: Any, warps: int) -> None:
        if "codes_t" in kernel.arg_names:
            codes, _, decode, _, *places = tensors[1:]
            constants = (*constants[:2], triton_stored.LATER, *constants[3:])
            tensors = x, codes, None, decode, kept, *places
        at_once(kernel, programs, tensors, sizes, constants, warps)

    def second(_: Any, programs: int, tensors: Any, sizes: Any, constants: Any, warps: int) -> None:
        by_triton(triton_stored.cast_later, programs, (x, codes_t, decode_t, kept), sizes, constants[4:], warps)

    got = cast(x, padded, straight, transposed, slots[1], launch=first)
    triton_cast.cast_stored(x, padded, straight, transposed, slots[1].clone(), launch=second)
    what = f"{tuple(x.shape)} {slot}"
    assert_same(slots[1], slots[0], f"{what}: slot")
    for name, g, w in zip(("codes", "decode", "codes_t", "decode_t"), (*got[:2], codes_t, decode_t), want, strict=True):
        bits = (t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in (g, w))
        assert_same(*bits, f"{what}: {name}")


def cast_again_nothing(kernel: Any, programs: int, tensors: Any, sizes: Any, constants: Any, warps: int) -> None:
    """Launch a kernel; what casts again finds other values than there are."""
    if kernel is triton_foreseen.cast_again:
        tensors = (torch.full_like(tensors[0], 0.5), *tensors[1:])
    by_triton(kernel, programs, tensors, sizes, constants, warps)


def check_foreseen(x: Tensor, setting: str, slot: tuple[float, ...]) -> bool:
    """Whether the amaxes in ``slot`` foretell the scales of ``x``, so that the values are read once."""
    pair = casts(setting, "tensorwise", "tensorwise")
    slots = [torch.tensor(slot, device=x.device) for _ in range(2)]
    want = triton_cast.cast(x, *pair, slots[0], False)
    got = triton_cast.cast(x, *pair, slots[1], False, cast_again_nothing)
    assert_same(slots[1], slots[0], f"{slot}: slot")
    assert_same(slots[0][1:], torch.tensor(slot[1:]), f"{slot}: all but the amax")
    return all(torch.equal(g.view(torch.uint8), w.view(torch.uint8)) for g, w in zip(got, want, strict=True))


def assert_same(got: Tensor, want: Tensor, what: str) -> None:
    """Equal bits, any NaN for any NaN."""
    got, want = got.cpu(), want.cpu()
    same = (got == want) | (got.isnan() & want.isnan())
    assert same.all(), f"{what}: {got[~same][:4]} for {want[~same][:4]} at {(~same).nonzero()[:4].tolist()}"
