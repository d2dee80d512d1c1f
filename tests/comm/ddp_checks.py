"""What must hold of DDP with the FP8 hook on every rank. Run by test_comm_ddp.py."""

import copy
import inspect
import pickle

import pytest
import torch
import torch.distributed as dist
from collective_checks import relative_error
from rank_checks import device, same_on_all_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_fp8.comm import BlockCodec, FP8GradientState, Traffic, fp8_gradient_hook


class Branches(nn.Module):
    """Several buckets' worth of layers, two of which may go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 96)
        self.left = nn.Linear(96, 96)
        self.right = nn.Linear(96, 96)
        self.norm = nn.LayerNorm(96)
        self.last = nn.Linear(96, 8)

    def forward(self, x: Tensor, only: str | None = None) -> Tensor:
        x = torch.tanh(self.first(x))
        branches = [layer(x) for name, layer in (("left", self.left), ("right", self.right)) if only in (name, None)]
        return self.last(self.norm(sum(branches)))


def make(
    state: FP8GradientState | None = None, dtype: torch.dtype = torch.float32, **options
) -> DistributedDataParallel:
    torch.manual_seed(1)
    # The first step has one bucket, the next ones several: 0.02 MiB is less than a 96 x 96 layer in fp32.
    model = DistributedDataParallel(Branches().to(dtype), bucket_cap_mb=0.02, **options)
    if state is not None:
        model.register_comm_hook(state, fp8_gradient_hook)
    return model


def data(rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(device()).manual_seed(1000 * step + rank)
    return torch.randn(16, 32, generator=generator).to(dtype)


def loss(model: nn.Module, x: Tensor, **kwargs) -> Tensor:
    return model(x, **kwargs).float().square().mean()


def gradient(model: nn.Module) -> Tensor:
    """All gradients, flat; zeros for those that are missing."""
    return torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in model.parameters()])


def gradients_are_the_mean(rank: int, world: int) -> None:
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}):
        traffic = Traffic()
        fp8, plain = make(FP8GradientState(traffic=traffic), **options), make(**options)
        for step in range(3):
            for model in (fp8, plain):
                model.zero_grad()
                loss(model, data(rank, step)).backward()
            assert same_on_all_ranks(gradient(fp8))
            assert 0 < relative_error(gradient(fp8), gradient(plain).double()) < 0.035
        # It ran in FP8: the buckets are padded to ranks x block, so small ones cost a little more.
        assert traffic.calls >= (3 if "find_unused_parameters" in options or "static_graph" in options else 6)
        assert 0 < traffic.sent / traffic.bf16 <= 0.55


def bytes_are_half_of_bf16(rank: int, world: int) -> None:
    state = FP8GradientState()
    model = DistributedDataParallel(nn.Linear(512, 512))
    model.register_comm_hook(state, fp8_gradient_hook)
    model(torch.randn(4, 512)).sum().backward()
    assert state.traffic.bf16 == 2 * (world - 1) * 512 * 513 * 2 // world
    assert state.traffic.sent / state.traffic.bf16 <= 0.52


def accumulation_sends_once(rank: int, world: int) -> None:
    for as_view in (False, True):
        state = FP8GradientState()
        fp8 = make(state, gradient_as_bucket_view=as_view)
        plain = make(gradient_as_bucket_view=as_view)
        for window in range(2):
            for model in (fp8, plain):
                model.zero_grad()
                with model.no_sync():
                    loss(model, data(rank, 10 * window)).backward()
                    calls = state.traffic.calls
                    loss(model, data(rank, 10 * window + 1)).backward()
                    assert state.traffic.calls == calls
                loss(model, data(rank, 10 * window + 2)).backward()
            assert same_on_all_ranks(gradient(fp8))
            assert relative_error(gradient(fp8), gradient(plain).double()) < 0.035
        assert state.traffic.calls == 0 or state.traffic.sent > 0


def unused_parameters_may_differ_by_rank(rank: int, world: int) -> None:
    fp8, plain = make(FP8GradientState(), find_unused_parameters=True), make(find_unused_parameters=True)
    for step in range(3):
        only = "left" if (rank + step) % 2 == 0 else "right"
        for model in (fp8, plain):
            model.zero_grad(set_to_none=True)
            loss(model, data(rank, step), only=only).backward()
        assert same_on_all_ranks(gradient(fp8))
        assert relative_error(gradient(fp8), gradient(plain).double()) < 0.035
    # A layer that no rank used has no gradient.
    fp8.zero_grad(set_to_none=True)
    loss(fp8, data(rank), only="left").backward()
    assert fp8.module.right.weight.grad is None


def low_precision_gradients_keep_their_dtype(rank: int, world: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        fp8 = make(FP8GradientState(), dtype)
        loss(fp8, data(rank, dtype=dtype)).backward()
        mean = make()
        loss(mean, data(rank)).backward()
        assert all(p.grad.dtype == dtype for p in fp8.parameters())
        assert same_on_all_ranks(gradient(fp8))
        assert relative_error(gradient(fp8), gradient(mean).double()) < 0.06


def small_buckets_go_in_bf16(rank: int, world: int) -> None:
    state = FP8GradientState(min_numel=10**6)
    model = make(state)
    loss(model, data(rank)).backward()
    assert state.traffic.sent == state.traffic.bf16 > 0
    plain = make()
    loss(plain, data(rank)).backward()
    assert relative_error(gradient(model), gradient(plain).double()) < 0.005


def process_groups_do_not_meet(rank: int, world: int) -> None:
    pair = dist.new_group([0, 1])
    everyone = make(FP8GradientState())
    if rank < 2:
        some = make(FP8GradientState(pair), process_group=pair)
        loss(some, data(rank)).backward()
    loss(everyone, data(rank)).backward()
    if rank < 2:
        assert same_on_all_ranks(gradient(some), pair)
        loss(some, data(rank, 1)).backward()
    loss(everyone, data(rank, 1)).backward()
    assert same_on_all_ranks(gradient(everyone))


def a_nan_on_one_rank_reaches_all(rank: int, world: int) -> None:
    model = make(FP8GradientState(error_feedback=True))
    x = data(rank)
    if rank == 1:
        x[0, 0] = float("nan")
    loss(model, x).backward()
    assert all(p.grad.isnan().any() for p in model.parameters())
    # The next step is clean: nothing of it stayed behind.
    model.zero_grad()
    loss(model, data(rank, 1)).backward()
    assert gradient(model).isfinite().all()


def a_broken_off_backward_leaves_nothing_behind(rank: int, world: int) -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise KeyError("broken off")

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.broken = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            x = Breaks.apply(x) if self.broken else x
            return self.layers[2](self.layers[1](x))

    state, chain = FP8GradientState(), Chain()
    model = DistributedDataParallel(chain, bucket_cap_mb=1e-5)
    model.register_comm_hook(state, fp8_gradient_hook)
    for _ in range(2):  # The first step has one bucket, the next ones one for each parameter.
        model(torch.ones(1, 8)).sum().backward()
    calls, chain.broken = state.traffic.calls, True
    with pytest.raises(KeyError):
        model(torch.ones(1, 8)).sum().backward()
    assert state.traffic.calls > calls
    again = DistributedDataParallel(Chain())
    again.register_comm_hook(state, fp8_gradient_hook)
    again(torch.full((1, 8), float(rank))).sum().backward()
    assert same_on_all_ranks(gradient(again)) and gradient(again).abs().sum() > 0


def large_gradients_do_not_freeze_small_ones(rank: int, world: int) -> None:
    class TwoScales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return 1e2 * self.large(x).sum(-1) + 1e-4 * self.small(x).sum(-1)

    def train(block_scales: bool) -> float:
        torch.manual_seed(2)
        model = DistributedDataParallel(TwoScales())
        if block_scales:
            model.register_comm_hook(FP8GradientState(), fp8_gradient_hook)
        else:
            model.register_comm_hook(None, one_scale_per_bucket)
        before = model.module.small.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for step in range(3):
            optimizer.zero_grad()
            model(
                torch.randn(8, 64, generator=torch.Generator(device()).manual_seed(step + 10 * rank))
            ).sum().backward()
            optimizer.step()
        return float((model.module.small.weight - before).norm())

    assert train(block_scales=True) > 1e-3
    assert train(block_scales=False) == 0.0


def one_scale_per_bucket(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """How not to do it: the control of the freeze test."""
    buffer = bucket.buffer()
    scale = 448 / buffer.abs().max()
    buffer.copy_((buffer * scale).to(torch.float8_e4m3fn).float() / scale)
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda future: future.value()[0])


def error_feedback_survives_rebuilt_buckets(rank: int, world: int) -> None:
    # The same data over and over: with feedback the mean of the gradients approaches the exact one.
    exact = make()
    loss(exact, data(rank)).backward()
    errors = {}
    for feedback in (False, True):
        model = make(FP8GradientState(error_feedback=feedback))
        total = torch.zeros_like(gradient(exact))
        for _ in range(30):
            model.zero_grad()
            loss(model, data(rank)).backward()
            total += gradient(model)
        assert same_on_all_ranks(total)
        errors[feedback] = relative_error(total / 30, gradient(exact).double())
    assert errors[True] < errors[False] / 5


def skipped_steps_drop_their_residuals(rank: int, world: int) -> None:
    for skipped in (True, torch.tensor(True)):
        state = FP8GradientState(error_feedback=True)
        model = make(state)
        loss(model, data(rank)).backward()
        held = state.state_dict(model.module.named_parameters())["residuals"]
        assert set(held) == {name for name, _ in model.module.named_parameters()}
        assert any(residual.abs().max() > 0 for residual in held.values())
        state.drop_residuals(torch.tensor(False))
        state.drop_residuals(False)
        kept = state.state_dict(model.module.named_parameters())["residuals"]
        assert all(torch.equal(kept[name], held[name]) for name in held)
        state.drop_residuals(skipped)
        dropped = state.state_dict(model.module.named_parameters())["residuals"]
        assert all(residual.abs().max() == 0 for residual in dropped.values())


def a_resumed_run_is_the_same_run(rank: int, world: int) -> None:
    def train(model: nn.Module, steps: range) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in steps:
            optimizer.zero_grad()
            loss(model, data(rank, step)).backward()
            optimizer.step()

    def new_state() -> FP8GradientState:
        return FP8GradientState(codec=BlockCodec(stochastic=True), error_feedback=True)

    state = new_state()
    model = make(state)
    train(model, range(3))
    state.average_residuals()
    saved = copy.deepcopy(state.state_dict(model.module.named_parameters()))
    weights = copy.deepcopy(model.module.state_dict())
    assert all(same_on_all_ranks(residual) for residual in saved["residuals"].values())
    train(model, range(3, 6))

    # A process that starts again rebuilds its buckets after its first step; so does this one, before it goes on.
    state = new_state()
    resumed = make(state)
    loss(resumed, data(rank)).backward()
    loss(resumed, data(rank)).backward()
    resumed.module.load_state_dict(weights)
    # From rank 0's file, as Lightning does it.
    box = [pickle.dumps(saved)]
    dist.broadcast_object_list(box, src=0)
    state.load_state_dict(pickle.loads(box[0]), resumed.module.named_parameters())
    train(resumed, range(3, 6))
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)

    with pytest.raises(ValueError, match=r"first\.weight"):
        state.load_state_dict(
            {"residuals": {"first.weight": torch.ones(3)}, "seed": 0}, model.module.named_parameters()
        )


def sparse_gradients_are_refused(rank: int, world: int) -> None:
    model = DistributedDataParallel(nn.EmbeddingBag(8, 4, sparse=True))
    model.register_comm_hook(FP8GradientState(), fp8_gradient_hook)
    with pytest.raises(ValueError, match="Sparse gradients"):
        model(torch.tensor([[1, 2]])).sum().backward()


def the_hook_is_one_that_lightning_can_log(rank: int, world: int) -> None:
    assert fp8_gradient_hook.__qualname__ == "fp8_gradient_hook"
    signature = inspect.signature(fp8_gradient_hook)
    assert signature.parameters["bucket"].annotation is dist.GradBucket
    assert signature.return_annotation == torch.futures.Future[torch.Tensor]


CHECKS = [
    gradients_are_the_mean,
    bytes_are_half_of_bf16,
    accumulation_sends_once,
    unused_parameters_may_differ_by_rank,
    low_precision_gradients_keep_their_dtype,
    small_buckets_go_in_bf16,
    process_groups_do_not_meet,
    a_nan_on_one_rank_reaches_all,
    a_broken_off_backward_leaves_nothing_behind,
    large_gradients_do_not_freeze_small_ones,
    error_feedback_survives_rebuilt_buckets,
    skipped_steps_drop_their_residuals,
    a_resumed_run_is_the_same_run,
    sparse_gradients_are_refused,
    the_hook_is_one_that_lightning_can_log,
]
