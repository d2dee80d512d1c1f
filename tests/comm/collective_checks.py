"""What must hold of the collectives on every rank. Run by test_comm_collectives.py."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_checks import device, same_on_all_ranks
from torch import Tensor

from lightning_fp8.comm import BlockCodec, FP8Collectives, MessageError, Traffic
from lightning_fp8.comm.rounding import RoundingKeys
from lightning_fp8.formats import E5M2


def contribution(rank: int, numel: int = 5000, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gradient-like values whose scale changes along the tensor; other ranks can make them too."""
    generator = torch.Generator(device()).manual_seed(100 + rank)
    scale = torch.logspace(-6, 2, numel) if numel else torch.empty(0)
    return (torch.randn(numel, generator=generator) * scale).to(dtype)


def exact_sum(world: int, numel: int = 5000, dtype: torch.dtype = torch.float32) -> Tensor:
    return sum(contribution(rank, numel, dtype).double() for rank in range(world))


def relative_error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


def through(codec: BlockCodec, x: Tensor) -> Tensor:
    """What ``x`` is after one encoding."""
    out = torch.empty(x.numel())
    codec.decode(codec.encode(x.contiguous(), 1, x.numel()), x.numel(), out)
    return out


def all_reduce_gives_the_algorithms_bits(rank: int, world: int) -> None:
    codec = BlockCodec()
    chunk = codec.blocks(-(-5000 // world)) * codec.block
    expected = []
    for owner in range(world):
        # What crosses the wire is rounded once; the owner's own part is not; the sum runs from rank 0 on.
        total = torch.zeros_like(contribution(0).split(chunk)[owner])
        for other in range(world):
            part = contribution(other).split(chunk)[owner]
            total += part if other == owner else through(codec, part)
        expected.append(through(codec, total * (1 / world)))

    x = contribution(rank)
    FP8Collectives().all_reduce(x, dist.ReduceOp.AVG)
    assert torch.equal(x, torch.cat(expected))
    assert same_on_all_ranks(x)


def all_reduce_error_stays_within_bounds(rank: int, world: int) -> None:
    # 64 layers of 2048 gradients, each layer with a scale of its own, in one bucket.
    scale = torch.logspace(-7, 1, 64)[torch.randperm(64)].repeat_interleave(2048)

    def gradient(of: int) -> Tensor:
        return torch.randn(64 * 2048, generator=torch.Generator(device()).manual_seed(of)) * scale

    exact = sum(gradient(other).double() for other in range(world)) / world
    x = gradient(rank)
    FP8Collectives().all_reduce(x, dist.ReduceOp.AVG)
    assert relative_error(x, exact) <= 0.035
    layers = zip(x.view(64, 2048), exact.view(64, 2048), strict=True)
    assert max(relative_error(layer, truth) for layer, truth in layers) <= 0.04


def long_tensors_go_in_segments(rank: int, world: int) -> None:
    numel = 2 * 2**18 * world + 1000
    gradient, traffic = torch.randn(numel, generator=torch.Generator(device()).manual_seed(rank)), Traffic()
    x = gradient.clone()
    FP8Collectives(traffic=traffic).all_reduce(x)
    # Between CPUs; a GPU casts and sends everything at once.
    assert traffic.calls == (1 if x.is_cuda else 3) and traffic.sent / traffic.bf16 <= 0.52
    assert same_on_all_ranks(x)
    if x.is_cuda:
        return
    for part, whole in ((x[-1000:], gradient[-1000:].clone()), (x[: 2**18 * world], gradient[: 2**18 * world].clone())):
        FP8Collectives().all_reduce(whole)
        assert torch.equal(part, whole)


def all_reduce_takes_any_size_dtype_and_factor(rank: int, world: int) -> None:
    for numel in (0, 1, 127, 128, 129, 1000, 4096):
        x = contribution(rank, numel)
        FP8Collectives().all_reduce(x, factor=0.5)
        assert same_on_all_ranks(x)
        assert numel == 0 or relative_error(x, exact_sum(world, numel) / 2) < 0.1
    for dtype in (torch.bfloat16, torch.float16):
        x = contribution(rank, dtype=dtype).view(50, 100)
        FP8Collectives().all_reduce(x)
        assert x.dtype == dtype and same_on_all_ranks(x)
        assert relative_error(x.view(-1), exact_sum(world, dtype=dtype)) < 0.04
    x = contribution(rank)
    FP8Collectives(codec=BlockCodec(E5M2, block=64)).all_reduce(x)
    assert relative_error(x, exact_sum(world)) < 0.08


def reduce_scatter_sums_in_fp32(rank: int, world: int) -> None:
    numel = 600 * world
    output = torch.empty(600)
    FP8Collectives().reduce_scatter(output, contribution(rank, numel), dist.ReduceOp.AVG)
    expected = torch.zeros(600)
    for other in range(world):
        part = contribution(other, numel).view(world, 600)[rank]
        expected += part if other == rank else through(BlockCodec(), part)
    # The sum is not rounded again: the owner keeps it in fp32.
    assert torch.equal(output, expected * (1 / world))


def reduce_scatter_takes_uneven_and_empty_chunks(rank: int, world: int) -> None:
    sizes = [0, 700, 33, 1][:world]
    total = sum(sizes)
    for dtype in (torch.float32, torch.bfloat16):
        for min_numel, bound in ((0, 0.04), (10_000, 0.005)):
            output = torch.empty(sizes[rank], dtype=dtype)
            collectives = FP8Collectives(min_numel=min_numel)
            collectives.reduce_scatter(output, contribution(rank, total, dtype), split_sizes=sizes)
            if sizes[rank]:
                expected = exact_sum(world, total, dtype).split(sizes)[rank]
                assert relative_error(output, expected) < bound + (0.05 if sizes[rank] == 1 else 0)


def all_gather_is_the_same_everywhere(rank: int, world: int) -> None:
    for min_numel, bound in ((0, 0.03), (10_000, 0.003)):
        output = torch.empty(world, 300)
        FP8Collectives(min_numel=min_numel).all_gather(output, contribution(rank, 300))
        assert same_on_all_ranks(output)
        for other in range(world):
            assert relative_error(output[other], contribution(other, 300)) < bound

        sizes = [5, 0, 400, 130][:world]
        output = torch.empty(sum(sizes), dtype=torch.bfloat16)
        FP8Collectives(min_numel=min_numel).all_gather(output, contribution(rank, sizes[rank]), split_sizes=sizes)
        assert same_on_all_ranks(output)
        for other, part in enumerate(output.split(sizes)):
            assert sizes[other] == 0 or relative_error(part, contribution(other, sizes[other])) < bound + 0.01


def all_to_all_delivers_every_chunk(rank: int, world: int) -> None:
    output = torch.empty(200 * world)
    FP8Collectives().all_to_all(output, contribution(rank, 200 * world))
    for other in range(world):
        expected = contribution(other, 200 * world).view(world, 200)[rank]
        assert torch.equal(output.view(world, 200)[other], through(BlockCodec(), expected))

    # Rank i sends rank j a chunk of 100 * i + j values; those below 150 go in bf16.
    outgoing = [100 * rank + other for other in range(world)]
    incoming = [100 * other + rank for other in range(world)]
    x = torch.cat([contribution(7 * rank + other, size) for other, size in enumerate(outgoing)])
    output = torch.empty(sum(incoming))
    FP8Collectives(min_numel=150).all_to_all(output, x, incoming, outgoing)
    for other, part in enumerate(output.split(incoming)):
        expected = contribution(7 * other + rank, incoming[other])
        assert torch.equal(
            part, through(BlockCodec(), expected) if part.numel() >= 150 else expected.bfloat16().float()
        )


def every_byte_is_counted(rank: int, world: int) -> None:
    handed_over = 0
    send_and_receive, exchange = dist.batch_isend_irecv, dist.all_to_all_single
    # torch 2.13 renamed it.
    gather_name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather = getattr(dist, gather_name)

    def count(sent: Tensor, times: int) -> None:
        nonlocal handed_over
        assert sent.dtype == torch.uint8
        handed_over += sent.numel() * times

    def counting_sends(operations):
        for operation in operations:
            assert operation.group_peer != rank
            count(operation.tensor, operation.op is dist.isend)
        return send_and_receive(operations)

    def counting_exchange(received, messages, *sizes, **options):
        own = sizes[1][rank] if sizes else messages.numel() // world
        count(messages[own:], 1)
        return exchange(received, messages, *sizes, **options)

    def counting_gather(messages, message, **options):
        count(message, world - 1)
        return gather(messages, message, **options)

    traffic = Traffic()
    collectives = FP8Collectives(traffic=traffic)
    numel = 128 * world * 40
    with (
        mock.patch.object(dist, "batch_isend_irecv", counting_sends),
        mock.patch.object(dist, "all_to_all_single", counting_exchange),
        mock.patch.object(dist, gather_name, counting_gather),
    ):
        collectives.all_reduce(contribution(rank, numel))
        assert traffic.sent == handed_over
        assert traffic.bf16 == 2 * (world - 1) * numel * 2 // world
        assert traffic.sent / traffic.bf16 <= 0.52

        traffic, handed_over = Traffic(), 0
        collectives = FP8Collectives(traffic=traffic)
        collectives.reduce_scatter(torch.empty(numel // world), contribution(rank, numel))
        collectives.all_gather(torch.empty(numel), contribution(rank, numel // world))
        collectives.all_to_all(torch.empty(numel), contribution(rank, numel))
        assert traffic.sent == handed_over and traffic.calls == 3
        assert traffic.bf16 == 3 * (world - 1) * numel * 2 // world
        assert traffic.sent / traffic.bf16 <= 0.52


def one_ranks_nan_reaches_all(rank: int, world: int) -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        for min_numel in (0, 10_000):
            x = contribution(rank)
            if rank == world - 1:
                x[1000] = bad
            FP8Collectives(min_numel=min_numel).all_reduce(x)
            assert not x[1000].isfinite()
            if min_numel == 0:
                # The block goes, the rest stays.
                assert x[1000].isnan() and x.isfinite().sum() >= 5000 - 128
            gathered = torch.empty(world, 200)
            y = contribution(rank, 200)
            y[3] = bad if rank == 0 else 1.0
            FP8Collectives().all_gather(gathered, y)
            assert gathered[0, 3].isnan() and gathered[1:].isfinite().all()


def small_tensors_go_in_bf16(rank: int, world: int) -> None:
    traffic = Traffic()
    x = contribution(rank, 999)
    no_fp8 = mock.Mock(side_effect=AssertionError("no FP8 here"))
    with mock.patch.multiple(dist, batch_isend_irecv=no_fp8, all_to_all_single=no_fp8):
        FP8Collectives(min_numel=1000, traffic=traffic).all_reduce(x, dist.ReduceOp.AVG)
    assert traffic.sent == traffic.bf16 > 0
    assert same_on_all_ranks(x)
    assert relative_error(x, exact_sum(world, 999) / world) < 0.006


def async_calls_overlap_and_finish_in_order(rank: int, world: int) -> None:
    expected, tensors = [], [contribution(rank, numel) for numel in (3000, 5000, 50)]
    for x in tensors:
        y = x.clone()
        FP8Collectives(min_numel=100).all_reduce(y)
        expected.append(y)
    collectives = FP8Collectives(min_numel=100)
    handles = [collectives.all_reduce(x, async_op=True) for x in tensors]
    for handle in handles:
        handle.wait()
        handle.wait()
    assert all(torch.equal(x, y) for x, y in zip(tensors, expected, strict=True))


def groups_do_not_meet(rank: int, world: int) -> None:
    pair, solo = dist.new_group([0, world - 1]), [dist.new_group([other]) for other in range(world)]
    x = contribution(rank)
    everyone = FP8Collectives().all_reduce(x, async_op=True)
    if rank in (0, world - 1):
        y = contribution(rank)
        FP8Collectives(pair).all_reduce(y)
        assert relative_error(y, contribution(0).double() + contribution(world - 1).double()) < 0.04
    everyone.wait()
    assert relative_error(x, exact_sum(world)) < 0.04

    # Alone in a group there is nothing to send and nothing to lose.
    alone = FP8Collectives(solo[rank])
    z, traffic = contribution(rank, 256), alone.traffic
    alone.all_reduce(z, factor=2.0)
    output = torch.empty(256)
    alone.reduce_scatter(output, z, dist.ReduceOp.AVG)
    alone.all_gather(z, output)
    alone.all_to_all(output, z)
    assert torch.equal(output, contribution(rank, 256) * 2) and traffic.sent == 0


def another_codec_on_one_rank_is_an_error_on_all(rank: int, world: int) -> None:
    codec = BlockCodec(E5M2) if rank == 1 else BlockCodec()
    x = torch.empty(world * 256)
    handle = FP8Collectives(codec=codec).all_gather(x, contribution(rank, 256), async_op=True)
    if device().type == "cuda":  # Nobody looks there, but what the wrong message says is not believed.
        handle.wait()
        wrong = x.view(world, 256).isnan().all(1).tolist()
        assert wrong == [(other == 1) != (rank == 1) for other in range(world)]
        return
    with pytest.raises(MessageError, match="same shape, block size, format"):
        handle.wait()
    with pytest.raises(MessageError):
        handle.wait()


def error_feedback_makes_up_for_both_roundings(rank: int, world: int) -> None:
    steps, exact = 40, exact_sum(world) / world
    for dtype in (torch.float32, torch.bfloat16):
        collectives = FP8Collectives()
        residual = torch.zeros(5000, dtype=dtype)
        with_feedback, without = torch.zeros(5000), torch.zeros(5000)
        for _ in range(steps):
            x = contribution(rank)
            collectives.all_reduce(x, dist.ReduceOp.AVG, residual=residual)
            with_feedback += x
            y = contribution(rank)
            collectives.all_reduce(y, dist.ReduceOp.AVG)
            without += y
            assert same_on_all_ranks(x)
        # What was lost so far is what the residuals hold: it does not grow, so the mean comes out right.
        assert relative_error(with_feedback / steps, exact) < relative_error(without / steps, exact) / 10
        total = residual.float()
        dist.all_reduce(total)
        if dtype == torch.float32:
            assert relative_error(with_feedback + total / world, exact * steps) < 1e-5


def small_tensors_use_up_their_residual(rank: int, world: int) -> None:
    x, residual = torch.full((100,), 1.0), torch.full((100,), 0.5 + 2.0**-12)
    FP8Collectives(min_numel=1000).all_reduce(x, residual=residual)
    assert torch.equal(x, torch.full((100,), 1.5 * world))
    assert torch.equal(residual, torch.full((100,), 2.0**-12))


def bad_values_leave_no_residual(rank: int, world: int) -> None:
    residual = torch.zeros(1000)
    x = contribution(rank, 1000)
    x[5] = float("nan") if rank == 0 else x[5]
    FP8Collectives().all_reduce(x, residual=residual)
    assert x[5].isnan() and residual.isfinite().all() and residual[200:].abs().max() > 0


def stochastic_rounding_is_unbiased_and_repeats(rank: int, world: int) -> None:
    collectives = FP8Collectives(codec=BlockCodec(stochastic=True), keys=RoundingKeys(5))
    results = []
    for _ in range(200):
        x = contribution(rank, 1000)
        collectives.all_reduce(x)
        results.append(x)
    assert same_on_all_ranks(results[0]) and not torch.equal(results[0], results[1])
    assert relative_error(torch.stack(results).mean(0), exact_sum(world, 1000)) < 0.01
    again = contribution(rank, 1000)
    FP8Collectives(codec=BlockCodec(stochastic=True), keys=RoundingKeys(5)).all_reduce(again)
    assert torch.equal(again, results[0])


def mistakes_are_refused_before_anything_is_sent(rank: int, world: int) -> None:
    collectives = FP8Collectives()
    ones = torch.ones(4 * world)
    with pytest.raises(ValueError, match="not torch"):
        collectives.all_reduce(torch.ones(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="contiguous"):
        collectives.all_reduce(torch.ones(4, 4).T[:2])
    with pytest.raises(ValueError, match="Only ReduceOp"):
        collectives.all_reduce(ones, dist.ReduceOp.MAX)
    with pytest.raises(ValueError, match="residual must be flat"):
        collectives.all_reduce(ones, residual=torch.ones(3))
    with pytest.raises(ValueError, match="give split sizes"):
        collectives.reduce_scatter(torch.ones(4), torch.ones(4 * world + 1))
    with pytest.raises(ValueError, match="this rank's chunk"):
        collectives.reduce_scatter(torch.ones(5), ones)
    with pytest.raises(ValueError, match="do not cut"):
        collectives.all_gather(ones, torch.ones(4), split_sizes=[4] * (world + 1))
    assert collectives.traffic.calls == 0


CHECKS = [
    all_reduce_gives_the_algorithms_bits,
    all_reduce_error_stays_within_bounds,
    long_tensors_go_in_segments,
    all_reduce_takes_any_size_dtype_and_factor,
    reduce_scatter_sums_in_fp32,
    reduce_scatter_takes_uneven_and_empty_chunks,
    all_gather_is_the_same_everywhere,
    all_to_all_delivers_every_chunk,
    every_byte_is_counted,
    one_ranks_nan_reaches_all,
    small_tensors_go_in_bf16,
    async_calls_overlap_and_finish_in_order,
    groups_do_not_meet,
    another_codec_on_one_rank_is_an_error_on_all,
    error_feedback_makes_up_for_both_roundings,
    small_tensors_use_up_their_residual,
    bad_values_leave_no_residual,
    stochastic_rounding_is_unbiased_and_repeats,
    mistakes_are_refused_before_anything_is_sent,
]
