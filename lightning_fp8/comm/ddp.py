"""FP8 gradient all-reduce as a communication hook for ``DistributedDataParallel``.

    state = FP8GradientState(min_numel=2**16)
    ddp_model.register_comm_hook(state, fp8_gradient_hook)

DDP calls the hook once per bucket and backward, in the order of the buckets, and not at all under ``no_sync``; what
reaches the hook after accumulation is the accumulated gradient.
"""

# No postponed annotations here: DDP compares the hook's annotations with the classes themselves.
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_fp8.comm.codec import BlockCodec
from lightning_fp8.comm.collectives import DTYPES, FP8Collectives
from lightning_fp8.comm.handle import Handle
from lightning_fp8.comm.rounding import RoundingKeys
from lightning_fp8.comm.traffic import Traffic


def fp8_gradient_hook(state: "FP8GradientState", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks: FP8 on the wire, fp32 sums, the same bits on every rank.

    For ``model.register_comm_hook(state, fp8_gradient_hook)``.

    Raises:
        ValueError: the bucket holds sparse gradients, or gradients that are not fp32, bf16 or fp16.
    """
    return state.reduce(bucket)


def check_gradients(model: nn.Module) -> None:
    """Look, before training, whether the gradients of ``model`` can go in FP8, as far as its modules tell.

    Raises:
        ValueError: a parameter is not fp32, bf16 or fp16, or an embedding gives sparse gradients.
    """
    for name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(name, recurse=False):
            if parameter.requires_grad and parameter.dtype not in DTYPES:
                raise ValueError(
                    f"The gradient of {parameter_name!r} cannot be sent in FP8, for it is {parameter.dtype}: make the "
                    "parameter fp32, bf16 or fp16, or leave FP8Communication out."
                )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ValueError(
                f"The sparse gradients of {name!r} cannot be sent in FP8: make them dense (sparse=False), or leave "
                "FP8Communication out."
            )


class FP8GradientState:
    """What :func:`fp8_gradient_hook` keeps between calls. One object serves one DDP module.

    Args:
        process_group: that of the DDP module; ``None`` means all ranks.
        codec: how gradients become bytes.
        min_numel: buckets with fewer values go in bf16.
        error_feedback: keep what rounding takes away from each gradient and add it to the next one (one more tensor of
            the gradients' size and dtype). Call :meth:`drop_residuals` when a step is skipped.
        traffic: counts the bytes.
        keys: for stochastic rounding; by default its own.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        codec: BlockCodec | None = None,
        min_numel: int = 0,
        error_feedback: bool = False,
        traffic: Traffic | None = None,
        keys: RoundingKeys | None = None,
    ) -> None:
        self.collectives = FP8Collectives(process_group, codec, min_numel, traffic, keys)
        self.error_feedback = error_feedback
        # By parameter, because DDP rebuilds its buckets after the first step. Flat, in the gradient's memory order.
        self._residuals: dict[Tensor, Tensor] = {}
        self._pending: _PendingBucket | None = None

    @property
    def traffic(self) -> Traffic:
        """The bytes that went over the wire."""
        return self.collectives.traffic

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average ``bucket`` in place. See :func:`fp8_gradient_hook`."""
        buffer = bucket.buffer()
        if buffer.layout is not torch.strided:
            raise ValueError("Sparse gradients cannot be sent in FP8: use dense ones (Embedding(sparse=False)).")
        if bucket.index() == 0:
            # Left over only when the last backward was broken off.
            self._pending = None
        residual = self._collect_residual(bucket) if self.error_feedback else None
        handle = self.collectives.all_reduce(buffer, dist.ReduceOp.AVG, residual=residual, async_op=True)
        if residual is not None:
            self._store_residual(bucket, residual)

        if buffer.is_cuda:
            return _finished_future(handle, buffer)
        # On a CPU group the second phase starts from this thread, and every rank must start it at the same place among
        # the other collectives. So it runs here, one bucket late: each bucket's exchange overlaps with backward.
        previous, self._pending = self._pending, _PendingBucket(handle, buffer)
        future = self._pending.future
        if previous is not None:
            previous.finish()
        if bucket.is_last():
            self._pending.finish()
            self._pending = None
        return future

    def drop_residuals(self, skipped: Tensor | bool = True) -> None:
        """Forget the error feedback of a step that was not taken: it came from gradients that were thrown away.

        Args:
            skipped: whether the step was skipped; a one-element bool tensor is not read by the host.
        """
        if isinstance(skipped, Tensor):
            for residual in self._residuals.values():
                # Not a product: 0 times NaN would stay NaN.
                residual.masked_fill_(skipped.to(residual.device), 0.0)
        elif skipped:
            self._residuals.clear()

    def average_residuals(self) -> None:
        """Give every rank the mean of all ranks' residuals, which leaves their sum as it was.

        A checkpoint holds one rank's state. Called on every rank before :meth:`state_dict`, this makes that state all
        ranks' own, and the run that goes on stays equal to one that resumes, on any number of ranks.
        """
        for residual in self._residuals.values():
            total = residual.float()
            dist.all_reduce(total, group=self.collectives.group)
            residual.copy_(total / self.collectives.world_size)

    def state_dict(self, named_parameters: Iterable[tuple[str, Parameter]]) -> dict[str, Any]:
        """Residuals by parameter name, and the place in the stochastic rounding. Plain tensors and numbers.

        Args:
            named_parameters: of the model, without DDP's ``module.`` prefix.
        """
        residuals = {
            name: self._residuals[parameter].clone()
            for name, parameter in named_parameters
            if parameter in self._residuals
        }
        return {"residuals": residuals, "seed": self.collectives.keys.place}

    def load_state_dict(self, state_dict: Mapping[str, Any], named_parameters: Iterable[tuple[str, Parameter]]) -> None:
        """Go on from :meth:`state_dict`.

        Raises:
            ValueError: a residual belongs to no parameter or has another size.
        """
        parameters = dict(named_parameters)
        residuals: Mapping[str, Tensor] = state_dict.get("residuals", {})
        for name, residual in residuals.items():
            if name not in parameters or parameters[name].numel() != residual.numel():
                raise ValueError(
                    f"The checkpoint has error feedback for {name!r} ({residual.numel()} values), which does not fit "
                    "this model: load the model it was saved from, or leave the communication state out."
                )
        self._residuals = {
            parameters[name]: residual.to(parameters[name].device, copy=True) for name, residual in residuals.items()
        }
        self.collectives.keys.place = state_dict["seed"]

    def _collect_residual(self, bucket: dist.GradBucket) -> Tensor:
        buffer = bucket.buffer()
        residual = torch.zeros_like(buffer)
        for parameter, place in _places(bucket):
            if parameter in self._residuals:
                residual[place] = self._residuals[parameter]
        return residual

    def _store_residual(self, bucket: dist.GradBucket, residual: Tensor) -> None:
        # Views: the all-reduce fills them when it gets there.
        for parameter, place in _places(bucket):
            self._residuals[parameter] = residual[place]


class _PendingBucket:
    """A bucket whose all-reduce is under way, and DDP's future for it."""

    def __init__(self, handle: Handle, buffer: Tensor) -> None:
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._handle = handle
        self._buffer = buffer

    def finish(self) -> None:
        self._handle.wait()
        self.future.set_result(self._buffer)


def _finished_future(handle: Handle, buffer: Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future whose waiters' streams wait for the collective's stream, while the current stream goes on."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device])
    with torch.cuda.stream(torch.cuda.Stream(buffer.device)):
        handle.wait()
        future.set_result(buffer)
    return future


def _places(bucket: dist.GradBucket) -> list[tuple[Tensor, slice]]:
    """Where in the bucket's buffer each parameter's gradient lies."""
    start = bucket.buffer().storage_offset()
    return [
        (parameter, slice(gradient.storage_offset() - start, gradient.storage_offset() - start + gradient.numel()))
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
    ]
