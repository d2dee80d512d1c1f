"""What must hold of FSDP2 with FP8 layers and FP8 collectives on every rank. Run by test_comm_sharding.py."""

from __future__ import annotations

import importlib.util
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from collective_checks import relative_error
from rank_checks import device, same_on_all_ranks
from shard_models import (
    Decoder,
    assert_same_weights,
    batch,
    counted_bytes,
    fp8_layers,
    gradients,
    line_mesh,
    loss_of,
    make,
    sharded,
    statistics,
    train,
    weights,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import lightning_fp8
from lightning_fp8 import DelayedScaling, FP8Precision, LayerSelection
from lightning_fp8.comm import BlockCodec, Traffic
from lightning_fp8.comm.fsdp import communicate_fsdp_in_fp8
from lightning_fp8.comm.rounding import RoundingKeys
from lightning_fp8.comm.tensor_parallel import ColwiseParallel, RowwiseParallel
from lightning_fp8.formats import E5M2
from lightning_fp8.loss_scaling import LossScaler
from lightning_fp8.model import conversions
from lightning_fp8.statistics import AMAX, SCALE
from lightning_fp8.tuning import choice
from tests.tuning.tables import PretendNative, SlowHost

RECIPES_WITH_ONE_SCALE = ("delayed", "tensorwise", "static")


def weights_gathered_in_fp8_change_no_result(rank: int, world: int) -> None:
    # 80 rows on 3 ranks are uneven; the embedding's 50 too.
    for recipe in RECIPES_WITH_ONE_SCALE:
        plain, fp8 = sharded(recipe=recipe), sharded(recipe=recipe, param="fp8")
        assert len(fp8_layers(fp8)) == 4
        assert train(plain) == train(fp8), recipe
        assert_same_weights(plain, fp8)
        assert torch.equal(statistics(plain), statistics(fp8)), recipe


def shards_may_be_empty(rank: int, world: int) -> None:
    # 16 rows on 5 ranks: the last has none. Biases of one value are on the first only.
    def model(**options) -> nn.Module:
        torch.manual_seed(1)
        layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Linear(16, 1))
        return sharded(layers, layers=LayerSelection(), blocks=["0", "2"], **options)

    def losses(model: nn.Module) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(16, 16, generator=torch.Generator().manual_seed(10 * step + rank)).to(device())
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            lightning_fp8.step(model)
            found.append(loss.item())
        return found

    plain, fp8, both = model(), model(param="fp8"), model(param="fp8", grad="fp8")
    assert len(fp8_layers(fp8)) == 2
    assert (fp8_layers(fp8)[1].weight.to_local().numel() == 0) == (rank == 4)
    expected = losses(plain)
    assert losses(fp8) == expected
    assert_same_weights(plain, fp8)
    assert losses(both) == pytest.approx(expected, rel=0.05)


def ranks_forget_dropped_gradients_together(rank: int, world: int) -> None:
    """Rank 0 alone has the one bias: what it knows of a gradient, the others cannot see."""
    for loss_scale in (1024.0, "dynamic"):
        model = sharded(nn.Sequential(nn.Linear(16, 1)), blocks=["0"])
        optimizer, scaler = torch.optim.SGD([model[0].bias], 1.0), LossScaler(loss_scale)
        x = torch.ones(2, 16, device=device())
        for dropped in (False, True, False):
            scaler.scale(model(x).float().sum()).backward()
            scaler.unscale_(optimizer)
            if dropped:
                optimizer.zero_grad(set_to_none=False)
            scaler.scale(model(x).float().sum())
            assert (optimizer in scaler._unscaled) == (not dropped)
            scaler.step(optimizer)
            optimizer.zero_grad()


class Experts(nn.Module):
    """Of its layers one runs a call. The others get gradients of zero, for ranks reduce what they hold alike."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        rest = sum(p.sum() for index, layer in enumerate(self.layers) for p in layer.parameters() if index != which)
        return self.layers[which](x) + 0 * rest


class Branches(nn.Module):
    """A block that runs now and then, gathered first where it does, and experts, of which each rank may use its own."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width), Experts(width)])

    def forward(self, x: torch.Tensor, step: int, which: int) -> torch.Tensor:
        if step % 3 != 1:
            x = x + self.blocks[0](x)
        return self.blocks[2](torch.tanh(self.blocks[1](x)), which)


