from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fp8.recovery.spikes import MAD_TO_SIGMA, SpikeStatistics, Thresholds
from lightning_fp8.recovery.verdict import Judge, Layout

NAN, INF = math.nan, math.inf
YES, NO = torch.tensor(True), torch.tensor(False)


def make_judge(parameters: int = 2, layers: tuple[str, ...] = (), **thresholds) -> Judge:
    weights = [torch.nn.Parameter(torch.zeros(3)) for _ in range(parameters)]
    return Judge(weights, Layout([f"p{i}" for i in range(parameters)], layers), Thresholds(**thresholds))


def judge(judge: Judge, loss: float | None, grads: list[float], **more) -> tuple[bool, object]:
    for parameter, value in zip(judge.parameters, grads, strict=True):
        parameter.grad = torch.tensor([value, 0.0, 0.0])
    flag = judge.judge(torch.tensor(loss) if loss is not None else None, **more)
    assert flag.dtype == torch.bool and flag.shape == ()
    return bool(flag), judge.layout.findings(judge.message, judge.scores, judge.thresholds)


@given(st.lists(st.floats(-100, 100, width=32), min_size=4, max_size=40), st.floats(-100, 100, width=32))
@settings(max_examples=60)
def test_score_is_median_and_mad_of_the_last_window(values, new):
    stats = SpikeStatistics(Thresholds(window=8, warmup=4, floor=0.0))
    for value in values:
        stats.update(torch.tensor([value, 1.0]), YES)
    last = values[-8:]
    median = statistics.median_low(last)
    deviation = statistics.median_low(abs(torch.tensor(v) - torch.tensor(median)).item() for v in last)
    expected = (new - median) / max(MAD_TO_SIGMA * deviation, torch.finfo(torch.float32).tiny)
    score = stats.score(torch.tensor([new, 1.0]))
    assert score[0].item() == pytest.approx(torch.tensor(expected).item(), rel=1e-4, abs=1e-4)
    assert score[1] == 0


def test_rejected_values_never_enter():
    stats, twin = (SpikeStatistics(Thresholds(window=4, warmup=2)) for _ in range(2))
    for value in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0):
        for each in (stats, twin):
            each.update(torch.tensor([value, value]), YES)
        stats.update(torch.tensor([NAN, 1e9]), NO)
        stats.update(torch.tensor([INF, INF]), NO)
    assert torch.equal(stats.values, twin.values) and stats.count == twin.count == 6
    assert sorted(stats.values[0].tolist()) == [3.0, 4.0, 5.0, 6.0]


def test_nothing_is_a_spike_in_the_warmup():
    judge_ = make_judge(warmup=4, window=8)
    for loss in (1.0, 1e6, 1.0, 1.0):
        assert not judge(judge_, loss, [1.0, 1.0])[0]
    assert judge(judge_, 1e6, [1.0, 1.0])[0]


def test_statistics_resume():
    stats = SpikeStatistics(Thresholds(window=4, warmup=2))
    for value in (1.0, 2.0, 4.0):
        stats.update(torch.tensor([value, value]), YES)
    twin = SpikeStatistics(stats.thresholds)
    twin.load_state_dict(stats.state_dict())
    assert torch.equal(stats.score(torch.tensor([9.0, 9.0])), twin.score(torch.tensor([9.0, 9.0])))
    other = SpikeStatistics(Thresholds(window=5, warmup=2))
    other.load_state_dict(stats.state_dict())
    assert other.count == 0


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_loss_that_is_not_finite(bad):
    rejected, finding = judge(make_judge(), bad, [1.0, 1.0])
    assert rejected and [(c.what, c.where, c.ranks) for c in finding.culprits] == [("nonfinite", "loss", (0,))]
    assert not finding.finite


@pytest.mark.parametrize("bad", [NAN, INF])
def test_findings_tell_nan_from_inf(bad):
    judge_ = make_judge(2, ("a",))
    amax, last = torch.tensor([[1.0, bad, 1.0]]), torch.ones(1, 3)
    rejected, finding = judge(judge_, -bad, [1.0, bad], amax=amax, last_amax=last, batch=torch.tensor(bad))
    assert rejected and [c.where for c in finding.culprits] == ["batch", "a", "loss", "p1"]
    told = [c.value for c in finding.culprits] + [finding.loss, finding.grad_norm]
    assert all(math.isnan(value) if math.isnan(bad) else value == INF for value in told), told


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_gradient_that_is_not_finite_is_named(bad):
    rejected, finding = judge(make_judge(3), 1.0, [1.0, bad, 1.0])
    assert rejected and [(c.where, c.role) for c in finding.culprits] == [("p1", "gradient")]


