"""The judgement on the device: what is called trouble, when, and which operand is first."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fp8.health import KINDS, Health, HealthEvent, HealthLimits
from lightning_fp8.history import ThinnedHistory, capacity_for
from lightning_fp8.recipes import ROLES

NAMES = ["a", "b", "c", "d"]


class Run:
    """Steps of a Health, with the events of each."""

    def __init__(self, limits: HealthLimits | None = None, cap: float = math.inf) -> None:
        self.health = Health(range(len(NAMES)), torch.full((4, 3), cap), limits or HealthLimits())
        self.step = 0

    def __call__(self, amax: Tensor, scale: float = 0.0, kept: bool = True) -> list[HealthEvent]:
        _, message = self.health.observe(amax, torch.full_like(amax, scale))
        self.health.commit(torch.tensor(kept))
        self.step += 1
        return self.health.events(self.health.unpack(message), NAMES, self.step - 1)

    def settle(self, steps: int = 12) -> Run:
        for _ in range(steps):
            assert self(torch.ones(4, 3)) == []
        return self


def planted(layer: int, role: int, value: float) -> Tensor:
    amax = torch.ones(4, 3)
    amax[layer, role] = value
    return amax


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("role", range(3))
@pytest.mark.parametrize("layer", [0, 2, 3])
def test_one_bad_operand_is_named(layer: int, role: int, value: float) -> None:
    (event,) = Run()(planted(layer, role, value))
    assert (event.kind, event.step, event.layer, event.role, event.ranks) == (
        "nonfinite", 0, NAMES[layer], ROLES[role], (0,),
    )  # fmt: skip
    assert math.isnan(event.amax) == math.isnan(value)
    assert event.direction == ("backward" if role == 2 else "forward")


def test_forward_is_before_backward_and_backward_runs_in_reverse() -> None:
    amax = torch.ones(4, 3)
    amax[:3, 2] = math.nan
    (event,) = Run()(amax)
    assert (event.layer, event.role, event.count) == ("c", "grad_output", 3)
    assert event.others == ("b/grad_output", "a/grad_output")
    amax[3, 1] = math.inf
    (event,) = Run()(amax)
    assert (event.layer, event.role) == ("d", "weight")


def test_the_order_of_execution_decides() -> None:
    run = Run()
    run.health.set_positions([3, 0, 1, 2])
    amax = torch.ones(4, 3)
    amax[[0, 2], 0] = math.nan
    (event,) = run(amax)
    assert event.layer == "c"


def test_a_jump_is_a_spike_and_a_slow_drift_is_not() -> None:
    run = Run().settle()
    (event,) = run(planted(1, 0, 4.0))
    assert (event.kind, event.layer, event.role, event.amax, event.reference) == ("spike", "b", "input", 4.0, 1.0)
    run = Run()
    for number in range(100):
        assert run(torch.full((4, 3), 1.02**number)) == []


def test_a_lasting_jump_is_one_event_and_a_later_one_is_another() -> None:
    run = Run().settle()
    events = [event for _ in range(30) for event in run(planted(1, 0, 4.0))]
    assert len(events) == 1
    assert len(run(planted(1, 0, 20.0))) == 1


@pytest.mark.parametrize(("sigmas", "reports"), [(6.0, False), (None, True)])
def test_what_an_operand_is_used_to_is_no_spike(sigmas: float | None, reports: bool) -> None:
    run = Run(HealthLimits(sigmas=sigmas, drift=None))
    noise = torch.Generator().manual_seed(0)
    events = []
    for _ in range(300):
        amax = torch.ones(4, 3)
        amax[0, 2] = torch.exp2(torch.randn((), generator=noise))
        events += run(amax)
    assert bool(events) == reports
    # The quiet ones are watched as closely as ever, and a leap that is large even for the noisy one is told.
    assert [event.layer for event in run(planted(1, 0, 4.0))] == ["b"]
    assert [event.layer for event in run(planted(0, 2, 1e6))] == ["a"]


@pytest.mark.parametrize("power", [1, 2, 3])
def test_growth_from_zero_is_no_spike_and_a_jump_during_it_is(power: int) -> None:
    """A matrix that begins at zero, such as LoRA's second, under a learning rate that warms up."""
    run = Run()
    for step in range(60):
        assert run(planted(1, 1, step**power / 1000)) == [], step
    grown = Run()
    for step in range(12):
        assert grown(planted(1, 1, step**power / 1000)) == []
    (event,) = grown(planted(1, 1, 3.5 * 11**power / 1000))
    assert (event.kind, event.layer, event.role) == ("spike", "b", "weight")


def test_nothing_is_a_spike_before_the_window_is_full() -> None:
    run = Run()
    for number in range(10):
        assert run(torch.full((4, 3), 10.0**number)) == []


def test_bad_samples_do_not_enter_the_mean() -> None:
    run = Run().settle()
    before = run.health.ring.clone()
    run(planted(0, 0, math.nan))
    run(torch.full((4, 3), 2.0), kept=False)
    assert torch.equal(run.health.ring[0, 0], before[0, 0])
    assert run.health.ring.max() == 1.0


def test_operands_that_were_not_seen_keep_their_history() -> None:
    run = Run().settle()
    count = run.health.count.clone()
    run(planted(2, 1, -1.0))
    assert run.health.count[2, 1] == count[2, 1] and run.health.count[0, 0] == count[0, 0] + 1


