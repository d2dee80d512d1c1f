"""Compares the Triton kernels of the block codec with torch, bit for bit, on the device named on the command line.

    python tests/comm/kernel_checks.py cuda E4M3 stochastic

On a GPU the command line names a format and how it rounds as well: compiling all kernels in one process takes minutes.

On ``cpu`` this runs in Triton's interpreter (``TRITON_INTERPRET=1``), which covers layout, masks and the arithmetic on
bits; the interpreter converts to FP8 and bf16, and from bf16's subnormals, wrongly: those are left to a GPU.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_fp8.comm.codec import BlockCodec, amax_target
from lightning_fp8.formats import E4M3, E5M2, Format, dequantize
from lightning_fp8.kernels import block_codec, weight_codes

SEED = 0x123456789ABCDEF
# Values, rows, values in a row: whole and cut blocks, more rows than data, empty rows, several programs in a row.
SHAPES = ((1000, 3, 400), (5000, 2, 2500), (100, 4, 128), (300, 1, 300), (0, 2, 128), (0, 2, 0), (4096, 2, 2048))


def inputs(numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=generator) * torch.exp(8 * torch.randn(numel, generator=generator))
    if numel == 300:
        x[7], x[299] = math.nan, -math.inf
    if numel == 5000:
        x[:2000], x[3000:3200], x[4000:4100] = 0.0, x[3000:3200] * 1e-38, torch.finfo(torch.float32).max
    if numel == 4096:  # every code and every tie between two codes, in one block of its own
        codes = torch.arange(256, dtype=torch.uint8).view(E4M3.dtype).float().nan_to_num(0.0).sort().values
        x[:256], x[256:511], x[511], x[512:1024] = codes, (codes[1:] + codes[:-1]) / 2, 448.0, 448.0
    return x.to(dtype)


def compare(codec: BlockCodec, device: str, dtype: torch.dtype, native: bool | None) -> None:
    fmt, target = codec.fmt, amax_target(codec.fmt)
    out_dtype = torch.float32 if device == "cpu" else dtype
    for numel, rows, row_numel in SHAPES:
        x, tag = inputs(numel, dtype), codec.tag(row_numel)
        key = SEED if codec.stochastic else None

        expected = codec.encode(x, rows, row_numel, SEED)
        messages = torch.full_like(expected, 99, device=device)
        block_codec.encode(x.to(device), messages, row_numel, codec.block, fmt, target, key, tag, native)
        same(messages, expected)

        for out_numel in (rows * row_numel, max(rows * row_numel - 3, 0)):
            out = torch.full((out_numel,), 99.0, dtype=out_dtype)
            codec.decode(expected, row_numel, out)
            decoded = torch.full_like(out, 99, device=device)
            block_codec.decode(messages, decoded, row_numel, codec.block, fmt, tag, native)
            same(decoded, out)

        own = inputs(max(row_numel - 5, 0), torch.bfloat16)
        for contribution, own_row in ((None, -1), (own, rows - 1)):
            on_device = None if contribution is None else contribution.to(device)
            out = torch.full((row_numel,), 99.0, dtype=out_dtype)
            codec.reduce(expected, row_numel, out, 1 / 3, contribution, own_row)
            reduced = torch.full_like(out, 99, device=device)
            block_codec.reduce(messages, reduced, row_numel, codec.block, fmt, 1 / 3, on_device, own_row, tag, native)
            same(reduced, out)
            message = codec.reduce_encode(expected, row_numel, 1 / 3, contribution, own_row, SEED)
            encoded = torch.full_like(message, 99, device=device)
            block_codec.reduce_encode(
                messages, encoded, row_numel, codec.block, fmt, 1 / 3, on_device, own_row, target, key, tag, native
            )
            same(encoded, message)

        # A message that does not carry the tag decodes to NaN.
        out = torch.zeros(rows * row_numel, device=device)
        block_codec.decode(messages, out, row_numel, codec.block, fmt, tag ^ 2, native)
        assert out.isnan().all()


def compare_weight_codes(device: str, dtype: torch.dtype, native: bool | None) -> None:
    """Every code, in rows that lie apart and reach over several programs."""
    for fmt in (E4M3, E5M2):
        messages = torch.arange(256, dtype=torch.uint8).repeat(3, 10)[:, :2512].contiguous()
        if fmt is E5M2:
            messages[(messages & 0x7F) > 0x7B] = 0x7F  # Other NaNs, and Inf, are never sent.
        slot = torch.tensor([-1.0, 37.7, 5.0, -1.0])
        out = torch.full((3, 2600), 99.0, dtype=dtype)
        expected = out.clone()
        expected[:, 50:2551] = dequantize(messages[:, :2501].contiguous().view(fmt.dtype), 1 / slot[1]).to(dtype)
        out = out.to(device)
        weight_codes.decode(messages.to(device), out[:, 50:2551], slot.to(device), fmt, native)
        same(out, expected)


def same(result: Tensor, expected: Tensor) -> None:
    """Equal in every bit, except that one NaN is as good as another."""
    result = result.cpu()
    if result.dtype == torch.uint8:
        assert torch.equal(result, expected)
    else:
        assert torch.equal(result.isnan(), expected.isnan())
        assert torch.equal(result.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


if __name__ == "__main__":
    device = sys.argv[1]
    choices: Iterable[tuple[Format, int, bool, torch.dtype]]
    if device == "cpu":
        few = itertools.product((E4M3, E5M2), (16, 128), (False, True), (torch.float32,))
        choices = [*few, (E4M3, 1024, False, torch.float16)]
    else:
        fmt, stochastic = {"E4M3": E4M3, "E5M2": E5M2}[sys.argv[2]], sys.argv[3] == "stochastic"
        # Each block size once, each dtype once: a kernel treats them apart.
        pairs = ((16, torch.float16), (128, torch.float32), (1024, torch.bfloat16))
        choices = [(fmt, block, stochastic, dtype) for block, dtype in pairs]
    for fmt, block, stochastic, dtype in choices:
        for native in (False,) if device == "cpu" else (False, None):
            compare(BlockCodec(fmt, block, stochastic), device, dtype, native)
            if block == 128 and not stochastic and fmt is E4M3:
                compare_weight_codes(device, dtype, native)
    print("same bits")