def test_of_bad_gradients_the_last_is_the_cause():
    _, finding = judge(make_judge(3), 1.0, [NAN, NAN, 1.0])
    assert [c.where for c in finding.culprits] == ["p1", "p0"]


def test_thresholds_may_be_ints_of_any_size():
    verdict = make_judge(spike=10**30, floor=10**30, warmup=2, window=4)
    assert [judge(verdict, loss, [1.0, 1.0])[0] for loss in (1.0, 1.0, 1.0, 50.0)] == [False] * 4


def test_a_nan_never_poisons_later_verdicts():
    judge_ = make_judge(warmup=4, window=8)
    for _ in range(6):
        assert not judge(judge_, 1.0, [1.0, 1.0])[0]
    assert judge(judge_, NAN, [NAN, NAN])[0]
    for _ in range(10):
        assert not judge(judge_, 1.0, [1.0, 1.0])[0]


def test_spikes_of_loss_and_gradient_norm_are_told_apart():
    judge_ = make_judge(warmup=4, window=8, spike=5.0)
    for step in range(6):
        rejected, finding = judge(judge_, 1.0 + 0.01 * step, [3.0, 4.0])
        assert not rejected and finding.grad_norm == 5.0
    rejected, finding = judge(judge_, 10.0, [3.0, 4.0])
    assert rejected and finding.finite and [(c.what, c.where) for c in finding.culprits] == [("spike", "loss")]
    rejected, finding = judge(judge_, 1.0, [300.0, 4.0])
    assert rejected and [(c.what, c.where) for c in finding.culprits] == [("spike", "grad_norm")]
    assert finding.grad_norm == pytest.approx(300.0, rel=1e-3)
    # A spike must not widen sigma for the next one.
    assert judge(judge_, 10.0, [3.0, 4.0])[0]
    assert not judge(judge_, 0.1, [3.0, 4.0])[0], "falling is no spike"


def test_a_flat_curve_does_not_make_noise_a_spike():
    judge_ = make_judge(warmup=4, window=8)
    for _ in range(8):
        judge(judge_, 2.0, [1.0, 1.0])
    assert not judge(judge_, 2.5, [1.2, 1.0])[0]


def test_spike_check_can_be_switched_off():
    judge_ = make_judge(warmup=4, window=8, spike=None)
    for _ in range(8):
        judge(judge_, 2.0, [1.0, 1.0])
    assert not judge(judge_, 2e9, [1e9, 1.0])[0]


def test_missing_gradients_count_as_none():
    judge_ = make_judge(3)
    judge_.parameters[1].grad = torch.tensor([3.0, 0.0, 4.0])
    assert not judge_.judge(torch.tensor(1.0))
    assert judge_.layout.findings(judge_.message, judge_.scores, judge_.thresholds).grad_norm == 5.0
    judge_.parameters[1].grad = torch.tensor([NAN, 0.0, 4.0])
    assert judge_.judge(torch.tensor(1.0))
    finding = judge_.layout.findings(judge_.message, judge_.scores, judge_.thresholds)
    assert [c.where for c in finding.culprits] == ["p1"]


