from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_fp8 import convert_model, step
from lightning_fp8.model import conversions
from lightning_fp8.recovery.guard import StepGuard
from lightning_fp8.recovery.layers import FP8Layers
from lightning_fp8.recovery.snapshot import Snapshots
from lightning_fp8.recovery.spikes import SpikeStatistics, Thresholds


class CountsInPlainNumbers(torch.optim.Optimizer):
    """Keeps what is no tensor in its state, as many optimizers of other makers do."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {"step": 0, "mean": torch.zeros_like(parameter), "norms": [], "largest": None}
                state["step"] += 1
                state["norms"].append(parameter.grad.norm().item())
                state["largest"] = torch.maximum(parameter.grad, state["largest"] or torch.zeros(())).max()
                state["mean"].lerp_(parameter.grad, 0.1)
                rate = group["lr"] / (1 - 0.9 ** state["step"]) / (1 + sum(state["norms"]))
                parameter.sub_(state["mean"] / (1 + state["largest"]), alpha=rate)


def make(optimizer: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizers = {
        "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
        "adamw-fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
        "sgd": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
        "tensor-lr": lambda p: torch.optim.Adam(p, torch.tensor(1e-2)),
        "plain-numbers": CountsInPlainNumbers,
    }
    return model, optimizers[optimizer](model.parameters())


def train(model, optimizer, scheduler, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(8, 4)).square().mean() + random.random() + np.random.rand()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("name", ["adamw", "adamw-fused", "sgd", "tensor-lr", "plain-numbers"])
def test_training_goes_on_from_it_bit_for_bit(name, before):
    model, optimizer = make(name)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    train(model, optimizer, scheduler, before)
    snapshots = Snapshots(model, [optimizer], {"scheduler": scheduler})
    snapshots.capture("here")
    snapshots.promote()
    places = [p.data_ptr() for p in model.parameters()]
    first = train(model, optimizer, scheduler, 5)
    after = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    train(model, optimizer, scheduler, 2)
    for _ in range(2):
        assert snapshots.restore() == "here"
        assert train(model, optimizer, scheduler, 5) == first
        assert all(torch.equal(value, after[key]) for key, value in model.state_dict().items())
    assert places == [p.data_ptr() for p in model.parameters()], "restored in place"


def test_parameters_that_joined_since_come_back_without_what_they_got_since():
    model, _ = make("adamw")
    optimizer = torch.optim.AdamW(model[3].parameters(), 1e-2)
    train(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), 2)
    snapshots = Snapshots(model, [optimizer])
    snapshots.capture()
    snapshots.promote()
    weights = [p.clone() for p in model.parameters()]
    moment = optimizer.state[model[3].weight]["exp_avg"].clone()
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.5})
    optimizer.param_groups[0]["params"].insert(0, model[1].weight)
    for _ in range(2):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1.0
    snapshots.restore()
    assert all(torch.equal(p, weight) for p, weight in zip(model.parameters(), weights, strict=True))
    assert set(optimizer.state) == set(model[3].parameters()), "the others' first step is undone"
    assert torch.equal(optimizer.state[model[3].weight]["exp_avg"], moment)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.5], "settings stay: they are of other groups"


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight

    def right_inverse(self, weight):
        return weight / 2


@pytest.mark.parametrize("name", ["adamw", "sgd", "plain-numbers"])
@pytest.mark.parametrize("way", ["pruned", "permanent"])
def test_a_parameter_that_was_pruned_since_comes_back(name, way):
    model, optimizer = make(name)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    train(model, optimizer, scheduler, 2)
    snapshots = Snapshots(model, [optimizer])
    snapshots.capture()
    snapshots.promote()
    weight = model[3].weight
    before, state = weight.clone(), copy.deepcopy(optimizer.state[weight])
    nn.utils.prune.l1_unstructured(model[3], "weight", 0.5)
    if way == "permanent":
        nn.utils.prune.remove(model[3], "weight")
    train(model, optimizer, scheduler, 2)
    with torch.no_grad():
        next(p for p in model.parameters() if p is weight).fill_(float("nan"))
    assert snapshots.drop_incomplete() == []
    snapshots.restore()
    assert torch.equal(weight, before)
    for key, value in optimizer.state[weight].items():
        assert torch.equal(value, state[key]) if torch.is_tensor(value) else value == state[key]


@pytest.mark.parametrize("way", ["parametrized", "removed", "mask removed"])
def test_a_parameter_that_holds_another_quantity_since_is_lacked(way):
    model, optimizer = make("adamw")
    layer, snapshots = model[3], Snapshots(model, [optimizer])
    if way == "removed":
        nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    elif way == "mask removed":
        nn.utils.prune.l1_unstructured(layer, "weight", 0.5)
    snapshots.capture()
    snapshots.promote()
    if way == "parametrized":
        nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    elif way == "removed":
        nn.utils.parametrize.remove_parametrizations(layer, "weight")
    else:
        nn.utils.prune.remove(layer, "weight")
    lacked = "3.parametrizations.weight.original" if way == "parametrized" else "3.weight"
    assert snapshots.drop_incomplete() == [lacked] and snapshots.good is None


def test_a_buffer_that_has_grown_since_stays():
    model, optimizer = make("adamw")
    model.register_buffer("cache", torch.ones(4))
    snapshots = Snapshots(model, [optimizer])
    snapshots.capture()
    snapshots.promote()
    before = model[0].bias.detach().clone()
    model.cache = torch.zeros(8)
    with torch.no_grad():
        model[0].bias.add_(1)
    assert snapshots.drop_incomplete() == []
    snapshots.restore()
    assert torch.equal(model[0].bias, before) and torch.equal(model.cache, torch.zeros(8))


def test_states_that_lack_a_parameter_are_dropped():
    model, optimizer = make("adamw")
    snapshots = Snapshots(model, [optimizer])
    snapshots.capture()
    snapshots.promote()
    model[3].weight = nn.Parameter(torch.zeros(2, 8))
    assert snapshots.drop_incomplete() == [], "another object of the same name and shape"
    snapshots.restore()
    assert not (model[3].weight == 0).any()
    nn.utils.parametrizations.weight_norm(model[3])
    snapshots.capture()
    new = [f"3.parametrizations.weight.original{i}" for i in range(2)]
    assert snapshots.drop_incomplete() == new and snapshots.good is None and snapshots.candidate is not None
    snapshots.promote()
    assert snapshots.drop_incomplete() == []
    model[0].bias = nn.Parameter(torch.zeros(9))
    assert snapshots.drop_incomplete() == ["0.bias"] and snapshots.empty


def test_a_new_parameter_by_the_name_of_one_that_was_renamed_is_another():
    model, optimizer = make("adamw")
    snapshots = Snapshots(model, [optimizer])
    snapshots.capture()
    snapshots.promote()
    weight = model[3].weight
    before = weight.clone()
    model.old, model[3].weight = weight, nn.Parameter(torch.ones(2, 8))
    with torch.no_grad():
        weight.zero_()
    assert snapshots._lacking(snapshots.good) == ["3.weight"]
    snapshots.restore()
    assert torch.equal(weight, before) and (model[3].weight == 1).all()


def test_a_schedule_whose_lists_grew_with_the_groups_goes_on():
    model, _ = make("adamw")
    schedule = torch.optim.lr_scheduler.LambdaLR
    grown = torch.optim.SGD(model[0].parameters(), 0.1)
    other = torch.optim.SGD(model[3].parameters(), 0.1)
    schedules = {"grown": schedule(grown, lambda epoch: 0.5**epoch), "other": schedule(other, lambda epoch: 0.5**epoch)}
    snapshots = Snapshots(model, [grown, other], schedules)
    snapshots.capture()
    snapshots.promote()
    grown.add_param_group({"params": list(model[1].parameters()), "lr": 0.2, "initial_lr": 0.2})
    schedules["grown"].base_lrs.append(0.2)
    schedules["grown"].lr_lambdas.append(lambda epoch: 0.5**epoch)
    for scheduler in schedules.values():
        scheduler.optimizer.step()
        scheduler.step()
    snapshots.restore()
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in (grown, other)]
    assert rates == [[0.05, 0.1], [0.1]]
    for scheduler in schedules.values():
        scheduler.optimizer.step()
        scheduler.step()
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in (grown, other)]
    assert rates == [[0.025, 0.05], [0.05]]


def test_a_candidate_never_replaces_the_good_one_by_itself():
    model, optimizer = make("sgd")
    snapshots = Snapshots(model, [optimizer])
    snapshots.capture(1)
    with pytest.raises(RuntimeError, match="no good state"):
        snapshots.restore()
    snapshots.promote()
    good = model[0].weight.clone()
    for label in (2, 3):
        with torch.no_grad():
            model[0].weight.fill_(float(label))
        snapshots.capture(label)
    assert snapshots.restore() == 1 and torch.equal(model[0].weight, good)
    assert snapshots.candidate is None, "the candidate came from what was undone"


def test_host_memory_is_reused():
    model, optimizer = make("adamw")
    snapshots = Snapshots(model, [optimizer])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    train(model, optimizer, scheduler, 1)
    places = set()
    for label in range(6):
        snapshots.capture(label)
        places.add(snapshots.candidate.tensors["parameter.0.weight"].data_ptr())
        snapshots.promote()
    assert len(places) == 2


def test_parameters_that_only_an_optimizer_has_come_back():
    model = nn.Linear(4, 2)
    weighting = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([*model.parameters(), weighting], 1e-2)
    snapshots = Snapshots(model, [optimizer])

    def train() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            (model(torch.ones(4)) * weighting.exp()).square().sum().backward()
            optimizer.step()

    train()
    before = weighting.clone()
    snapshots.capture()
    snapshots.promote()
    optimizer.param_groups[0]["params"].insert(0, nn.Parameter(torch.ones(3)))
    train()
    snapshots.restore()
    assert torch.equal(weighting, before) and optimizer.state[weighting]["step"] == 2


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def of_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors)")
@pytest.mark.parametrize(
    "make_buffer", [lambda: torch.eye(3).to_sparse_csr(), nested, of_inference_mode, lambda: torch.ones(3).expand(2, 3)]
)
def test_buffers_that_cannot_be_written_come_back_whole(make_buffer):
    model, optimizer = make("adamw")
    model.register_buffer("mask", mask := make_buffer())
    model.register_buffer("average", torch.zeros(2, 3))
    snapshots = Snapshots(model, [optimizer])
    snapshots.capture()
    snapshots.promote()
    model.average = torch.ones(3).expand(2, 3)
    for other in (mask, make_buffer(), torch.zeros(2, 3)):
        model.mask = other
        snapshots.restore()
        assert model.mask is mask and torch.equal(model.average, torch.zeros(2, 3))


@pytest.fixture
def alone(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("gathered", [(), ("captured",), ("promoted",), ("captured", "promoted")])
@pytest.mark.parametrize("reshard_after_forward", [None, False])
def test_shards_come_back_though_the_weights_were_gathered(alone, gathered, reshard_after_forward):
    """As by a forward without a backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for module in (model[0], model):
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=reshard_after_forward)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    shards = list(model.parameters())

    def forward(when: str) -> torch.Tensor:
        with torch.no_grad():
            made = model(torch.ones(1, 4))
        if when not in gathered:
            for module in (model[0], model):
                module.reshard()
        return made

    before, weights = forward("captured"), [shard.to_local().clone() for shard in shards]
    snapshots = Snapshots(model, [optimizer])
    snapshots.capture()
    snapshots.promote()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        shards[-1].fill_(float("nan"))
    forward("promoted")
    assert snapshots.drop_incomplete() == []
    snapshots.restore()
    assert all(torch.equal(shard.to_local(), weight) for shard, weight in zip(shards, weights, strict=True))
    assert torch.equal(forward(*gathered[:1] or ("restored",)), before)
    guard = StepGuard(model, [optimizer])
    assert guard.judges[0].layout.parameters == ["0.weight", "0.bias", "1.weight", "1.bias"]


