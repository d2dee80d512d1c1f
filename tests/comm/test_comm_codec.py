from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_fp8.comm import BlockCodec, MessageError
from lightning_fp8.comm.codec import BF16Codec
from lightning_fp8.comm.rounding import philox, round_stochastically, uniform
from lightning_fp8.formats import E4M3, E5M2, E8M0, Format

formats = st.sampled_from([E4M3, E5M2])
codecs = st.builds(BlockCodec, formats, st.sampled_from([16, 32, 128, 1024]), st.booleans())
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
values = st.lists(st.floats(width=32), max_size=300)
sums = settings(max_examples=60)


def through(codec: BlockCodec | BF16Codec, x: Tensor, rows: int = 1, seed: int = 0) -> Tensor:
    row_numel = -(-x.numel() // rows)
    out = torch.empty_like(x)
    codec.decode(codec.encode(x, rows, row_numel, seed), row_numel, out)
    return out


def blocks_of(codec: BlockCodec, x: Tensor) -> tuple[Tensor, ...]:
    return x.split(codec.block) if x.numel() else ()


@sums
@given(codecs, values, dtypes, st.integers(0, 2**64 - 1))
def test_finite_blocks_come_back_within_half_a_step(codec, numbers, dtype, seed):
    x = torch.tensor(numbers, dtype=dtype)
    # One more neighbour may be chosen when rounding stochastically, and fp32 scales round a little themselves.
    steps = (1.0 if codec.stochastic else 0.5) * 1.001
    y = through(codec, x.float(), seed=seed)
    for before, after in zip(blocks_of(codec, x.float()), blocks_of(codec, y), strict=True):
        if not before.isfinite().all():
            assert after.isnan().all()
            continue
        assert after.isfinite().all()
        amax = before.abs().max().double().item()
        if amax >= 2.0**127:
            assert torch.equal(after.sign() * (after != 0), before.sign() * (after != 0))
            continue
        relative = before.double().abs() * 2.0**-codec.fmt.mantissa_bits * steps
        # Below the smallest normal code, the step is that of the subnormals.
        target = 2.0 ** math.floor(math.log2(codec.fmt.max))
        absolute = max(amax, target * 2.0**-126) / target * codec.fmt.smallest_subnormal * steps
        assert ((after.double() - before.double()).abs() <= torch.clamp(relative, min=absolute) + 2.0**-149).all()


@sums
@given(codecs, values, st.integers(1, 5))
def test_a_message_depends_on_its_row_alone(codec, numbers, rows):
    x = torch.tensor(numbers, dtype=torch.float32)
    row_numel = -(-x.numel() // rows)
    whole = codec.encode(x, rows, row_numel)
    assert whole.shape == (rows, codec.message_bytes(row_numel)) and whole.dtype == torch.uint8
    if not codec.stochastic:
        for row, chunk in enumerate(torch.nn.functional.pad(x, (0, rows * row_numel - x.numel())).view(rows, -1)):
            assert torch.equal(codec.encode(chunk, 1, row_numel)[0], whole[row])


@sums
@given(codecs, st.integers(0, 10**7))
def test_message_length(codec, numel):
    size = codec.message_bytes(numel)
    assert size % 16 == 0
    assert numel * (1 + 4 / codec.block) <= size <= (numel + codec.block) * (1 + 4 / codec.block) + 20


@sums
@given(codecs, st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=200), st.integers(1, 4), st.booleans())
def test_reducing_is_decoding_and_summing_in_row_order(codec, numbers, rows, with_own):
    x = torch.tensor(numbers * rows)
    numel = len(numbers)
    messages = codec.encode(x, rows, numel)
    own = torch.arange(float(numel)) if with_own else None
    total = torch.zeros(numel)
    for row, values in enumerate(codec.decode_rows(messages, numel)):
        total += own if own is not None and row == rows - 1 else values
    total = total * 0.3
    out = torch.empty(numel)
    codec.reduce(messages, numel, out, 0.3, own, rows - 1)
    assert torch.equal(out, total)
    message = codec.reduce_encode(messages, numel, 0.3, own, rows - 1, seed=3)
    assert torch.equal(message, codec.encode(total, 1, numel, seed=3))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_a_bad_value_spoils_its_block_and_no_other(fmt: Format, bad: float) -> None:
    x = torch.ones(1000)
    x[300] = bad
    y = through(BlockCodec(fmt), x)
    assert y[256:384].isnan().all()
    y[256:384] = 1.0
    assert torch.equal(y, torch.ones(1000))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_zero_tiny_and_huge_blocks(fmt: Format) -> None:
    codec = BlockCodec(fmt, 16)
    assert torch.equal(through(codec, torch.zeros(40)), torch.zeros(40))
    for amax in (2.0**-149, 1e-40, 2.0**-126, 1e-20, 1.0, 1e38, torch.finfo(torch.float32).max):
        y = through(codec, torch.full((16,), amax))
        assert y.isfinite().all()
        # Subnormals lie below what the largest scale reaches; at the very top values saturate at half of fp32's range.
        if 2.0**-126 <= amax < 2.0**127:
            torch.testing.assert_close(y, torch.full((16,), amax), rtol=1e-6, atol=0.0)


def simulate(world: int, codec: BlockCodec, common: float = 0.0) -> tuple[float, list[float]]:
    """Relative error of the mean over simulated ranks: of a bucket of 64 layers of mixed scale, and of each layer."""
    generator = torch.Generator().manual_seed(world)
    layers, size = 64, 2048
    scale = torch.logspace(-7, 1, layers)[torch.randperm(layers, generator=generator)].repeat_interleave(size)
    shared = common * torch.randn(layers * size, generator=generator)
    gradients = [(torch.randn(layers * size, generator=generator) + shared) * scale for _ in range(world)]
    exact = sum(gradient.double() for gradient in gradients) / world

    chunk = layers * size // world
    sent = [codec.encode(gradient, world, chunk) for gradient in gradients]
    result = torch.empty(layers * size)
    for rank in range(world):
        received, own = torch.stack([messages[rank] for messages in sent]), gradients[rank].split(chunk)[rank]
        message = codec.reduce_encode(received, chunk, 1 / world, own, rank)
        codec.decode(message, chunk, result.split(chunk)[rank])
    error = (result - exact).view(layers, size)
    by_layer = error.norm(dim=1) / exact.view(layers, size).norm(dim=1)
    return float(error.norm() / exact.norm()), by_layer.tolist()


@pytest.mark.parametrize("common", [0.0, 1.0], ids=["independent", "correlated"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_error_of_a_mixed_scale_bucket(world: int, common: float) -> None:
    error, by_layer = simulate(world, BlockCodec(), common)
    assert error <= 0.035
    assert max(by_layer) <= 0.04


def test_one_scale_per_bucket_would_lose_layers() -> None:
    # The same bucket with a single scale: what the blocks are for.
    scale = torch.logspace(-7, 1, 64).repeat_interleave(2048)
    bucket = torch.randn(64 * 2048, generator=torch.Generator().manual_seed(0)) * scale
    factor = 448 / bucket.abs().max()
    flushed = (bucket * factor).to(E4M3.dtype).float() / factor
    assert (flushed[:2048] == 0).all()
    y = through(BlockCodec(), bucket)
    assert (y[:2048] - bucket[:2048]).norm() / bucket[:2048].norm() < 0.03


def test_a_message_for_another_shape_is_noticed() -> None:
    codec = BlockCodec()
    messages = codec.encode(torch.ones(512), 2, 256)
    codec.verify(messages, 256)
    with pytest.raises(MessageError, match=r"ranks \[0, 1\]"):
        codec.verify(messages, 255)
    with pytest.raises(MessageError):
        BlockCodec(E5M2).verify(messages, 256)
    # A cut one: the end of the buffer, with the tag, never came.
    messages[1, -4:] = 0
    with pytest.raises(MessageError, match=r"ranks \[1\]"):
        codec.verify(messages, 256)
    out = torch.empty(512)
    codec.decode(messages, 256, out)
    assert torch.equal(out[:256], torch.ones(256)) and out[256:].isnan().all()


def test_bf16_messages_hold_bf16() -> None:
    x = torch.randn(300)
    x[7] = math.inf
    codec = BF16Codec()
    assert codec.message_bytes(300) == 608
    assert torch.equal(through(codec, x, rows=2), x.bfloat16().float())
    with pytest.raises(MessageError):
        codec.verify(codec.encode(x, 1, 300), 301)


def test_settings_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(ValueError, match="power of two"):
        BlockCodec(block=100)
    with pytest.raises(ValueError, match="E4M3 or E5M2"):
        BlockCodec(E8M0)


def test_philox_gives_the_published_words() -> None:
    # Known answers that come with Random123 (kat_vectors, philox4x32, 10 rounds).
    zero, ones = torch.zeros(1, dtype=torch.int64), torch.full((1,), 0xFFFFFFFF)
    assert philox(0, (zero, zero, zero, zero)).item() == 0x6627E8D5
    assert philox(2**64 - 1, (ones, ones, ones, ones)).item() == 0x408F276D
    counter = tuple(torch.tensor([word]) for word in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344))
    assert philox(0x299F31D0_A4093822, counter).item() == 0xD16CFE09


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_stochastic_rounding_keeps_grid_values_and_the_mean(fmt: Format) -> None:
    grid = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    grid = grid[grid.isfinite()]
    noise = uniform(1, 1, grid.numel(), grid.device)[0]
    assert torch.equal(round_stochastically(grid, noise, fmt), grid)

    x = torch.tensor([1.03, -0.3, 200.0, fmt.smallest_subnormal * 0.3, -fmt.smallest_normal * 1.01])
    noise = uniform(2, 20_000, x.numel(), x.device)
    rounded = round_stochastically(x.expand(20_000, -1), noise, fmt)
    assert torch.isin(rounded, grid).all()
    for column, value in zip(rounded.double().unbind(1), x.double(), strict=True):
        assert column.unique().numel() == 2
        assert (column.mean() - value).abs() < 4 * column.std() / math.sqrt(20_000)


def test_uniform_noise_is_uniform_and_differs_by_row_and_seed() -> None:
    noise = uniform(7, 4, 50_000, torch.device("cpu"))
    assert noise.min() >= 0 and noise.max() < 1
    assert (noise.mean(1) - 0.5).abs().max() < 0.01 and (noise.var(1) - 1 / 12).abs().max() < 0.002
    assert noise.unique(dim=0).shape[0] == 4
    assert not torch.equal(noise, uniform(8, 4, 50_000, noise.device))
    assert not torch.equal(noise, uniform(7 + 2**32, 4, 50_000, noise.device))
