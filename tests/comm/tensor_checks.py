"""What must hold of tensor parallelism with FP8 layers on every rank. Run by test_comm_sharding.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from collective_checks import relative_error
from rank_checks import device, same_on_all_ranks
from shard_models import assert_same_weights, make, sharded, statistics, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.parallel import parallelize_module

import lightning_fp8
from lightning_fp8 import LayerSelection, StaticScaling
from lightning_fp8.clipping import clip_by_norm, clip_by_value
from lightning_fp8.comm import Traffic
from lightning_fp8.comm.tensor_parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from lightning_fp8.statistics import AMAX


class Net(nn.Module):
    def __init__(self, width: int = 64, hidden: int = 192) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


def net(recipe="delayed", **options) -> Net:
    torch.manual_seed(2)
    return lightning_fp8.convert_model(Net(**options).to(device()), recipe, layers=LayerSelection(head=True))


def mesh():
    return init_device_mesh(device().type, (dist.get_world_size(),))


def tokens(requires_grad: bool = True) -> Tensor:
    x = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(5)).to(device())
    return x.requires_grad_(requires_grad)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def sequence_plan(**options) -> dict:
    return {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1), **options),
        "down": RowwiseParallel(output_layouts=Shard(1), **options),
    }


def parts_make_the_whole(rank: int, world: int) -> None:
    # Constant scales: the parts are cast as the whole is, and only the order of sums differs.
    alone = net(StaticScaling(16.0))
    parts = parallelize_module(net(StaticScaling(16.0)), mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x, z = tokens(), tokens()
    target = tokens(requires_grad=False).flip(1)
    y, q = alone(x), parts(z)
    # Tensor cores' fast accumulation keeps fewer bits, and is applied to another number of terms here.
    assert relative_error(q, y.double()) < (5e-3 if y.is_cuda else 1e-5)
    (y * target).sum().backward()
    (q * target).sum().backward()
    # Gradients are rounded to FP8 behind a sum in another order: a few land on the neighbouring code.
    assert relative_error(z.grad, x.grad.double()) < 5e-3
    for (name, a), b in zip(alone.named_parameters(), parts.parameters(), strict=True):
        assert relative_error(whole(b.grad), a.grad.double()) < 5e-3, name
        assert same_on_all_ranks(whole(b.grad)), name
        assert torch.equal(whole(b), a)


def sequences_are_gathered_in_fp8(rank: int, world: int) -> None:
    alone = net(StaticScaling(16.0))
    traffic = Traffic()
    parts = parallelize_module(net(StaticScaling(16.0)), mesh(), sequence_plan(min_numel=0, traffic=traffic))
    in_bf16 = parallelize_module(net(StaticScaling(16.0)), mesh(), sequence_plan(all_gather="bf16"))
    target = tokens(requires_grad=False).flip(1)
    x = tokens()
    y = alone(x)
    (y * target).sum().backward()
    results = {}
    for name, model in (("fp8", parts), ("bf16", in_bf16)):
        z = tokens(requires_grad=False).chunk(world, 1)[rank].clone().requires_grad_()
        q = model(z)
        assert q.shape == (2, 24 // world, 64)
        (q * target.chunk(world, 1)[rank]).sum().backward()
        results[name] = [
            relative_error(q, y.chunk(world, 1)[rank].double()),
            relative_error(z.grad, x.grad.chunk(world, 1)[rank].double()),
            *(
                relative_error(whole(b.grad), a.grad.double())
                for a, b in zip(alone.parameters(), model.parameters(), strict=True)
            ),
        ]
        # What a rank computes from its part of the sequence is summed over all of them.
        assert all(same_on_all_ranks(whole(p.grad)) for p in (model.up.weight, model.up.bias, model.down.bias))
    # norm.weight and norm.bias are left to torch's own style, which sums them too.
    assert max(results["bf16"]) < (1e-2 if device().type == "cuda" else 5e-3), results
    assert max(results["fp8"]) < 0.08, results
    assert results["fp8"][0] > results["bf16"][0]
    assert traffic.calls == 2 and traffic.sent / traffic.bf16 <= 0.53


def small_gathers_go_as_they_are(rank: int, world: int) -> None:
    traffic = Traffic()
    models = [net(), net()]
    small = parallelize_module(models[0], mesh(), sequence_plan(min_numel=10**6, traffic=traffic))
    plain = parallelize_module(models[1], mesh(), sequence_plan(all_gather="bf16"))
    x = tokens().detach().chunk(world, 1)[rank]
    assert torch.equal(small(x), plain(x))
    assert traffic.calls == 0


def amaxes_are_those_of_all_parts(rank: int, world: int) -> None:
    alone = net()
    parts = parallelize_module(net(), mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for model in (alone, parts):
        model(tokens()).sum().backward()
        lightning_fp8.step(model)
    assert torch.equal(statistics(alone)[:, 1], statistics(parts)[:, 1])
    assert same_on_all_ranks(statistics(parts))


def other_layers_are_left_to_torch(rank: int, world: int) -> None:
    plain = parallelize_module(Net().to(device()), mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    torch.manual_seed(2)
    assert plain(tokens()).shape == (2, 24, 64)
    model = net()
    torch_style = parallelize_module(model, mesh(), {"up": torch_styles.ColwiseParallel()})
    with pytest.raises(RuntimeError, match=r"lightning_fp8\.comm\.tensor_parallel"):
        torch_style(tokens())


def what_does_not_fit_is_refused(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match=r"part of 'up' on each of"):
        parallelize_module(net(width=64, hidden=80), mesh(), {"up": ColwiseParallel()})
    with pytest.raises(ValueError, match="ColwiseParallel takes inputs"):
        parallelize_module(net(), mesh(), {"up": ColwiseParallel(output_layouts=Replicate())})
    with pytest.raises(ValueError, match="RowwiseParallel takes inputs"):
        parallelize_module(net(), mesh(), {"down": RowwiseParallel(input_layouts=Replicate())})
    with pytest.raises(ValueError, match="all_gather must be"):
        ColwiseParallel(all_gather="int8")


def layers_in_high_precision_are_parallel_too(rank: int, world: int) -> None:
    alone, parts = net(), parallelize_module(net(), mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for model in (alone, parts):
        for layer in (model.up, model.down):
            layer.fp8.enabled = False
    torch.testing.assert_close(alone(tokens()), parts(tokens()), rtol=1e-4, atol=1e-5)


def shards_of_parts_train(rank: int, world: int) -> None:
    if world != 4:
        return
    grid = init_device_mesh(device().type, (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    group = rank // 2

    def model(**options):
        return sharded(make(hidden=96), grid, tensor_parallel=plan, **options)

    plain, fp8, both = model(), model(param="fp8"), model(param="fp8", grad="fp8")
    assert not same_on_all_ranks(torch.tensor(float(group)))
    losses = train(plain, group=group)
    assert losses == train(fp8, group=group)
    assert_same_weights(plain, fp8)
    assert train(both, group=group) == pytest.approx(losses, rel=0.02)
    assert all(same_on_all_ranks(whole(p).detach()) for p in both.parameters())
    assert same_on_all_ranks(statistics(both))
    assert (statistics(both)[..., AMAX] < 0).all()  # A new window began.


def parts_without_shards_train(rank: int, world: int) -> None:
    grid = init_device_mesh(device().type, (1, world), mesh_dim_names=("data_parallel", "tensor_parallel"))
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    model = sharded(make(hidden=192).to(device()), grid, tensor_parallel=plan)
    losses = train(model, group=0)
    assert losses[-1] < 20 and same_on_all_ranks(torch.tensor(losses))


def gradients_of_parts_are_clipped_as_those_of_the_whole(rank: int, world: int) -> None:
    """Some are split, some summed up later, and some whole."""

    def gradients(model: Net, x: Tensor, clip) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model(x).square().sum().backward()
        clip(optimizer)
        return [whole(p.grad) for p in model.parameters()]

    def alone_by(clip):
        return lambda optimizer: clip(optimizer.param_groups[0]["params"])

    torch_norm = alone_by(lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.5))
    torch_value = alone_by(lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 0.05))
    x = tokens(requires_grad=False)
    for expected_by, clip in (
        (torch_norm, lambda optimizer: clip_by_norm(optimizer, 0.5)),
        (torch_value, lambda optimizer: clip_by_value(optimizer, 0.05)),
    ):
        expected = gradients(net(StaticScaling(16.0)), x, expected_by)
        plain = parallelize_module(
            net(StaticScaling(16.0)), mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        sequence = parallelize_module(net(StaticScaling(16.0)), mesh(), sequence_plan(all_gather="bf16"))
        for model, part in ((plain, x), (sequence, x.chunk(world, 1)[rank])):
            found = gradients(model, part, clip)
            assert all(relative_error(b, a.double()) < 2e-2 for a, b in zip(expected, found, strict=True))
            assert all(same_on_all_ranks(gradient) for gradient in found)


CHECKS = [
    gradients_of_parts_are_clipped_as_those_of_the_whole,
    parts_make_the_whole,
    sequences_are_gathered_in_fp8,
    small_gathers_go_as_they_are,
    amaxes_are_those_of_all_parts,
    other_layers_are_left_to_torch,
    what_does_not_fit_is_refused,
    layers_in_high_precision_are_parallel_too,
    shards_of_parts_train,
    parts_without_shards_train,
]