def amaxes(**bad: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables of three layers; ``a_input=nan`` puts a NaN there."""
    amax, last = torch.ones(3, 3), torch.ones(3, 3)
    for key, value in bad.items():
        layer, role = key.split("_", 1)
        amax["abc".index(layer), ["input", "weight", "grad_output"].index(role)] = value
    return amax, last


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        ({"a_input": NAN, "b_input": NAN, "c_input": NAN, "a_grad_output": NAN}, ("a", "input")),
        ({"b_input": NAN, "c_input": INF, "a_grad_output": NAN}, ("b", "input")),
        ({"b_weight": NAN, "c_input": NAN, "a_grad_output": NAN}, ("b", "weight")),
        ({"c_grad_output": INF, "b_grad_output": NAN, "a_grad_output": NAN}, ("c", "grad_output")),
        ({"a_grad_output": NAN}, ("a", "grad_output")),
    ],
)
def test_the_first_operand_is_the_cause(bad, cause):
    judge_ = make_judge(2, ("a", "b", "c"))
    amax, last = amaxes(**bad)
    rejected, finding = judge(judge_, 1.0, [1.0, 1.0], amax=amax, last_amax=last)
    first = finding.culprits[0]
    assert rejected and (first.where, first.role) == cause and first.ranks == (0,)
    assert finding.layers[0] == cause[0]


def test_an_amax_that_jumps_is_named_and_a_new_one_does_not_jump():
    judge_ = make_judge(2, ("a", "b", "c"), amax_jump=100.0)
    amax, last = amaxes(b_grad_output=1e4)
    for _ in range(5):
        assert not judge(judge_, 1.0, [1.0, 1.0], amax=amax, last_amax=last)[0], "the first steps may"
    rejected, finding = judge(judge_, 1.0, [1.0, 1.0], amax=amax, last_amax=last)
    first = finding.culprits[0]
    assert rejected and (first.what, first.where, first.role) == ("amax_jump", "b", "grad_output")
    assert first.value == 1e4 and finding.finite
    for before in (0.0, -1.0):
        last[1, 2] = before
        assert not judge(judge_, 1.0, [1.0, 1.0], amax=amax, last_amax=last)[0]
    amax[1, 2], last[1, 2] = -1.0, 1.0
    assert not judge(judge_, 1.0, [1.0, 1.0], amax=amax, last_amax=last)[0], "not seen in this step"


def test_a_batch_with_nan_is_named_but_no_fault_by_itself():
    judge_ = make_judge()
    assert not judge(judge_, 1.0, [1.0, 1.0], batch=torch.tensor(NAN))[0]
    rejected, finding = judge(judge_, NAN, [1.0, NAN], batch=torch.tensor(NAN))
    assert rejected and finding.culprits[0].where == "batch"


def test_rejection_by_the_user_is_deliberate():
    rejected, finding = judge(make_judge(), 1.0, [1.0, 1.0], rejected=1)
    assert rejected and finding.deliberate and finding.culprits[0].what == "rejected"
    assert judge(make_judge(), 1.0, [1.0, 1.0], rejected=2)[1].culprits[0].what == "no_loss"


def test_all_ranks_that_reject_are_named():
    layout = Layout(["p"], ranks=3)
    message = torch.zeros(sum(layout.sizes))
    layout.split(message)[3].copy_(torch.tensor([2.0, 1.0, 1.0]))
    finding = layout.findings(message, torch.zeros(2), Thresholds())
    assert [(c.what, c.ranks) for c in finding.culprits] == [("rejected", (1, 2)), ("no_loss", (0,))]


def test_a_rank_without_gradients_is_at_fault_only_where_another_has_some():
    layout = Layout(["p"], ranks=2)
    for codes, culprits in (((4.0, 0.0), [("no_loss", (0,))]), ((4.0, 4.0), []), ((4.0, 1.0), ["rejected", "no_loss"])):
        message = torch.zeros(sum(layout.sizes))
        layout.split(message)[3].copy_(torch.tensor(codes))
        found = layout.findings(message, torch.zeros(2), Thresholds()).culprits
        assert [(c.what, c.ranks) if len(culprits) == 1 else c.what for c in found] == culprits
    judge_ = make_judge()
    assert not judge(judge_, 1.0, [0.0, 0.0], rejected=4)[0] and judge_.statistics.count == 0
    assert not judge(judge_, 1.0, [1.0, 1.0])[0] and judge_.statistics.count == 1
    ill = torch.tensor(True)
    assert judge(judge_, 1.0, [0.0, 0.0], rejected=4, unhealthy=ill)[1].culprits[0].what == "health"


def test_overflow_of_a_scaled_loss_is_told_from_a_fault():
    judge_ = make_judge()
    judge(judge_, 1.0, [INF, 1.0])
    finding = judge_.layout.findings(judge_.message, judge_.scores, judge_.thresholds, loss_scaled=True)
    assert finding.overflow
    judge(judge_, NAN, [NAN, 1.0])
    finding = judge_.layout.findings(judge_.message, judge_.scores, judge_.thresholds, loss_scaled=True)
    assert not finding.overflow


@pytest.mark.parametrize(
    "bad",
    [
        {"spike": 0.5},
        {"spike": NAN},
        {"amax_jump": 1.0},
        {"window": 2},
        {"warmup": 1},
        {"warmup": 200},
        {"floor": -0.1},
    ],
)
def test_bad_thresholds_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Thresholds(**bad)
