"""Layers in high precision fill the table like FP8 layers, and their values stay what they were."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fp8 import LayerSelection, convert_model, step
from lightning_fp8.recipes import ROLES, get_recipe
from lightning_fp8.statistics import AMAX, NOT_SEEN
from lightning_fp8.telemetry import Telemetry, history_entry, readout


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x), inplace=True))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(16, 16))


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    module.zero_grad()
    (module(x).square().sum()).backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def expected_amaxes(module: nn.Module, x: Tensor) -> dict[str, list[float]]:
    """Taken by hooks that this test writes itself."""
    seen: dict[str, list[float]] = {}
    handles = []
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):

            def look(layer: nn.Module, args: tuple[Tensor], output: Tensor, name: str = name) -> None:
                seen[name] = [args[0].abs().max().item(), layer.weight.abs().max().item(), 0.0]
                output.register_hook(lambda g: seen[name].__setitem__(2, g.abs().max().item()))

            handles.append(layer.register_forward_hook(look))
    gradients(module, x)
    for handle in handles:
        handle.remove()
    return seen


def test_amaxes_are_those_of_the_operands() -> None:
    net, x = model(), torch.randn(6, 16)
    expected = expected_amaxes(net, x)
    telemetry = Telemetry.attach(net)
    gradients(net, x)
    amax = telemetry.read()[..., AMAX]
    for row, name in enumerate(telemetry.names):
        assert amax[row].tolist() == pytest.approx(expected[name], rel=1e-6), name
    telemetry.release(net)


@pytest.mark.parametrize("compiled", [False, True])
def test_watching_changes_no_bit(compiled: bool) -> None:
    nets = [model() for _ in range(2)]
    for net in nets:
        convert_model(net, "delayed", layers=LayerSelection(include=["0.*"]))
    telemetry = Telemetry.attach(nets[0])
    runs = [torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net for net in nets]
    for number in range(3):
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(number))
        for first, second in zip(*(gradients(run, x) for run in runs), strict=True):
            assert torch.equal(first, second)
        for net in nets:
            step(net)
    assert (telemetry.read()[2:, :, AMAX] > 0).all()


def test_compiled_code_is_compiled_once_while_windows_move() -> None:
    torch._dynamo.reset()  # Other tests have compiled the same code for other models.
    net = model()
    telemetry = Telemetry.attach(net)
    run = torch.compile(net, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(4):
            telemetry.begin_batch()
            gradients(run, torch.randn(6, 16))
            telemetry.begin_optimizer_step()
            assert (telemetry.read()[..., AMAX] > 0).all()


def test_a_layer_switched_to_high_precision_is_still_seen() -> None:
    net, x = model(), torch.randn(6, 16)
    expected = expected_amaxes(net, x)
    convert_model(net, "delayed", layers=LayerSelection(head=True))
    telemetry = Telemetry.attach(net)
    runtime = telemetry.conversions[0].runtime
    runtime.set_enabled(["1.up"], False)
    gradients(net, x)
    row = telemetry.names.index("1.up")
    amax = telemetry.read()[row, :, AMAX].tolist()
    assert amax == pytest.approx(expected["1.up"], rel=0.2)
    assert min(amax) > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_values_propagate(bad: float) -> None:
    net, x = model(), torch.randn(6, 16)
    telemetry = Telemetry.attach(net)
    x[3, 2] = bad
    gradients(net, x)
    gradients(net, torch.randn(6, 16))  # A second, clean batch of the same window hides nothing.
    assert not telemetry.read()[0, 0, AMAX].isfinite()


def test_windows_begin_with_steps_and_evaluation_leaves_no_trace() -> None:
    net = model()
    telemetry = Telemetry.attach(net)
    telemetry.begin_batch()
    gradients(net, torch.randn(6, 16))
    before = telemetry.read()
    net.eval()
    net(torch.randn(6, 16) * 1000)
    assert torch.equal(telemetry.read(), before)
    net.train()
    telemetry.begin_batch()  # An accumulated batch.
    assert torch.equal(telemetry.read(), before)
    telemetry.begin_optimizer_step()
    assert torch.equal(telemetry.read(), before)
    telemetry.begin_batch()
    assert (telemetry.read()[..., AMAX] == NOT_SEEN).all()


def test_hooks_go_with_the_last_user() -> None:
    net = model()
    first, second = Telemetry.attach(net), Telemetry.attach(net)
    assert first is second
    first.release(net)
    assert any(layer._forward_hooks for layer in net.modules())
    second.release(net)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in net.modules())
    assert Telemetry.attach(net) is not first


def test_empty_and_nested_inputs() -> None:
    layer = nn.Sequential(nn.Linear(16, 16))
    telemetry = Telemetry.attach(layer)
    layer(torch.zeros(0, 16)).sum().backward()
    assert (telemetry.read()[0, [0, 2], AMAX] == NOT_SEEN).all()
    nested = torch.nested.nested_tensor([torch.ones(2, 16) * 3, torch.ones(1, 16) * 5], layout=torch.jagged)
    layer(nested)
    assert telemetry.read()[0, 0, AMAX] == 5
    # The memory holds more than the tensor.
    strided = torch.nested.nested_tensor([torch.ones(2, 16) * -7, torch.zeros(0, 16), torch.ones(1, 16) * 9])
    layer(strided.narrow(0, 0, 2))
    assert telemetry.read()[0, 0, AMAX] == 7


def test_headroom_is_the_distance_to_the_largest_value_of_the_format() -> None:
    net = model()
    convert_model(net, {"name": "delayed", "margin": 2.0}, layers=LayerSelection(include=["0.*"]))
    telemetry = Telemetry.attach(net)
    x = torch.randn(6, 16)
    gradients(net, x)
    step(net)
    gradients(net, x * 2)  # The scale was made for half of that.
    told = telemetry.readout(telemetry.read())
    assert told.headroom[0, ROLES.index("input")] == pytest.approx(1.0, abs=1e-3)
    assert told.headroom[0, ROLES.index("weight")] == pytest.approx(2.0, abs=1e-3)
    assert told.headroom[2:].isnan().all() and told.scale[2:].isnan().all()


def test_scales_of_data_follow_from_the_amax() -> None:
    net = model()
    convert_model(net, "rowwise", layers=LayerSelection(include=["0.*"]))
    telemetry = Telemetry.attach(net)
    gradients(net, torch.randn(6, 16))
    told = readout(telemetry.read(), telemetry.recipes)
    scale = told.scale[0, 0].item()
    assert scale == 2.0 ** (torch.log2(448 / told.amax[0, 0]).floor().item())
    assert 0 <= told.headroom[0, 0] < 1


def test_scales_of_microscaling_blocks_are_powers_of_two() -> None:
    data = torch.zeros(1, 3, 4)
    data[0, :, AMAX] = torch.tensor([3.0, 0.0, torch.inf])
    told = readout(data, [get_recipe("mxfp8")])
    assert told.scale[0, 0] == 128.0  # 448 / 3 is 149.3.
    assert told.headroom[0, 0] == pytest.approx(math.log2(448 / 384))
    assert history_entry(told)[0, :, 1].isinf().tolist() == [False, False, True]


def test_a_copied_model_does_not_write_into_the_first() -> None:
    net = model()
    telemetry = Telemetry.attach(net)
    other = copy.deepcopy(net)
    gradients(other, torch.randn(6, 16))
    assert (telemetry.read()[..., AMAX] == NOT_SEEN).all()


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    net = model()
    telemetry = Telemetry.attach(net)
    assert [telemetry.names[row] for row in telemetry.select("*.up")] == ["0.up", "1.up"]
    with pytest.raises(ValueError, match="matches no linear layer"):
        telemetry.select(["nothing.*"])