def train_branches(model: nn.Module, which, accumulate: int = 1) -> tuple[list[float], list[torch.Tensor]]:
    """Losses, and the statistics as each optimizer step finds them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses, tables = [], []
    for step in range(6):
        for part in range(accumulate):
            generator = torch.Generator().manual_seed(100 * step + 10 * part + dist.get_rank())
            x = torch.randn(16, 48, generator=generator).to(device())
            loss = (model(x, step, which(step + part)) - x).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        tables.append(statistics(model).clone())
        optimizer.step()
        optimizer.zero_grad()
        lightning_fp8.step(model)
    return losses, [*tables, statistics(model)]


def layers_that_do_not_run_leave_no_trace(rank: int, world: int) -> None:
    everywhere, somewhere = (lambda step: step % 3), (lambda step: 0 if rank else step % 2)
    averaged = DelayedScaling(smoothing=0.5, amax_compute_algo="most_recent")
    for recipe, which, accumulate, frozen, options in (
        ("delayed", everywhere, 1, False, {}),
        ("delayed", somewhere, 2, True, {}),
        (averaged, somewhere, 1, False, {}),
        ("tensorwise", everywhere, 1, False, {"reshard_after_forward": True}),
    ):
        how = {"recipe": recipe, "layers": LayerSelection(head=True), **options}
        plain, fp8 = (sharded(Branches(), param=param, **how) for param in ("bf16", "fp8"))
        assert len(fp8_layers(fp8)) == 5
        for model in (plain, fp8):
            model.blocks[0].train(not frozen)
        (before, expected), (after, found) = (train_branches(model, which, accumulate) for model in (plain, fp8))
        assert before == after, recipe
        for step, (a, b) in enumerate(zip(expected, found, strict=True)):
            assert torch.equal(a, b), (recipe, step)  # Each rank knows what its own layers saw until the step ends.
        assert_same_weights(plain, fp8)


def ranks_agree_on_scales_that_each_keeps_for_itself(rank: int, world: int) -> None:
    recipe = DelayedScaling(reduce_amax=False)
    model = sharded(Branches(), param="fp8", recipe=recipe, layers=LayerSelection(head=True))
    train_branches(model, lambda step: 0 if rank else step % 2)
    with torch.no_grad():
        for parameter in model.blocks[2].parameters():
            parameter.mul_(0.1)  # Far from the scales that rank 0 has noted; those that rank 1 lacks fit.
    assert not same_on_all_ranks(statistics(model)[:, 1])
    exact = Branches().to(device())
    exact.load_state_dict(weights(model))
    x = torch.randn(16, 48, generator=torch.Generator().manual_seed(3)).to(device())
    errors = [relative_error(model(x, 0, which), exact(x, 0, which).double()) for which in range(3)]
    assert max(errors) < 0.1, errors


def so_do_weights_gathered_under_other_settings(rank: int, world: int) -> None:
    fp32 = MixedPrecisionPolicy()
    for options in (
        {"mp_policy": fp32},
        {"reshard_after_forward": False},
        {"reshard_after_forward": True},
        {"activation_checkpointing": True},
    ):
        plain, fp8 = sharded(**options), sharded(param="fp8", **options)
        if options.get("activation_checkpointing"):
            plain = sharded()
        assert train(plain, accumulate=2) == train(fp8, accumulate=2), options
        assert_same_weights(plain, fp8)


def modules_sharded_together_share_their_messages(rank: int, world: int) -> None:
    def grouped() -> nn.Module:
        model = lightning_fp8.convert_model(make().to(device()), layers=LayerSelection())
        how = {"mesh": line_mesh(), "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
        # Not in the order that the model has them in, which is not FSDP's.
        fully_shard([model.blocks[1].down, model.blocks[0].up], **how)
        fully_shard([model.head, model.embedding], **how)
        return fully_shard(model, **how)

    plain, fp8, both = (grouped() for _ in range(3))
    communicate_fsdp_in_fp8(fp8, grad=False)
    installed = communicate_fsdp_in_fp8(both)
    assert len(installed.all_gathers) == len(installed.reduce_scatters) == 3
    assert sum(in_fp8 for gather in installed.all_gathers for _, in_fp8 in gather.parameters) == len(fp8_layers(both))
    for model in (plain, both):
        loss_of(model, batch(0, rank)).backward()
    assert 0 < relative_error(gradients(both), gradients(plain).double()) < 0.035
    plain.zero_grad()
    assert train(plain) == train(fp8)
    assert_same_weights(plain, fp8)
    assert torch.equal(statistics(plain), statistics(fp8))


def fewer_ranks_share_weights_until_backward(rank: int, world: int) -> None:
    plain, fp8 = (sharded(param=param, reshard_after_forward=2) for param in ("bf16", "fp8"))
    assert train(plain, accumulate=2) == train(fp8, accumulate=2)
    assert_same_weights(plain, fp8)
    assert torch.equal(statistics(plain), statistics(fp8))


def weights_left_gathered_do_not_outlive_their_scales(rank: int, world: int) -> None:
    plain, fp8 = (sharded(param=param, reshard_after_forward=False) for param in ("bf16", "fp8"))
    losses: dict[nn.Module, list[float]] = {plain: [], fp8: []}
    for model, found in losses.items():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        for step in range(4):
            loss = loss_of(model, batch(step, rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
            with torch.no_grad():  # Nothing frees what this gathers.
                loss_of(model, batch(step, rank))
            lightning_fp8.step(model)
    assert losses[plain] == losses[fp8]
    assert torch.equal(statistics(plain), statistics(fp8))


def collectives_are_installed_after_an_evaluation_too(rank: int, world: int) -> None:
    early, late = sharded(param="fp8", grad="fp8"), sharded()
    with torch.no_grad():
        loss_of(late.eval(), batch(0, rank))
    communicate_fsdp_in_fp8(late.train())
    assert train(early) == train(late)


def finer_scales_go_in_blocks(rank: int, world: int) -> None:
    for recipe in ("rowwise", "blockwise"):
        plain, fp8 = (sharded(make(width=128, hidden=256), recipe=recipe, param=param) for param in ("bf16", "fp8"))
        before, after = train(plain), train(fp8)
        assert before != after
        for a, b in zip(before, after, strict=True):
            assert abs(a - b) < 0.02 * a


def only_gradients_are_rounded_stochastically(rank: int, world: int) -> None:
    plain, noisy = (sharded(make(width=128, hidden=256), recipe="rowwise", param="fp8") for _ in range(2))
    keys, traffic = RoundingKeys(), Traffic()
    communicate_fsdp_in_fp8(noisy, codec=BlockCodec(E5M2, stochastic=True), grad_traffic=traffic, keys=keys)
    text = batch(0, rank)
    loss = loss_of(noisy, text)
    assert torch.equal(loss, loss_of(plain, text))  # Its weights came in E4M3, rounded to nearest.
    loss.backward()
    assert keys.place == traffic.calls > 2  # No two modules round with the same numbers.


def sharded_compute_is_unsharded_compute(rank: int, world: int) -> None:
    alone = make().to(device())
    lightning_fp8.convert_model(alone, layers=LayerSelection())
    shards = sharded(mp_policy=MixedPrecisionPolicy())
    for group in range(2):
        text = batch(0, group)  # The same on all ranks: the mean is each one's gradient.
        for model in (alone, shards):
            model.zero_grad()
            loss_of(model, text).backward()
        for (name, a), b in zip(alone.named_parameters(), shards.parameters(), strict=True):
            torch.testing.assert_close(b.grad.full_tensor(), a.grad, rtol=1e-5, atol=1e-7, msg=name)
        # The transposed scale of a weight is not kept before the first step: backward takes the same from the data.
        columns = [AMAX, SCALE]
        assert torch.equal(statistics(alone)[..., columns], statistics(shards)[..., columns])


def outputs_may_be_changed_in_place(rank: int, world: int) -> None:
    """Where a layer is sharded by itself, FSDP2's hooks hang on its output."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(48, 48) for _ in range(4)]
        return nn.Sequential(layers[0], nn.ReLU(inplace=True), layers[1], nn.ReLU(inplace=True), *layers[2:])

    for backend in ("native", "torchao"):
        if backend == "torchao" and importlib.util.find_spec("torchao") is None:
            continue
        how = {"layers": LayerSelection(), "recipe": "tensorwise", "backend": backend}
        alone = lightning_fp8.convert_model(model().to(device()), **how)
        shards = sharded(model(), mp_policy=MixedPrecisionPolicy(), blocks=["0", "2", "4"], **how)
        # 20 rows: torchao pads them.
        for shape in ((20, 48), (4, 5, 48)):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device())
            for side in (alone, shards):
                side.zero_grad()
                side(x).square().mean().backward()
            for (name, a), b in zip(alone.named_parameters(), shards.parameters(), strict=True):
                torch.testing.assert_close(b.grad.full_tensor(), a.grad, rtol=1e-5, atol=1e-7, msg=name)


