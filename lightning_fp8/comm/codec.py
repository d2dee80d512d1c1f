"""Tensors as messages: FP8 with one scale per block, and plain bf16 for what is too small to gain.

A message is one row of bytes, so that one collective carries codes and scales together:

    [ codes: blocks x block bytes | decode scales: blocks x 4 bytes (fp32) | padding | tag: 4 bytes ]

Rows are multiples of 16 bytes long, which keeps every part aligned. The tag names the layout: a message that was cut
short or built for another shape does not carry it, and decodes to NaN instead of to numbers.

A block with a NaN or an Inf in it gets a NaN decode scale, so the whole block arrives as NaN, everywhere.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8.comm.rounding import round_stochastically, uniform
from lightning_fp8.formats import E4M3, E5M2, Format, compute_scale, dequantize, quantize

_ALIGNMENT = 16
_TAG_BYTES = 4
# A block's amax is capped here: its largest code times its decode scale may round up, and must not overflow.
_MAX_AMAX = 2.0**127


class MessageError(RuntimeError):
    """A message arrived that was not built for this shape, block and format."""


@dataclass(frozen=True)
class _Codec(ABC):
    """What the two codecs share: tags, and sums over ranks in a fixed order."""

    @abstractmethod
    def message_bytes(self, numel: int) -> int:
        """Length of the message of ``numel`` values."""

    @abstractmethod
    def decode_rows(self, messages: Tensor, row_numel: int) -> Tensor:
        """fp32 ``[rows, row_numel]``."""

    def tag(self, row_numel: int) -> int:
        """A positive 31-bit number that stands for the layout of a message of ``row_numel`` values."""
        return zlib.crc32(f"{self!r}{row_numel}".encode()) & 0x7FFFFFFF | 1

    def verify(self, messages: Tensor, row_numel: int) -> None:
        """Check on the host that every message is whole and of this layout.

        Raises:
            MessageError: it is not, because ranks disagree about shape, block size or format.
        """
        received = _tags(messages).tolist()
        wrong = [row for row, value in enumerate(received) if value != self.tag(row_numel)]
        if wrong:
            raise MessageError(
                f"The messages from the group's ranks {wrong} do not hold {row_numel} values in the layout of {self}: "
                "every rank of the group must call the collective with the same shape, block size, format and "
                "min_numel."
            )

    def decode(self, messages: Tensor, row_numel: int, out: Tensor) -> None:
        """Write the values of all rows, one row after another, into ``out``.

        Args:
            messages: uint8 ``[rows, message_bytes(row_numel)]``.
            row_numel: values in a row.
            out: flat and contiguous, any floating dtype; what lies past its end is dropped.
        """
        out.copy_(self.decode_rows(messages, row_numel).flatten()[: out.numel()])

    def reduce(
        self,
        messages: Tensor,
        row_numel: int,
        out: Tensor,
        factor: float = 1.0,
        own: Tensor | None = None,
        own_row: int = -1,
    ) -> None:
        """Write ``factor`` times the sum of the rows into ``out``: summed in fp32, first row first.

        Args:
            messages: uint8 ``[rows, message_bytes(row_numel)]``.
            row_numel: values in a row.
            out: flat and contiguous, any floating dtype; what lies past its end is dropped.
            factor: applied to the fp32 sum.
            own: flat and contiguous, up to ``row_numel`` values that take the place of row ``own_row``: what a rank
                adds itself never crosses the wire and need not be rounded.
            own_row: the row that ``own`` replaces.
        """
        out.copy_(self._sum_rows(messages, row_numel, factor, own, own_row)[: out.numel()])

    def _sum_rows(self, messages: Tensor, row_numel: int, factor: float, own: Tensor | None, own_row: int) -> Tensor:
        total = torch.zeros(row_numel, dtype=torch.float32, device=messages.device)
        for row, message in enumerate(messages):
            if own is not None and row == own_row:
                total[: own.numel()] += own
            else:
                total += self.decode_rows(message[None], row_numel)[0]
        return total * factor

    def _seal(self, messages: Tensor, content_bytes: int, row_numel: int) -> None:
        messages[:, content_bytes:].zero_()
        _tags(messages).fill_(self.tag(row_numel))

    def _check_tags(self, messages: Tensor, row_numel: int, values: Tensor) -> Tensor:
        return torch.where(_tags(messages)[:, None] == self.tag(row_numel), values, torch.nan)


@dataclass(frozen=True)
class BF16Codec(_Codec):
    """bf16 values as they are: the same messages for what is too small for FP8 to gain."""

    def message_bytes(self, numel: int) -> int:
        """Length of the message of ``numel`` values."""
        return _aligned(2 * numel + _TAG_BYTES)

    def encode(self, x: Tensor, rows: int, row_numel: int, seed: int = 0) -> Tensor:
        """As :meth:`BlockCodec.encode`; rounds to nearest whatever the seed."""
        messages = torch.empty(rows, self.message_bytes(row_numel), dtype=torch.uint8, device=x.device)
        messages[:, : 2 * row_numel] = _rows(x, rows, row_numel).bfloat16().view(torch.uint8)
        self._seal(messages, 2 * row_numel, row_numel)
        return messages

    def decode_rows(self, messages: Tensor, row_numel: int) -> Tensor:
        """fp32 ``[rows, row_numel]``."""
        values = messages[:, : 2 * row_numel].view(torch.bfloat16).float()
        return self._check_tags(messages, row_numel, values)


@dataclass(frozen=True)
class BlockCodec(_Codec):
    """FP8 codes with one fp32 scale per block of consecutive values.

    On a GPU with Triton the casts, and the sum over ranks with the cast that follows it, are one kernel each; elsewhere
    plain torch gives the same bits.

    Args:
        fmt: :data:`~lightning_fp8.formats.E4M3` (3 mantissa bits; right for gradients too, as every block has its own
            scale) or :data:`~lightning_fp8.formats.E5M2` (2 bits, more range within a block).
        block: values that share a scale; a power of two from 16 to 1024. The scales add ``4 / block`` to the bytes.
        stochastic: round stochastically, so that the mean of many roundings is the value itself.

    Raises:
        ValueError: the block size or the format cannot be used.
    """

    fmt: Format = E4M3
    block: int = 128
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.block not in (16, 32, 64, 128, 256, 512, 1024):
            raise ValueError(f"block={self.block}: choose a power of two from 16 to 1024 (128 is a good start).")
        if self.fmt not in (E4M3, E5M2):
            raise ValueError(f"Messages hold E4M3 or E5M2 codes, not {self.fmt}.")

    def blocks(self, numel: int) -> int:
        """Blocks that ``numel`` values take."""
        return -(-numel // self.block)

    def message_bytes(self, numel: int) -> int:
        """Length of the message of ``numel`` values."""
        return _aligned(self.blocks(numel) * (self.block + 4) + _TAG_BYTES)

    def encode(self, x: Tensor, rows: int, row_numel: int, seed: int = 0) -> Tensor:
        """Cut ``x`` into rows and make a message of each.

        Args:
            x: flat and contiguous, any floating dtype, at most ``rows * row_numel`` values; zeros stand for the rest.
            rows: messages to make.
            row_numel: values in a row.
            seed: 64 bits, for stochastic rounding; give every call and rank its own.

        Returns:
            uint8 ``[rows, message_bytes(row_numel)]``.
        """
        messages = torch.empty(rows, self.message_bytes(row_numel), dtype=torch.uint8, device=x.device)
        if use_kernels(x):
            from lightning_fp8.kernels import block_codec

            target, key, tag = amax_target(self.fmt), self._seed(seed), self.tag(row_numel)
            block_codec.encode(x, messages, row_numel, self.block, self.fmt, target, key, tag)
        else:
            self._write(_rows(x, rows, row_numel).float(), messages, row_numel, seed)
        return messages

    def decode(self, messages: Tensor, row_numel: int, out: Tensor) -> None:
        """See the base class."""
        if use_kernels(messages):
            from lightning_fp8.kernels import block_codec

            block_codec.decode(messages, out, row_numel, self.block, self.fmt, self.tag(row_numel))
        else:
            super().decode(messages, row_numel, out)

    def reduce(
        self,
        messages: Tensor,
        row_numel: int,
        out: Tensor,
        factor: float = 1.0,
        own: Tensor | None = None,
        own_row: int = -1,
    ) -> None:
        """See the base class."""
        if use_kernels(messages):
            from lightning_fp8.kernels import block_codec

            tag = self.tag(row_numel)
            block_codec.reduce(messages, out, row_numel, self.block, self.fmt, factor, own, own_row, tag)
        else:
            super().reduce(messages, row_numel, out, factor, own, own_row)

    def reduce_encode(
        self,
        messages: Tensor,
        row_numel: int,
        factor: float = 1.0,
        own: Tensor | None = None,
        own_row: int = -1,
        seed: int = 0,
    ) -> Tensor:
        """The message of :meth:`reduce`'s result, without writing that result to memory.

        Returns:
            uint8 ``[1, message_bytes(row_numel)]``.
        """
        message = torch.empty_like(messages[:1])
        if use_kernels(messages):
            from lightning_fp8.kernels import block_codec

            target, key, tag = amax_target(self.fmt), self._seed(seed), self.tag(row_numel)
            block_codec.reduce_encode(
                messages, message, row_numel, self.block, self.fmt, factor, own, own_row, target, key, tag
            )
        else:
            total = self._sum_rows(messages, row_numel, factor, own, own_row)
            self._write(total[None], message, row_numel, seed)
        return message

    def decode_rows(self, messages: Tensor, row_numel: int) -> Tensor:
        """fp32 ``[rows, row_numel]``."""
        codes, decode_scales = self._parts(messages, row_numel)
        values = dequantize(codes.view(self.fmt.dtype), decode_scales[..., None]).flatten(1)
        return self._check_tags(messages, row_numel, values[:, :row_numel])

    def _seed(self, seed: int) -> int | None:
        return seed if self.stochastic else None

    def _parts(self, messages: Tensor, row_numel: int) -> tuple[Tensor, Tensor]:
        """Views: codes, uint8 ``[rows, blocks, block]``, and decode scales, fp32 ``[rows, blocks]``."""
        blocks = self.blocks(row_numel)
        codes = messages[:, : blocks * self.block].unflatten(1, (blocks, self.block))
        decode_scales = messages[:, blocks * self.block : blocks * (self.block + 4)].view(torch.float32)
        return codes, decode_scales

    def _write(self, values: Tensor, messages: Tensor, row_numel: int, seed: int) -> None:
        rows, blocks = len(values), self.blocks(row_numel)
        values = F.pad(values, (0, blocks * self.block - row_numel)).view(rows, blocks, self.block)
        codes, decode_scales = self._parts(messages, row_numel)
        amax = values.abs().amax(-1)
        finite = amax.isfinite()
        scale = compute_scale(torch.where(finite, amax.clamp(max=_MAX_AMAX), torch.nan), amax_target(self.fmt))
        decode_scales.copy_(torch.where(finite, torch.ones_like(scale) / scale, torch.nan))
        if self.stochastic:
            scaled = (values * scale[..., None]).clamp(-self.fmt.max, self.fmt.max)
            noise = uniform(seed, rows, blocks * self.block, values.device).view_as(values)
            rounded = torch.where(values.isfinite(), round_stochastically(scaled, noise, self.fmt), torch.nan)
            codes.copy_(quantize(rounded, 1.0, self.fmt).view(torch.uint8))
        else:
            codes.copy_(quantize(values, scale[..., None], self.fmt).view(torch.uint8))
        self._seal(messages, blocks * (self.block + 4), row_numel)


def amax_target(fmt: Format) -> float:
    """What a block's largest value is scaled to: the largest power of two of ``fmt``.

    Scaling it to the format's maximum instead (448) costs accuracy: measured with blocks of 128, the relative error is
    0.0257 against 0.0253 for Gaussian values, 0.0252 against 0.0234 for uniform ones, and no better for any other
    distribution tried. At a power of two the binade below it, which holds the largest errors, is used whole.
    """
    return 2.0 ** math.floor(math.log2(fmt.max))


def clear_tags(messages: Tensor) -> None:
    """Forget what a receive buffer held before, so that only what arrives can pass for a message."""
    _tags(messages).zero_()


def _tags(messages: Tensor) -> Tensor:
    return messages.view(torch.int32)[:, -1]  # Fewer operations than a slice of the bytes.


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _rows(x: Tensor, rows: int, row_numel: int) -> Tensor:
    return F.pad(x, (0, rows * row_numel - x.numel())).view(rows, row_numel)


def use_kernels(x: Tensor) -> bool:
    """Whether Triton's kernels run on the device of ``x``."""
    # A GPU build of torch brings Triton; some ship without it, and the reference runs there.
    return x.is_cuda and find_spec("triton") is not None
