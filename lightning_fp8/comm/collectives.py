"""Collectives that send FP8 and sum in fp32.

A sum of FP8 numbers cannot be left to the backend: it would round at every hop and saturate silently. Here, as in
ZeRO++'s all-to-all-based gradient reduction (Wang et al., 2023), every contribution is rounded once and the sum once:

1. Cut the tensor into one chunk per rank and encode each chunk as a message (block scales, non-finite blocks as NaN).
2. Exchange the messages (all-to-all): every rank holds all contributions to its own chunk.
3. Decode and sum them in fp32, rank 0 first, whatever the order of arrival. A rank's own contribution crossed no wire
   and enters unrounded. *Reduce-scatter ends here.*
4. Encode the sum and gather the messages of all ranks.
5. Every rank, the owner too, takes the decoded values, so that replicas stay bitwise equal. *All-reduce ends here.*

The error does not grow with the number of ranks and nothing overflows on the way. Messages travel as bytes: between
CPUs from rank to rank (``isend`` and ``irecv``), elsewhere by the backend's all-to-all and all-gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fp8.comm.codec import BF16Codec, BlockCodec, clear_tags
from lightning_fp8.comm.handle import Handle, Waitable, WorkList
from lightning_fp8.comm.rounding import RoundingKeys
from lightning_fp8.comm.traffic import Traffic
from lightning_fp8.ranks import all_gather

#: What can be sent.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_BF16 = BF16Codec()
_BF16_BYTES = 2
# Between CPUs an all-reduce goes in segments of this many values per rank, so that casts and wire overlap.
_SEGMENT_CHUNK = 2**18


class FP8Collectives:
    """Collectives over one process group.

    Every rank of the group calls the same methods with the same shapes in the same order, as with any collective.
    Tensors are fp32, bf16 or fp16 and contiguous. With ``async_op`` the tensors must be left alone until the handle
    has been waited for; without it the handle comes back finished.

    Args:
        group: the ranks; ``None`` means all.
        codec: how values become bytes.
        min_numel: tensors with fewer values go in bf16 (an all-reduce is then left to the backend). The size that
            counts is the whole tensor's before a reduction or after a gather, and each chunk's in an all-to-all.
        traffic: counts the bytes.
        keys: for stochastic rounding; by default its own.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        codec: BlockCodec | None = None,
        min_numel: int = 0,
        traffic: Traffic | None = None,
        keys: RoundingKeys | None = None,
    ) -> None:
        self.group = group
        self.codec = codec or BlockCodec()
        self.min_numel = min_numel
        self.traffic = Traffic() if traffic is None else traffic
        self.keys = RoundingKeys() if keys is None else keys
        self._stream: torch.cuda.Stream | None = None

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return dist.get_rank(self.group)

    def all_reduce(
        self,
        tensor: Tensor,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        factor: float = 1.0,
        residual: Tensor | None = None,
        async_op: bool = False,
    ) -> Handle:
        """Replace ``tensor`` by the sum or mean over the ranks, bitwise the same on all of them.

        Args:
            tensor: any shape.
            op: ``ReduceOp.SUM`` or ``ReduceOp.AVG``.
            factor: multiplies the fp32 result before it is rounded; not zero.
            residual: flat, as long as ``tensor``: error feedback (Seide et al., 2014). It is added to what this rank
                sends and then overwritten with what rounding took away, this rank's share of the second rounding
                included. Non-finite values leave no residual.
            async_op: return at once.

        Raises:
            ValueError: a tensor or ``op`` that cannot be used.
        """
        _check(tensor)
        if residual is not None and residual.shape != (tensor.numel(),):
            raise ValueError(f"The residual must be flat with {tensor.numel()} values, not {tuple(residual.shape)}.")
        factor = self._factor(op, factor)
        flat = tensor.view(-1)
        if self.world_size == 1 or tensor.numel() == 0:
            flat.mul_(factor)
            return Handle(iter(()))
        if tensor.numel() < self.min_numel:
            return self._start(self._bf16_all_reduce(flat, factor, residual), tensor, async_op)
        size = flat.numel() if tensor.is_cuda else _SEGMENT_CHUNK * self.world_size
        parts = flat.split(size)
        residuals = [None] * len(parts) if residual is None else residual.split(size)
        segments = [self._fp8_all_reduce(part, factor, lost) for part, lost in zip(parts, residuals, strict=True)]
        return self._start(_pipeline(segments), tensor, async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        factor: float = 1.0,
        split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Handle:
        """Write this rank's chunk of the sum or mean over the ranks into ``output``.

        Args:
            output: this rank's chunk, any shape.
            input: all chunks, rank 0's first.
            op: ``ReduceOp.SUM`` or ``ReduceOp.AVG``.
            factor: multiplies the fp32 result.
            split_sizes: values in each rank's chunk, the same list on every rank; ``None`` means equal chunks.
            async_op: return at once.

        Raises:
            ValueError: a tensor or ``op`` that cannot be used, or sizes that do not fit.
        """
        _check(output, input)
        sizes = self._sizes(split_sizes, input.numel(), "input")
        self._check_own(output, sizes, "output")
        factor = self._factor(op, factor)
        if self.world_size == 1:
            output.view(-1).copy_(input.view(-1).float() * factor)
            return Handle(iter(()))
        return self._start(self._reduce_scatter(output.view(-1), input.view(-1), sizes, factor), input, async_op)

    def all_gather(
        self,
        output: Tensor,
        input: Tensor,
        split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Handle:
        """Write the chunks of all ranks into ``output``, bitwise the same on all of them.

        Args:
            output: all chunks, rank 0's first.
            input: this rank's chunk, any shape.
            split_sizes: values in each rank's chunk, the same list on every rank; ``None`` means equal chunks. What
                is sent is padded to the longest.
            async_op: return at once.

        Raises:
            ValueError: a tensor that cannot be used, or sizes that do not fit.
        """
        _check(output, input)
        sizes = self._sizes(split_sizes, output.numel(), "output")
        self._check_own(input, sizes, "input")
        if self.world_size == 1:
            output.view(-1).copy_(input.view(-1))
            return Handle(iter(()))
        return self._start(self._all_gather(output.view(-1), input.view(-1), sizes), output, async_op)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Handle:
        """Send chunk ``i`` of ``input`` to rank ``i``; chunk ``i`` of ``output`` comes from rank ``i``.

        Args:
            output: what arrives, rank 0's chunk first.
            input: what leaves, rank 0's chunk first.
            output_split_sizes: values that each rank sends here; ``None`` means equal chunks.
            input_split_sizes: values to send to each rank; ``None`` means equal chunks.
            async_op: return at once.

        Raises:
            ValueError: a tensor that cannot be used, or sizes that do not fit.
        """
        _check(output, input)
        incoming = self._sizes(output_split_sizes, output.numel(), "output")
        outgoing = self._sizes(input_split_sizes, input.numel(), "input")
        if self.world_size == 1:
            output.view(-1).copy_(input.view(-1))
            return Handle(iter(()))
        return self._start(self._all_to_all(output.view(-1), input.view(-1), incoming, outgoing), input, async_op)

    # Phases: each generator starts one backend collective per ``yield`` and goes on when it has arrived.

    def _fp8_all_reduce(self, flat: Tensor, factor: float, residual: Tensor | None) -> Iterator[Waitable]:
        ranks, codec = self.world_size, self.codec
        chunk = codec.blocks(-(-flat.numel() // ranks)) * codec.block
        mine = slice(self.rank * chunk, (self.rank + 1) * chunk)
        values = flat if residual is None else flat + residual
        messages = codec.encode(values, ranks, chunk, self._next_seed(stage=0))
        own = values[mine]
        lost = None if residual is None else values.float() - self._decoded(messages, chunk, flat.numel())

        received = _empty_messages(ranks, messages.shape[1], flat)
        byte_sizes = [messages.shape[1]] * ranks
        yield self._exchange(received, messages, byte_sizes, byte_sizes, even=True)
        self._verify(received, chunk, codec)
        if lost is None:
            message = codec.reduce_encode(received, chunk, factor, own, self.rank, self._next_seed(stage=1))
        else:
            total = torch.empty(chunk, dtype=torch.float32, device=flat.device)
            codec.reduce(received, chunk, total, factor, own, self.rank)
            message = codec.encode(total, 1, chunk, self._next_seed(stage=1))
            # Its own chunk a rank sums unrounded, but it rounds the result.
            lost[mine] = ((total - self._decoded(message, chunk, chunk)) / factor)[: own.numel()]

        clear_tags(messages)
        yield self._gather(messages, message)
        self._verify(messages, chunk, codec)
        codec.decode(messages, chunk, flat)
        if residual is not None and lost is not None:
            residual.copy_(lost.nan_to_num_(0.0, 0.0, 0.0))
        others = ranks - 1
        self.traffic.record(2 * others * message.numel(), 2 * others * flat.numel() * _BF16_BYTES // ranks)

    def _bf16_all_reduce(self, flat: Tensor, factor: float, residual: Tensor | None) -> Iterator[Waitable]:
        values = flat if residual is None else flat + residual
        rounded = values.to(torch.bfloat16, copy=True)
        if residual is not None:
            residual.copy_((values.float() - rounded).nan_to_num_(0.0, 0.0, 0.0))
        yield dist.all_reduce(rounded, group=self.group, async_op=True)
        flat.copy_(rounded.float() * factor)
        sent = 2 * (self.world_size - 1) * flat.numel() * _BF16_BYTES // self.world_size
        self.traffic.record(sent, sent)

    def _reduce_scatter(self, output: Tensor, input: Tensor, sizes: list[int], factor: float) -> Iterator[Waitable]:
        codec = self._codec(input.numel())
        messages, byte_sizes = self._encode_chunks(input, sizes, [codec] * len(sizes))
        received = _empty_messages(self.world_size, codec.message_bytes(output.numel()), input)
        incoming_bytes = [received.shape[1]] * len(sizes)
        yield self._exchange(received, messages, incoming_bytes, byte_sizes, even=len(set(sizes)) == 1)
        self._verify(received, output.numel(), codec)
        own = input.split(sizes)[self.rank]
        codec.reduce(received, output.numel(), output, factor, own, self.rank)
        sent = messages.numel() - byte_sizes[self.rank]
        self.traffic.record(sent, (input.numel() - output.numel()) * _BF16_BYTES)

    def _all_gather(self, output: Tensor, input: Tensor, sizes: list[int]) -> Iterator[Waitable]:
        codec, longest = self._codec(output.numel()), max(sizes)
        message = codec.encode(input, 1, longest, self._next_seed(stage=0))
        messages = _empty_messages(self.world_size, message.shape[1], input)
        yield self._gather(messages, message)
        self._verify(messages, longest, codec)
        if min(sizes) == longest:
            codec.decode(messages, longest, output)
        else:
            for row, values in zip(messages.split(1), output.split(sizes), strict=True):
                codec.decode(row, longest, values)
        others = self.world_size - 1
        # A ring forwards every other rank's chunk once.
        self.traffic.record(others * message.numel(), others * output.numel() * _BF16_BYTES // self.world_size)

    def _all_to_all(
        self, output: Tensor, input: Tensor, incoming: list[int], outgoing: list[int]
    ) -> Iterator[Waitable]:
        # Both ends of a chunk know its size, and no rank knows all sizes: so each chunk is judged by itself.
        messages, byte_sizes = self._encode_chunks(input, outgoing, [self._codec(size) for size in outgoing])
        incoming_bytes = [self._codec(size).message_bytes(size) for size in incoming]
        received = torch.empty(sum(incoming_bytes), dtype=torch.uint8, device=input.device)
        rows = [row[None] for row in received.split(incoming_bytes)]
        for row in rows:
            clear_tags(row)
        yield self._exchange(received, messages, incoming_bytes, byte_sizes, even=False)
        for row, values in zip(rows, output.split(incoming), strict=True):
            codec = self._codec(values.numel())
            self._verify(row, values.numel(), codec)
            codec.decode(row, values.numel(), values)
        sent = messages.numel() - byte_sizes[self.rank]
        self.traffic.record(sent, (input.numel() - outgoing[self.rank]) * _BF16_BYTES)

    def _encode_chunks(
        self, input: Tensor, sizes: list[int], codecs: Sequence[BlockCodec | BF16Codec]
    ) -> tuple[Tensor, list[int]]:
        """The messages to all ranks, one behind the other, and their lengths."""
        if len(set(sizes)) == 1:
            messages = codecs[0].encode(input, len(sizes), sizes[0], self._next_seed(stage=0))
            return messages.view(-1), [messages.shape[1]] * len(sizes)
        rows = [
            codec.encode(chunk, 1, chunk.numel(), self._next_seed(stage=0))[0]
            for codec, chunk in zip(codecs, input.split(sizes), strict=True)
        ]
        return torch.cat(rows), [row.numel() for row in rows]

    def _decoded(self, messages: Tensor, row_numel: int, numel: int) -> Tensor:
        values = torch.empty(numel, dtype=torch.float32, device=messages.device)
        self.codec.decode(messages, row_numel, values)
        return values

    def _exchange(
        self, received: Tensor, messages: Tensor, incoming_bytes: list[int], outgoing_bytes: list[int], even: bool
    ) -> Waitable:
        """Begin to send each rank its message; ``even``: all messages between all ranks are equally long."""
        received, messages = received.view(-1), messages.view(-1)
        if messages.device.type == "cpu":
            return self._swap(received.split(incoming_bytes), messages.split(outgoing_bytes))
        if even:  # Without sizes the backend has less to look at.
            return dist.all_to_all_single(received, messages, group=self.group, async_op=True)
        return dist.all_to_all_single(
            received, messages, incoming_bytes, outgoing_bytes, group=self.group, async_op=True
        )

    def _gather(self, messages: Tensor, message: Tensor) -> Waitable:
        if messages.device.type == "cpu":
            return self._swap(messages.unbind(), [message.view(-1)] * self.world_size)
        return all_gather(messages.view(-1), message.view(-1), self.group)

    def _swap(self, incoming: Sequence[Tensor], outgoing: Sequence[Tensor]) -> Waitable:
        """Send one message to each rank and receive one from each.

        All receives are posted before any send. gloo's own all-to-all sends first, and what tells the peer that it may
        send then waits behind the payload: the two directions of a link take turns instead of running at once.
        """
        incoming[self.rank].copy_(outgoing[self.rank])
        group = self.group if self.group is not None else dist.group.WORLD
        peers = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        receives = [dist.P2POp(dist.irecv, incoming[peer], group=group, group_peer=peer) for peer in peers]
        sends = [dist.P2POp(dist.isend, outgoing[peer], group=group, group_peer=peer) for peer in peers]
        return WorkList(dist.batch_isend_irecv(receives + sends))

    def _verify(self, messages: Tensor, row_numel: int, codec: BlockCodec | BF16Codec) -> None:
        # Reading tags from a GPU would stop the host; there a wrong message decodes to NaN, which health checks see.
        if messages.device.type == "cpu":
            codec.verify(messages, row_numel)

    def _codec(self, numel: int) -> BlockCodec | BF16Codec:
        return self.codec if numel >= self.min_numel else _BF16

    def _next_seed(self, stage: int) -> int:
        # By the rank among all: replicas of a shard are in different groups, and round different gradients.
        return self.keys.next(dist.get_rank(), stage)

    def _factor(self, op: dist.ReduceOp | dist.ReduceOp.RedOpType, factor: float) -> float:
        if op == dist.ReduceOp.SUM:
            return factor
        if op == dist.ReduceOp.AVG:
            return factor / self.world_size
        raise ValueError(f"Only ReduceOp.SUM and ReduceOp.AVG can be sent in FP8, not {op}.")

    def _sizes(self, split_sizes: Sequence[int] | None, numel: int, name: str) -> list[int]:
        ranks = self.world_size
        if split_sizes is None:
            if numel % ranks:
                raise ValueError(f"{name}'s {numel} values cannot be cut evenly for {ranks} ranks: give split sizes.")
            return [numel // ranks] * ranks
        if len(split_sizes) != ranks or sum(split_sizes) != numel or min(split_sizes) < 0:
            raise ValueError(f"Split sizes {list(split_sizes)} do not cut {name}'s {numel} values for {ranks} ranks.")
        return list(split_sizes)

    def _check_own(self, tensor: Tensor, sizes: list[int], name: str) -> None:
        if tensor.numel() != sizes[self.rank]:
            raise ValueError(f"{name} has {tensor.numel()} values; this rank's chunk has {sizes[self.rank]}.")

    def _start(self, phases: Iterator[Waitable], tensor: Tensor, async_op: bool) -> Handle:
        if not (async_op and tensor.is_cuda):
            handle = Handle(phases)
            if not async_op:
                handle.wait()
            return handle
        # One stream for all calls: memory that one frees on it is the next one's.
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            handle = Handle(phases)
            handle.finish_on(self._stream)
        return handle


def _pipeline(segments: Sequence[Iterator[Waitable]]) -> Iterator[Waitable]:
    """Take all segments through their first phase, then all through the next: one is cast while others travel."""
    under_way = [(next(segment), segment) for segment in segments]
    while under_way:
        coming = []
        for work, segment in under_way:
            yield work
            following = next(segment, None)
            if following is not None:
                coming.append((following, segment))
        under_way = coming


def _empty_messages(rows: int, message_bytes: int, like: Tensor) -> Tensor:
    messages = torch.empty(rows, message_bytes, dtype=torch.uint8, device=like.device)
    clear_tags(messages)
    return messages


def _check(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise ValueError(f"FP8 collectives take fp32, bf16 and fp16 tensors, not {tensor.dtype}.")
        if not tensor.is_contiguous():
            raise ValueError("FP8 collectives take contiguous tensors: call .contiguous() first.")
