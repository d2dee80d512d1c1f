"""Triton kernels of the block codec: the arithmetic of :class:`lightning_fp8.comm.codec.BlockCodec`, bit for bit.

Three things keep the bits equal to torch's: divisions are IEEE ones (``tl.div_rn``), products are not fused into the
sum over ranks (``enable_fp_fusion=False``), and the random words come from the same counters. Where the GPU has no such
FP8 conversion (before compute capability 8.9, and AMD's) the cast is done on the bits of the fp32 numbers, with the
same result.

The layout of a message is described in :mod:`lightning_fp8.comm.codec`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lightning_fp8.formats import MAX_SCALE, MIN_SCALE, Format
from lightning_fp8.kernels.capability import has_fast_casts
from lightning_fp8.kernels.launch import at_once, by_triton

TILE, WARPS = 2048, 4  # values per program, of which each thread loads 16


@triton.jit
def _cast(y, MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr, NATIVE: tl.constexpr):
    """Codes (uint8) of fp32 values within the format's range, rounded to nearest, ties to even."""
    if NATIVE:
        if MANTISSA_BITS == 3:
            codes = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            codes = y.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        bits = y.to(tl.int32, bitcast=True)
        magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
        exponent = tl.maximum((bits & 0x7FFFFFFF) >> 23, 128 - BIAS)
        # Adding 2**23 spacings leaves no bits below the spacing: the addition itself rounds, as IEEE asks.
        anchor = ((exponent - MANTISSA_BITS + 23) << 23).to(tl.float32, bitcast=True)
        rounded = (magnitude + anchor) - anchor
        normal = (rounded.to(tl.int32, bitcast=True) >> (23 - MANTISSA_BITS)) - ((127 - BIAS) << MANTISSA_BITS)
        SUBNORMALS_PER_ONE: tl.constexpr = 2.0 ** (BIAS - 1 + MANTISSA_BITS)
        subnormal = (rounded * SUBNORMALS_PER_ONE).to(tl.int32)
        code = tl.where(exponent == 128 - BIAS, subnormal, normal)
        codes = (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    return codes


@triton.jit
def uncast(codes, MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 values of finite codes."""
    if NATIVE:
        if MANTISSA_BITS == 3:
            values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            values = codes.to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        code = codes.to(tl.int32)
        magnitude = code & 0x7F
        normal = ((magnitude << (23 - MANTISSA_BITS)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
        SUBNORMAL: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA_BITS)
        unsigned = tl.where(magnitude < (1 << MANTISSA_BITS), magnitude.to(tl.float32) * SUBNORMAL, normal)
        values = (unsigned.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
    return values


@triton.jit
def _round_stochastically(y, row, column, seed, MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr):
    """As :func:`lightning_fp8.comm.rounding.round_stochastically`, with its noise."""
    word, _, _, _ = tl.philox(seed, column, row, 0, 0)
    noise = (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2**-24
    bits = y.to(tl.int32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    exponent = tl.minimum(tl.maximum((bits & 0x7FFFFFFF) >> 23, 128 - BIAS), 254) - MANTISSA_BITS
    spacing = (exponent << 23).to(tl.float32, bitcast=True)
    per_spacing = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    rounded = tl.floor(magnitude * per_spacing + noise) * spacing
    return (rounded.to(tl.int32, bitcast=True) | (bits & (-2147483648))).to(tl.float32, bitcast=True)


@triton.jit
def _write(
    x, message, row, block, column, blocks, tag, message_bytes, seed,
    BLOCK: tl.constexpr, FORMAT_MAX: tl.constexpr, AMAX_TARGET: tl.constexpr,
    MIN_SCALE: tl.constexpr, MAX_SCALE: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr, NATIVE: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Encode ``x``, fp32 ``[tile blocks, BLOCK]``, into its place in a message."""
    # Ordered as integers, the magnitudes of floats keep their order, and NaN comes after Inf: this maximum sees both.
    magnitude_bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax_bits = tl.max(magnitude_bits, axis=1)
    finite = amax_bits < 0x7F800000
    amax = tl.minimum(amax_bits, 0x7F000000).to(tl.float32, bitcast=True)  # at most 2**127
    scale = tl.div_rn(tl.full(amax.shape, AMAX_TARGET, tl.float32), amax)
    scale = tl.minimum(tl.maximum(scale, MIN_SCALE), MAX_SCALE)
    scale = tl.where(finite & (amax_bits > 0), scale, 1.0)
    decode_scale = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)
    decode_scale = tl.where(finite, decode_scale, float("nan"))

    y = tl.minimum(tl.maximum(x * scale[:, None], -FORMAT_MAX), FORMAT_MAX)
    if STOCHASTIC:
        y = _round_stochastically(y, row, column.to(tl.int32), seed, MANTISSA_BITS, BIAS)
    codes = tl.where(magnitude_bits < 0x7F800000, _cast(y, MANTISSA_BITS, BIAS, NATIVE), 0x7F).to(tl.uint8)

    inside = block < blocks
    tl.store(message + column, codes, mask=inside[:, None])
    scales = (message + blocks * BLOCK).to(tl.pointer_type(tl.float32))
    tl.store(scales + block, decode_scale, mask=inside)
    # Zeros up to the last word, which is the tag; the first program of the row writes them.
    word = tl.arange(0, 4)
    words = (message_bytes - blocks * (BLOCK + 4)) // 4
    rest = (message + blocks * (BLOCK + 4)).to(tl.pointer_type(tl.int32))
    tl.store(rest + word, tl.where(word == words - 1, tag, 0), mask=(word < words) & (tl.program_id(0) == 0))


@triton.jit
def _read(
    message, block, column, blocks, tag, message_bytes,
    BLOCK: tl.constexpr, MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Decode a tile of blocks: fp32 ``[tile blocks, BLOCK]``, NaN where the message does not carry the tag."""
    inside = block < blocks
    codes = tl.load(message + column, mask=inside[:, None], other=0)
    scales = (message + blocks * BLOCK).to(tl.pointer_type(tl.float32))
    decode_scale = tl.load(scales + block, mask=inside, other=0.0)
    received = tl.load((message + message_bytes - 4).to(tl.pointer_type(tl.int32)))
    decode_scale = tl.where(received == tag, decode_scale, float("nan"))
    return uncast(codes, MANTISSA_BITS, BIAS, NATIVE) * decode_scale[:, None]


@triton.jit
def _sum(
    messages, own, own_row, own_numel, factor, block, column, blocks, tag, message_bytes,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, TILE_BLOCKS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """``factor`` times the sum of the ranks' tiles, in fp32, first rank first; ``own`` instead of row ``own_row``."""
    total = tl.zeros((TILE_BLOCKS, BLOCK), tl.float32)
    for rank in range(RANKS):
        if rank == own_row:
            total += tl.load(own + column, mask=column < own_numel, other=0).to(tl.float32)
        else:
            message = messages + tl.cast(rank, tl.int64) * message_bytes
            total += _read(message, block, column, blocks, tag, message_bytes, BLOCK, MANTISSA_BITS, BIAS, NATIVE)
    return total * factor


@triton.jit
def _tile(BLOCK: tl.constexpr, TILE_BLOCKS: tl.constexpr):
    """The blocks of this program, and the places of their values within the row."""
    block = tl.program_id(0) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
    column = block[:, None].to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return block, column


@triton.jit
def _encode_kernel(
    x, messages, numel, row_numel, blocks, tag, message_bytes, seed,
    BLOCK: tl.constexpr, TILE_BLOCKS: tl.constexpr,
    FORMAT_MAX: tl.constexpr, AMAX_TARGET: tl.constexpr, MIN_SCALE: tl.constexpr, MAX_SCALE: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr, NATIVE: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    block, column = _tile(BLOCK, TILE_BLOCKS)
    place = row.to(tl.int64) * row_numel + column
    values = tl.load(x + place, mask=(column < row_numel) & (place < numel), other=0.0).to(tl.float32)
    _write(
        values, messages + row.to(tl.int64) * message_bytes, row, block, column, blocks, tag, message_bytes, seed,
        BLOCK, FORMAT_MAX, AMAX_TARGET, MIN_SCALE, MAX_SCALE, MANTISSA_BITS, BIAS, NATIVE, STOCHASTIC,
    )  # fmt: skip


@triton.jit
def _decode_kernel(
    messages, out, numel, row_numel, blocks, tag, message_bytes,
    BLOCK: tl.constexpr, TILE_BLOCKS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    block, column = _tile(BLOCK, TILE_BLOCKS)
    message = messages + row * message_bytes
    values = _read(message, block, column, blocks, tag, message_bytes, BLOCK, MANTISSA_BITS, BIAS, NATIVE)
    place = row * row_numel + column
    tl.store(out + place, values, mask=(column < row_numel) & (place < numel))


@triton.jit
def _reduce_kernel(
    out, own, messages, own_row, own_numel, factor, numel, blocks, tag, message_bytes,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, TILE_BLOCKS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    block, column = _tile(BLOCK, TILE_BLOCKS)
    total = _sum(
        messages, own, own_row, own_numel, factor, block, column, blocks, tag, message_bytes,
        RANKS, BLOCK, TILE_BLOCKS, MANTISSA_BITS, BIAS, NATIVE,
    )  # fmt: skip
    tl.store(out + column, total, mask=column < numel)


@triton.jit
def _reduce_encode_kernel(
    own, message, messages, own_row, own_numel, factor, row_numel, blocks, tag, message_bytes, seed,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, TILE_BLOCKS: tl.constexpr,
    FORMAT_MAX: tl.constexpr, AMAX_TARGET: tl.constexpr, MIN_SCALE: tl.constexpr, MAX_SCALE: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr, NATIVE: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    block, column = _tile(BLOCK, TILE_BLOCKS)
    total = _sum(
        messages, own, own_row, own_numel, factor, block, column, blocks, tag, message_bytes,
        RANKS, BLOCK, TILE_BLOCKS, MANTISSA_BITS, BIAS, NATIVE,
    )  # fmt: skip
    # What lies past the row's end are decoded zeros, unless a rank put a NaN into that block: it must not spread.
    total = tl.where(column < row_numel, total, 0.0)
    _write(
        total, message, 0, block, column, blocks, tag, message_bytes, seed,
        BLOCK, FORMAT_MAX, AMAX_TARGET, MIN_SCALE, MAX_SCALE, MANTISSA_BITS, BIAS, NATIVE, STOCHASTIC,
    )  # fmt: skip


def encode(
    x: Tensor,
    messages: Tensor,
    row_numel: int,
    block: int,
    fmt: Format,
    amax_target: float,
    seed: int | None,
    tag: int,
    native: bool | None = None,
) -> None:
    """Encode the rows of flat ``x`` (any floating dtype) into uint8 ``messages``, ``[rows, message bytes]``.

    A block's largest magnitude is scaled to ``amax_target``. ``seed`` ``None`` rounds to nearest. ``native``
    overrides whether the GPU's own FP8 conversions are used.
    """
    if len(messages) == 0:
        return
    _launch(
        _encode_kernel,
        _grid(row_numel, len(messages)),
        (x, messages),
        (x.numel(), row_numel, -(-row_numel // block), tag, messages.shape[1]),
        seed,
        (block, TILE // block, fmt.max, amax_target, MIN_SCALE, MAX_SCALE, *_codes(x, fmt, native)),
    )


def decode(
    messages: Tensor, out: Tensor, row_numel: int, block: int, fmt: Format, tag: int, native: bool | None = None
) -> None:
    """Decode all rows of ``messages`` into flat ``out`` (any floating dtype)."""
    at_once(
        _decode_kernel,
        _grid(row_numel, len(messages)),
        (messages, out),
        (out.numel(), row_numel, -(-row_numel // block), tag, messages.shape[1]),
        (block, TILE // block, *_codes(messages, fmt, native)),
        WARPS,
        fuse_products=False,
    )


def reduce(
    messages: Tensor,
    out: Tensor,
    row_numel: int,
    block: int,
    fmt: Format,
    factor: float,
    own: Tensor | None,
    own_row: int,
    tag: int,
    native: bool | None = None,
) -> None:
    """Write ``factor`` times the sum of the rows into flat ``out`` (any floating dtype).

    ``own``, flat and of any floating dtype, takes the place of row ``own_row``.
    """
    own, own_row, own_numel = _own(messages, own, own_row)
    at_once(
        _reduce_kernel,
        _grid(row_numel, 1),
        (out, own, messages),
        (own_row, own_numel, factor, out.numel(), -(-row_numel // block), tag, messages.shape[1]),
        (len(messages), block, TILE // block, *_codes(messages, fmt, native)),
        WARPS,
        fuse_products=False,
    )


def reduce_encode(
    messages: Tensor,
    message: Tensor,
    row_numel: int,
    block: int,
    fmt: Format,
    factor: float,
    own: Tensor | None,
    own_row: int,
    amax_target: float,
    seed: int | None,
    tag: int,
    native: bool | None = None,
) -> None:
    """Encode ``factor`` times the sum of the rows into ``message``, uint8 ``[1, message bytes]``. ``own`` as above."""
    own, own_row, own_numel = _own(messages, own, own_row)
    _launch(
        _reduce_encode_kernel,
        _grid(row_numel, 1),
        (own, message, messages),
        (own_row, own_numel, factor, row_numel, -(-row_numel // block), tag, messages.shape[1]),
        seed,
        (
            len(messages), block, TILE // block, fmt.max, amax_target, MIN_SCALE, MAX_SCALE,
            *_codes(messages, fmt, native),
        ),
    )  # fmt: skip


def _launch(
    kernel: Any,
    programs: tuple[int, int],
    tensors: tuple[Tensor, ...],
    sizes: tuple[int | float, ...],
    seed: int | None,
    constants: tuple[Any, ...],
) -> None:
    """Launch a kernel that encodes: its last size is the seed, and its last constant whether there is one."""
    launch = at_once if seed is None else by_triton  # A seed is another one at every call.
    launch(kernel, programs, tensors, (*sizes, seed or 0), (*constants, seed is not None), WARPS, fuse_products=False)


def _own(messages: Tensor, own: Tensor | None, own_row: int) -> tuple[Tensor, int, int]:
    # A kernel wants a pointer, even to what it will not read.
    return (messages, -1, 0) if own is None else (own, own_row, own.numel())


def _grid(row_numel: int, rows: int) -> tuple[int, int]:
    # At least one program a row: it also writes the tag.
    return max(1, -(-row_numel // TILE)), rows


def _codes(tensor: Tensor, fmt: Format, native: bool | None) -> tuple[int, int, bool]:
    """``MANTISSA_BITS``, ``BIAS`` and ``NATIVE``."""
    return fmt.mantissa_bits, fmt.bias, has_fast_casts(tensor.device) if native is None else native
