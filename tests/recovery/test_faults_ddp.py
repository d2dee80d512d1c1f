"""Every fault on one of two ranks."""

from __future__ import annotations

import signal
import statistics

import pytest
import torch
from ddp_runs import (
    GIVING_UP,
    QUICK,
    RANKS,
    SHARDED,
    everything,
    load_ranks,
    one_run,
    over_nccl,
    run_ranks,
    start_ranks,
)
from fault_table import SCENARIOS, Fault, check


@pytest.fixture(scope="module")
def ranks(made_once):
    return load_ranks(made_once("ddp", lambda directory: run_ranks(directory, everything, QUICK)))


@pytest.fixture(scope="module")
def more_ranks(made_once):
    names = tuple(name for name in SCENARIOS if name not in QUICK)
    return load_ranks(made_once("ddp-more", lambda directory: run_ranks(directory, everything, names)))


def equal_on_all(ranks, name) -> bool:
    one, two = (rank[name].weights for rank in ranks)
    return all(torch.equal(one[key], two[key]) for key in one)


def without_samples(events) -> list[dict]:
    """Those are looked up on rank 0 only."""
    return [{key: value for key, value in event.items() if key != "samples"} for event in events]


@pytest.mark.parametrize("name", QUICK)
def test_fault_on_rank_one(name, ranks):
    check_on_rank_one(name, ranks)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in QUICK])
def test_other_fault_on_rank_one(name, more_ranks):
    check_on_rank_one(name, more_ranks)


def check_on_rank_one(name, ranks):
    scenario = SCENARIOS[name]
    clean = ("clean", repr(scenario.fp8), scenario.optimizer, repr(scenario.settings))
    losses = [ranks[0][(*clean, seed)].loss for seed in (7, 8)]
    without, with_recovery = ranks[0][f"{name}/False"], ranks[0][f"{name}/True"]
    print(f"{name}: clean {losses[0]:.5f}, without {without.loss:.5f}, with {with_recovery.loss:.5f}")
    check(losses[0], statistics.stdev(losses), without, with_recovery, scenario)
    assert equal_on_all(ranks, f"{name}/True"), "the ranks stay bitwise equal"
    first = with_recovery.events[0]
    assert first["ranks"] == ([1] if scenario.ranks else [])
    assert ranks[1][f"{name}/True"].events == without_samples(with_recovery.events), "all ranks decide alike"


@pytest.mark.gpu
@pytest.mark.parametrize("name", QUICK)
def test_fault_on_rank_one_over_nccl(name, made_once):
    if torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs {RANKS} GPUs")
    ranks = load_ranks(made_once("nccl", lambda directory: run_ranks(directory, over_nccl, QUICK)))
    clean, result = ranks[0][f"{name}/False"], ranks[0][f"{name}/True"]
    assert result.error == "" and result.loss <= clean.loss * 1.02
    assert equal_on_all(ranks, f"{name}/True"), "the ranks stay bitwise equal"
    first = result.events[0]
    assert (first["verdict"], first["layer"], first["role"]) == SCENARIOS[name].verdict
    assert first["ranks"] == ([1] if SCENARIOS[name].ranks else [])
    assert ranks[1][f"{name}/True"].events == without_samples(result.events), "all ranks decide alike"


@pytest.mark.parametrize("name", SHARDED)
def test_fault_on_a_sharded_model(name, ranks):
    scenario = SCENARIOS[name]
    clean, result = ranks[0]["clean", "None", "adamw", "{}", 7].loss, ranks[0][f"sharded/{name}"]
    assert result.error == "" and result.loss <= clean * 1.02
    assert equal_on_all(ranks, f"sharded/{name}")
    first = result.events[0]
    assert (first["verdict"], first["layer"], first["role"]) == scenario.verdict
    assert first["ranks"] == ([1] if scenario.ranks else [])


def test_a_sharded_model_that_was_validated_first_goes_back(ranks):
    for rank in ranks:
        result = rank["sharded-itself"]
        assert result.error == "" and [event["event"] for event in result.events] == ["rejected", "rewind"]
        assert result.events[0]["layer"] == "net.2.weight" and all(w.isfinite().all() for w in result.weights.values())
    assert equal_on_all(ranks, "sharded-itself")


@pytest.mark.parametrize("name", GIVING_UP)
def test_ranks_can_leave_a_batch_out(name, ranks):
    for rank in range(RANKS):
        result = ranks[rank][name]
        assert result.error == ""
        rejected = [event for event in result.events if event["event"] == "rejected"]
        assert [(event["batches"], event["action"]) for event in rejected] == [([5], "skip")]
        assert rejected[0]["verdict"] == "rejected"
    assert equal_on_all(ranks, name)
    assert ranks[0][name].loss == pytest.approx(ranks[0]["clean-guarded"].loss, rel=0.02)


def test_a_clean_run_is_not_touched(ranks):
    clean = ranks[0]["clean", "None", "adamw", "{}", 7]
    guarded = ranks[0]["clean-guarded"]
    assert guarded.events == [] and clean.weights.keys() == guarded.weights.keys()
    assert all(torch.equal(clean.weights[key], guarded.weights[key]) for key in clean.weights)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_is_killed_takes_the_others_with_it_and_all_resume(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    fault = Fault("batch", 12, rank=0)
    expected = run_ranks(whole, one_run, [fault])
    codes = start_ranks(killed, one_run, [fault, Fault("kill", 27, rank=1)])
    assert codes[1] == -signal.SIGKILL and codes[0] not in (0, None), "no rank hangs"
    resumed = run_ranks(killed, one_run, [fault])
    assert max(int(path.stem.split("=")[1]) for path in killed.glob("*.ckpt")) == 96
    assert equal_on_all(resumed, "run")
    for rank in range(RANKS):
        mine, theirs = resumed[rank]["run"], expected[rank]["run"]
        assert all(torch.equal(mine.weights[key], theirs.weights[key]) for key in theirs.weights)
