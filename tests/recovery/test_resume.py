"""Killed at random points and resumed, a run must be bit for bit the one that was never killed."""

from __future__ import annotations

import functools
import random
import shutil
import signal

import pytest
import torch
from resume_runs import EVERY, STEPS, in_a_process
from torch.utils import _pytree

from lightning_fp8.callbacks.fault_injector import Fault
from lightning_fp8.recovery.events import read_events

KILLS = sorted(random.Random(5).sample(range(EVERY + 1, STEPS - 1), 10))
LEFT_TO_SLOW = KILLS[1::3]


@pytest.fixture(scope="module")
def whole(made_once):
    """The uninterrupted runs, by optimizer."""

    def run(optimizer, directory):
        assert in_a_process(directory, optimizer, None, False, directory / "saves") == 0

    return {
        optimizer: made_once(f"whole-{optimizer}", functools.partial(run, optimizer))
        for optimizer in ("adamw", "adamw-fused")
    }


def differences(one, other) -> list[str]:
    mine, theirs = (dict(_pytree.tree_flatten_with_path(tree)[0]) for tree in (one, other))
    assert mine.keys() == theirs.keys()
    return [
        _pytree.keystr(path)
        for path, value in mine.items()
        if not (torch.equal(value, theirs[path]) if torch.is_tensor(value) else value == theirs[path])
    ]


def essential(events: list[dict]) -> list[dict]:
    return [event for event in events if event["event"] in ("rejected", "rewind", "fall_back")]


@pytest.mark.parametrize(
    "kill_at", [pytest.param(step, marks=pytest.mark.slow) if step in LEFT_TO_SLOW else step for step in KILLS]
)
def test_resume_is_bit_identical(whole, tmp_path, kill_at):
    optimizer = "adamw-fused" if kill_at % 2 else "adamw"
    kill = Fault("kill", kill_at)
    assert in_a_process(tmp_path, optimizer, kill, False, tmp_path / "saves") == -signal.SIGKILL
    check_resumed(whole, tmp_path, optimizer, kill_at)


def test_resume_after_an_exception(whole, tmp_path):
    assert in_a_process(tmp_path, "adamw", Fault("exception", 29), False, tmp_path / "saves") == 1
    assert "exception" in [event["event"] for event in read_events(tmp_path / "events.jsonl")]
    check_resumed(whole, tmp_path, "adamw", 29)


def check_resumed(whole, tmp_path, optimizer, ended_at):
    assert not (tmp_path / "end.pt").exists()
    assert in_a_process(tmp_path, optimizer, None, True, tmp_path / "saves") == 0
    end = torch.load(tmp_path / "end.pt", weights_only=False)
    expected = torch.load(whole[optimizer] / "end.pt", weights_only=False)
    assert 0 < end.pop("resumed_from") <= ended_at and expected.pop("resumed_from") == 0
    assert differences(end, expected) == []
    # The log goes on: what came after the checkpoint stands in it twice.
    events, expected_events = (
        essential(read_events(tmp_path / "events.jsonl")),
        essential(read_events(whole[optimizer] / "events.jsonl")),
    )
    assert all(event in events for event in expected_events) and all(event in expected_events for event in events)
    shutil.rmtree(tmp_path / "saves")


def test_the_run_had_something_to_recover_from(whole):
    for directory in whole.values():
        events = essential(read_events(directory / "events.jsonl"))
        steps = [event["step"] for event in events if event["event"] == "rejected"]
        assert steps == [5, 6, 15, 21, 33, 44, 49] or steps == [5, 6, 15, 21, 22, 33, 44, 49]
        assert [event["event"] for event in events].count("rewind") == 1