def no_transposed_weight_is_kept(rank: int, world: int) -> None:
    for param in ("bf16", "fp8"):
        model = sharded(make(width=64, hidden=96), param=param)
        kept: list[tuple[int, ...]] = []

        def pack(x: torch.Tensor, kept=kept) -> torch.Tensor:
            if x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
                kept.append(tuple(x.shape))
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = loss_of(model, batch(0, rank))
        loss.backward()
        # Inputs, transposed: [features, tokens]. A weight would be [64, 96] or [96, 64].
        assert set(kept) == {(64, 64), (96, 64)}


def bytes_of_both_hooks_are_half(rank: int, world: int) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
    model = sharded(model, layers=LayerSelection(head=True), blocks=["0", "1", "2"], param="fp8", grad="fp8")
    x = torch.randn(16, 256, device=device())
    model(x).square().mean().backward()  # The first step also settles things among the ranks.
    with counted_bytes() as sent:
        model(x).square().mean().backward()
    shard = 3 * 256 * -(-256 // world)
    gathers = 2 * (world - 1) * shard * 2  # In forward and in backward, in bf16; some stay whole in between.
    reductions = (world - 1) * shard * 2
    assert sent["scatter"] == 0
    assert 0 < sent["send"] <= 0.53 * reductions
    assert 0.2 * gathers < sent["gather"] <= 0.51 * gathers
    assert sent["reduce"] < 200  # The weights' amaxes.


def the_counter_sees_plain_collectives(rank: int, world: int) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
    bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    model = sharded(model, layers=LayerSelection(head=True), blocks=["0", "1", "2"], mp_policy=bf16)
    x = torch.randn(16, 256, device=device())
    model(x).square().mean().backward()
    with counted_bytes() as sent:
        model(x).square().mean().backward()
    assert sent["scatter"] >= 2 * (world - 1) * 3 * 256 * (256 // world)
    assert sent["gather"] >= 2 * (world - 1) * 3 * 256 * (256 // world)


def gradients_reduced_in_fp8_are_close(rank: int, world: int) -> None:
    plain, fp8 = sharded(), sharded(grad="fp8")
    for model in (plain, fp8):
        loss_of(model, batch(0, rank)).backward()
    exact = gradients(plain)
    assert 0 < relative_error(gradients(fp8), exact.double()) < 0.035
    assert same_on_all_ranks(gradients(fp8))


def every_way_to_average_works(rank: int, world: int) -> None:
    for factor, force in ((None, False), (3.0, False), (None, True)):
        # gloo itself knows no PREMUL_SUM.
        plain = None if device().type == "cpu" and factor is not None else sharded()
        fp8 = sharded(grad="fp8")
        for model in (plain, fp8):
            if model is None:
                continue
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    if factor is not None:
                        module.set_gradient_divide_factor(factor)
                    module.set_force_sum_reduction_for_comms(force)
            loss_of(model, batch(0, rank)).backward()
        if plain is None:
            mean = sharded()
            loss_of(mean, batch(0, rank)).backward()
            exact = gradients(mean).double() * world / 3.0
        else:
            exact = gradients(plain).double()
        assert 0 < relative_error(gradients(fp8), exact) < 0.035, (factor, force)


def a_nan_gradient_stays_one(rank: int, world: int) -> None:
    model = sharded(grad="fp8", param="fp8")
    loss = loss_of(model, batch(0, rank))
    (loss * float("nan") if rank == 1 else loss).backward()
    assert gradients(model).isnan().any()


def a_nan_weight_stays_one(rank: int, world: int) -> None:
    model = sharded(param="fp8")
    with torch.no_grad():
        local = model.blocks[0].up.weight.to_local()
        if rank == 0:
            local[0, 0] = float("nan")
    assert loss_of(model, batch(0, rank)).isnan()
    # Inf: the amax was reduced, and MAX would have dropped a NaN.
    assert statistics(model)[0, 1, AMAX] == torch.inf


def layers_in_high_precision_get_their_weights_as_they_are(rank: int, world: int) -> None:
    losses = []
    for param in ("bf16", "fp8"):
        model = sharded(param=param)
        names = conversions(model)[0].converted
        conversions(model)[0].runtime.set_enabled(names[:3], False)
        losses.append(train(model))
    assert losses[0] == losses[1]


def evaluation_scales_from_the_data(rank: int, world: int) -> None:
    plain, fp8 = sharded(), sharded(param="fp8")
    for model in (plain, fp8):
        train(model, steps=2)
        model.eval()
    table = statistics(fp8).clone()
    with torch.no_grad():
        a, b = (float(loss_of(model, batch(5, rank))) for model in (plain, fp8))
    assert abs(a - b) < 2e-3 * abs(a)
    assert torch.equal(table, statistics(fp8))  # Nothing was recorded.
    for model in (plain, fp8):
        model.train()
    assert train(plain) == train(fp8)


def small_modules_go_as_they_are(rank: int, world: int) -> None:
    model = sharded(param="fp8", grad="fp8", min_numel=10**6)
    with counted_bytes() as sent:
        train(model, steps=1)
    plain = sharded()
    with counted_bytes() as bf16:
        train(plain, steps=1)
    assert sent["gather"] >= bf16["gather"] > 0


def weights_on_meta_come_to_life_sharded(rank: int, world: int) -> None:
    with torch.device("meta"):
        model = Decoder()
    model = sharded(model, param="fp8", grad="fp8")
    model.to_empty(device=device())
    torch.manual_seed(3)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    never_on_meta = Decoder()
    never_on_meta.load_state_dict(weights(model))
    assert train(model, steps=2) == train(sharded(never_on_meta, param="fp8", grad="fp8"), steps=2)
    table = statistics(model)
    assert table.device == device() and (table[:, 1, SCALE] > 0).all()


def state_is_plain(rank: int, world: int) -> None:
    model = sharded(param="fp8", grad="fp8", activation_checkpointing=True)
    plain = make()
    train(model, steps=1)
    state, expected = model.state_dict(), plain.state_dict()
    assert {k: (v.shape, v.dtype) for k, v in state.items()} == {k: (v.shape, v.dtype) for k, v in expected.items()}
    for value in state.values():
        assert type(value) is DTensor and type(value.to_local()) is torch.Tensor
    plain.load_state_dict({name: value.full_tensor() for name, value in state.items()})


def replicas_of_shards_work(rank: int, world: int) -> None:
    if world != 4:
        return
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    plain, fp8 = sharded(mesh=mesh), sharded(mesh=mesh, param="fp8")
    assert train(plain) == train(fp8)
    assert_same_weights(plain, fp8)
    assert communicate_fsdp_in_fp8(fp8).replicated and not communicate_fsdp_in_fp8(sharded()).replicated
    line, both = sharded(), sharded(mesh=mesh, grad="fp8")
    for model in (line, both):
        loss_of(model, batch(0, rank)).backward()
    assert 0 < relative_error(gradients(both), gradients(line).double()) < 0.035
    for value in weights(both).values():
        assert same_on_all_ranks(value)


def compiled_blocks_train_alike(rank: int, world: int) -> None:
    if world != 2:
        return
    compile = {"backend": "aot_eager", "fullgraph": True}
    for param in ("bf16", "fp8"):
        eager, compiled = sharded(param=param), sharded(param=param, compile=compile)
        assert train(eager) == pytest.approx(train(compiled), rel=2e-3)
        torch.testing.assert_close(statistics(eager), statistics(compiled), rtol=0.1, atol=1e-3)


def auto_knows_that_blocks_will_be_compiled(rank: int, world: int) -> None:
    times = SlowHost((48, 80), (80, 48))
    with mock.patch.object(choice, "times_on", lambda *_: choice.Source(times, "delayed", "made up")):
        for compile, count in ((False, 0), ({"backend": "eager"}, 4)):
            model = sharded(layers="auto", backend=PretendNative(), compile=compile)
            assert len(fp8_layers(model)) == count


def layers_take_and_give_high_precision(rank: int, world: int) -> None:
    model = sharded(param="fp8", grad="fp8")
    seen = set()

    def look(module, args, output) -> None:
        seen.update(x.dtype for x in (*args, output))
        output.register_hook(lambda gradient: seen.add(gradient.dtype))

    for layer in fp8_layers(model):
        layer.register_forward_hook(look)
    train(model, steps=1)
    assert seen <= {torch.bfloat16, torch.float32}


def mistakes_are_named(rank: int, world: int) -> None:
    model = sharded()
    assert sharded(model) is model  # configure_model may run again.
    with pytest.raises(RuntimeError, match="DTensor in forward"):
        model.blocks[0].up(torch.randn(4, 48, device=device()))
    late = make().to(device())
    fully_shard(late, mesh=line_mesh())
    with pytest.raises(ValueError, match=r"already sharded.*plugin.shard"):
        lightning_fp8.convert_model(late)
    with pytest.raises(ValueError, match="No weight can be gathered"):
        communicate_fsdp_in_fp8(late)
    with pytest.raises(ValueError, match="not sharded by FSDP2"):
        communicate_fsdp_in_fp8(make())
    fresh = make()
    for settings, message in (
        ({"grad": "int8"}, "grad must be"),
        ({"compile": {"recompute": "some"}}, "recompute='some' is none of"),
        ({"compile": {"full_graph": True}}, "compile holds 'full_graph', which torch.compile does not take"),
        ({"compile": "yes"}, "compile must be true, false or a mapping"),
        ({"reshard_after_forward": world + 1}, f"={world + 1} must divide the {world} ranks that shard"),
    ):
        with pytest.raises(ValueError, match=message):
            sharded(fresh, **settings)
        with pytest.raises(ValueError, match=message):
            FP8Precision(precision="bf16-true").shard(fresh, line_mesh(), **settings)
    if importlib.util.find_spec("torchao"):
        with pytest.raises(ValueError, match="torchao backend's layers cannot be gathered"):
            sharded(fresh, recipe="rowwise", backend="torchao", param="fp8")
    for settings in (
        {"activation_checkpointing": "false"},
        {"min_numel": 0.5},
        {"reshard_after_forward": "true"},
    ):
        with pytest.raises(TypeError, match=f"{next(iter(settings))} must be"):
            sharded(fresh, **settings)
    assert {parameter.dtype for parameter in fresh.parameters()} == {torch.float32}
    with pytest.raises(ValueError, match=r"shard needs the DeviceMesh of all ranks, got None: self\.device_mesh"):
        lightning_fp8.shard(fresh, None)  # type: ignore[arg-type]
    tensor_mesh = init_device_mesh(device().type, (1, world), mesh_dim_names=("data_parallel", "tensor_parallel"))
    with pytest.raises(ValueError, match=r"are tensor-parallel, and no styles.*data_parallel_size"):
        lightning_fp8.shard(fresh, tensor_mesh)
    with pytest.raises(ValueError, match="need a mesh"):
        sharded(fresh, tensor_parallel={"head": None})
    with pytest.raises(ValueError, match="no modules 'nowhere'"):
        sharded(fresh, blocks=["nowhere"])
    with pytest.raises(ValueError, match="Transformer Engine"):
        sharded(fresh, backend="transformer_engine")
    plan = {"blocks.*.up": ColwiseParallel(), "block.*.down": RowwiseParallel()}
    known = r"'embedding', 'blocks', 'blocks\.\*', 'blocks\.\*\.norm', 'blocks\.\*\.up'"
    with pytest.raises(ValueError, match=rf"'block\.\*\.down' fits no module of Decoder, which has {known}"):
        lightning_fp8.shard(make(hidden=192), tensor_mesh, tensor_parallel=plan)
    fresh.blocks[1].up.weight = fresh.blocks[0].up.weight
    with pytest.raises(ValueError, match=r"'blocks\.0\.up\.weight' \(block 'blocks\.0'\) and .* are one parameter"):
        sharded(fresh)
    fresh.head.weight = fresh.embedding.weight
    with pytest.raises(ValueError, match=r"'head\.weight' \(block 'head'\).*are one parameter"):
        sharded(fresh, blocks=["head"])
    assert not conversions(fresh) and not any(isinstance(p, DTensor) for p in fresh.parameters())


def ties_within_a_block_or_outside_of_all_are_kept(rank: int, world: int) -> None:
    model = make()
    model.blocks[0].norm.weight = model.blocks[0].down.bias
    model.head.weight = model.embedding.weight
    train(sharded(model, param="fp8"))
    assert model.head.weight is model.embedding.weight and model.blocks[0].norm.weight is model.blocks[0].down.bias


def blocks_may_be_named_in_any_order(rank: int, world: int) -> None:
    names = ["blocks.0", "blocks.0.up", "blocks.1.up", "blocks.1", "blocks.0"]
    models = [sharded(blocks=blocks, activation_checkpointing=True) for blocks in (names, sorted(names)[::-1])]
    assert train(models[0]) == train(models[1]) == train(sharded())
    for model in models:
        assert sum(isinstance(part, FSDPModule) for part in model.modules()) == 5


CHECKS = [
    ranks_forget_dropped_gradients_together,
    weights_gathered_in_fp8_change_no_result,
    layers_that_do_not_run_leave_no_trace,
    ranks_agree_on_scales_that_each_keeps_for_itself,
    so_do_weights_gathered_under_other_settings,
    modules_sharded_together_share_their_messages,
    weights_left_gathered_do_not_outlive_their_scales,
    collectives_are_installed_after_an_evaluation_too,
    finer_scales_go_in_blocks,
    only_gradients_are_rounded_stochastically,
    sharded_compute_is_unsharded_compute,
    outputs_may_be_changed_in_place,
    no_transposed_weight_is_kept,
    bytes_of_both_hooks_are_half,
    the_counter_sees_plain_collectives,
    gradients_reduced_in_fp8_are_close,
    every_way_to_average_works,
    a_nan_gradient_stays_one,
    a_nan_weight_stays_one,
    layers_in_high_precision_get_their_weights_as_they_are,
    evaluation_scales_from_the_data,
    small_modules_go_as_they_are,
    weights_on_meta_come_to_life_sharded,
    state_is_plain,
    replicas_of_shards_work,
    compiled_blocks_train_alike,
    auto_knows_that_blocks_will_be_compiled,
    layers_take_and_give_high_precision,
    mistakes_are_named,
    ties_within_a_block_or_outside_of_all_are_kept,
    blocks_may_be_named_in_any_order,
]
