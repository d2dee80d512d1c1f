"""The arithmetic of the accuracy gate."""

from __future__ import annotations

import math

import pytest

from examples.gpt.gate import Noise, Run, count_spikes, judge


def runs(finals: list[float], spikes: int = 0) -> list[Run]:
    return [Run(seed, [9.0, *[final] * 5], spikes) for seed, final in enumerate(finals)]


BF16 = runs([2.0, 2.02, 1.98, 2.01, 1.99, 2.0, 2.03, 1.97])


def test_a_final_loss_is_the_mean_of_the_last_five_validations():
    assert Run(0, [5.0, 1.0, 2.0, 3.0, 4.0, 5.0], 0).final == 3.0
    with pytest.raises(ValueError, match="5 validations"):
        Run(0, [1.0] * 4, 0).final  # noqa: B018


def test_sigma_is_the_sample_deviation_of_at_least_eight_runs():
    noise = Noise.of(BF16)
    assert noise.loss == pytest.approx(2.0)
    assert noise.sigma == pytest.approx(0.02)  # sqrt((2 * 0.02**2 + 2 * 0.01**2 + 2 * 0.03**2) / 7)
    with pytest.raises(ValueError, match="at least 8"):
        Noise.of(BF16[:7])
    with pytest.raises(ValueError, match="diverged"):
        Noise.of([*BF16, Run(8, [math.nan] * 5, 0)])


def test_limit_and_number_of_seeds():
    noise = Noise(loss=2.0, sigma=0.02, runs=8)
    assert noise.limit(2) == pytest.approx(0.04)
    assert Noise(2.0, 1e-6, 8).limit(2) == pytest.approx(0.005)  # never below 0.25%
    needed = noise.seeds_needed()
    assert needed == 8
    assert noise.limit(needed) <= 0.01 * noise.loss < noise.limit(needed - 1)


def test_gaps_are_paired_by_seed():
    noise = Noise.of(BF16)
    shifted = [Run(run.seed, [value + 0.01 for value in run.validations], 0) for run in BF16]
    verdict = judge(shifted[::-1], BF16, noise)
    assert verdict.gaps == pytest.approx([0.01] * 8)
    assert verdict.spread == pytest.approx(0.0, abs=1e-9)
    assert verdict.passed


def test_a_large_gap_a_divergence_and_more_spikes_fail():
    noise = Noise.of(BF16)
    assert not judge(runs([2.1] * 8), BF16, noise).within_limit
    assert not judge(runs([math.nan, *[2.0] * 7]), BF16, noise).within_limit
    assert not judge(runs([math.inf, *[2.0] * 7]), BF16, noise).within_limit
    spiky = judge(runs([2.0] * 8, spikes=1), BF16, noise)
    assert spiky.within_limit and not spiky.passed


def test_spikes_are_counted_and_do_not_raise_the_bar():
    calm = [2.0 + 0.01 * (step % 7) for step in range(100)]
    assert count_spikes(calm) == 0
    assert count_spikes([*calm, 3.0, *calm, 3.0, math.nan, *calm]) == 3