class Waits:
    """Something whose ``state_dict`` would wait for the device."""

    def __init__(self, inner) -> None:
        self.live_state, self.load_state_dict = inner.live_state, inner.load_state_dict

    def state_dict(self):
        raise AssertionError("a snapshot must not wait for the device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_scales_and_statistics_come_back_without_a_wait(device):
    torch.manual_seed(0)
    model = convert_model(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)).to(device), "delayed")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    statistics = SpikeStatistics(Thresholds(window=8, warmup=2), device)
    batches = torch.randn(8, 16, 16, device=device)

    def train() -> None:
        for batch in batches:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step(model)
            statistics.update(torch.stack((loss.detach(), loss.detach())), torch.ones((), dtype=torch.bool).to(device))

    def state() -> list[torch.Tensor]:
        fp8 = conversions(model)[0].state_dict()["runtime"]
        ring = statistics.state_dict()
        found = [fp8["table"]["data"], fp8["history"], fp8["position"], ring["values"], ring["count"]]
        return [*found, *(p.detach().cpu().clone() for p in model.parameters())]

    train()
    snapshots = Snapshots(model, [optimizer], {"fp8": Waits(FP8Layers(model)), "statistics": Waits(statistics)})
    before = state()
    sync = torch.cuda.set_sync_debug_mode if device == "cuda" else lambda mode: None
    snapshots.capture()  # Pinned memory is allocated once, which waits.
    sync("error")
    try:
        snapshots.capture()
    finally:
        sync("default")
    snapshots.promote()
    train()
    after = state()
    snapshots.restore()
    assert all(torch.equal(one, other) for one, other in zip(state(), before, strict=True))
    train()
    assert all(torch.equal(one, other) for one, other in zip(state(), after, strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    snapshots.restore()
    assert all(torch.equal(one, other) for one, other in zip(state(), before, strict=True)), "again"