def test_zero_gradients_are_reported_after_some_patience_and_once() -> None:
    run = Run(HealthLimits(patience=3))
    told = [(run.step - 1, event.kind, event.layer) for _ in range(8) for event in run(planted(3, 2, 0.0))]
    assert told == [(2, "zero_gradient", "d")]
    assert run(planted(3, 0, 0.0)) == []  # An input of zeros is no gradient.


def test_a_scale_at_its_cap_is_reported() -> None:
    run = Run(HealthLimits(patience=3), cap=100.0)
    assert [len(run(torch.ones(4, 3), scale)) for scale in (100.0, 100.0, 50.0, 100.0, 100.0)] == [0] * 5
    (event,) = run(torch.ones(4, 3), 100.0)
    assert (event.kind, event.count, event.reference) == ("scale_at_cap", 12, 100.0)


def test_drift_over_many_steps_is_its_own_event() -> None:
    run = Run(HealthLimits(drift=3.0))
    kinds = [event.kind for number in range(400) for event in run(torch.full((4, 3), 1.02**number))]
    assert kinds == ["drift"]
    run = Run(HealthLimits(drift=None))
    assert not [event for number in range(400) for event in run(torch.full((4, 3), 1.02**number))]


def test_observing_twice_before_a_step_counts_once() -> None:
    health = Health(range(4), torch.full((4, 3), math.inf), HealthLimits())
    for _ in range(3):
        health.observe(torch.ones(4, 3), torch.zeros(4, 3))
    health.commit()
    health.commit()
    assert (health.count == 1).all()


def test_memory_is_constant() -> None:
    run = Run(HealthLimits())
    sizes = []
    for _ in range(50):
        run(torch.rand(4, 3))
        sizes.append(sum(v.numel() for v in vars(run.health).values() if isinstance(v, Tensor)))
    assert len(set(sizes)) == 1


def test_history_goes_on_after_a_reload_with_other_layers() -> None:
    run = Run().settle()
    state = run.health.state_dict()
    other = Health(range(2), torch.full((2, 3), math.inf), HealthLimits())
    other.load_state_dict(state, [None, 1])
    assert (other.count[1] == 12).all() and (other.count[0] == 0).all()
    found, _ = other.observe(torch.tensor([[9.0] * 3, [9.0] * 3]), torch.zeros(2, 3))
    assert found.tolist() == [kind == "spike" for kind in KINDS]


def test_a_model_without_linear_layers_is_well() -> None:
    health = Health([], torch.zeros(0, 3), HealthLimits())
    found, message = health.observe(torch.zeros(0, 3), torch.zeros(0, 3))
    health.commit()
    assert not found.any() and health.events(health.unpack(message), [], 0) == []


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"spike": 1.0}, ValueError),
        ({"spike": math.nan}, ValueError),
        ({"spike": 10**400}, ValueError),
        ({"sigmas": 0.0}, ValueError),
        ({"window": 0}, ValueError),
        ({"window": 4.0}, TypeError),
        ({"patience": 0}, ValueError),
        ({"patience": 10.0}, TypeError),
        ({"horizon": 99}, ValueError),
        ({"horizon": 10**30}, ValueError),
        ({"drift": -1.0}, ValueError),
        ({"drift": True}, TypeError),
    ],
)
def test_limits_that_make_no_sense_are_refused(bad: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"^{next(iter(bad))} .*{re.escape(str(next(iter(bad.values()))))}"):
        HealthLimits(**bad)


def test_limits_may_be_ints_of_any_size() -> None:
    health = Health([0], torch.full((1, 3), math.inf), HealthLimits(10**30, 1, 10**30, 1, 10**30))
    for amax in (1.0, 2.0):
        found, _ = health.observe(torch.full((1, 3), amax), torch.zeros(1, 3))
        health.commit()
    assert not found.any()


def test_events_survive_as_plain_values() -> None:
    event = HealthEvent("spike", 3, "a", "input", (0, 1), 4.0, 1.0, ("b/input",), 2)
    assert HealthEvent.from_dict(event.to_dict()) == event
    assert "ranks 0, 1" in event.message() and "'a'" in event.message() and "4 times" in event.message()


def test_a_long_history_is_thinned_evenly() -> None:
    history = ThinnedHistory((2,), capacity=8)
    for number in range(1000):
        history.append(number, torch.tensor([float(number), -1.0]))
        assert len(history) <= 8
    steps = history.steps.tolist()
    assert {b - a for a, b in pairwise(steps)} == {history.stride}
    assert history.values[:, 0].tolist() == steps and steps[-1] >= 1000 - 2 * history.stride
    again = ThinnedHistory((2,), capacity=8)
    again.load_state_dict(history.state_dict())
    for other in (history, again):
        other.append(1000, 5.0)
    assert torch.equal(again.steps, history.steps) and torch.equal(again.values, history.values)
    assert capacity_for((10_000, 3, 2), 256) < 100


def test_ten_thousand_layers() -> None:
    count = 10_000
    health = Health(range(count), torch.full((count, 3), math.inf), HealthLimits())
    amax = torch.ones(count, 3)
    amax[count - 1, 0] = math.nan
    _, message = health.observe(amax, torch.zeros(count, 3))
    health.commit()
    (event,) = health.events(health.unpack(message), [f"layer {n}" for n in range(count)], 0)
    assert (event.layer, event.role) == ("layer 9999", "input")
