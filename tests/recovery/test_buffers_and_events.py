from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from lightning_fp8.recovery.buffers import MovedBuffers
from lightning_fp8.recovery.events import EventLog, read_events, rejected_batches


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.ones(5), persistent=False)
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.replaced = self.replaced + 1
        return x * self.table[0]


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), Counting(), nn.utils.parametrizations.spectral_norm(nn.Linear(6, 2))
    )


def state(module: nn.Module) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in module.buffers()]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("steps_before", [0, 1, 4])
def test_what_forward_moved_is_put_back(on_device, steps_before):
    torch.manual_seed(0)
    module = model()
    buffers = MovedBuffers(module)
    for _ in range(steps_before):
        buffers.remember()
        module(torch.randn(8, 4))
        if on_device:
            buffers.restore(torch.tensor(False))
    before = state(module)
    buffers.remember()
    module(torch.full((8, 4), math.nan))
    assert not all(torch.equal(a, b) for a, b in zip(before, state(module), strict=True))
    buffers.restore(torch.tensor(True) if on_device else None)
    assert all(torch.equal(a, b) for a, b in zip(before, state(module), strict=True))


def test_an_accepted_step_moves_them_and_the_next_is_watched_again():
    module, twin = model(), model()
    twin.load_state_dict(module.state_dict())
    buffers = MovedBuffers(module)
    for step in range(5):
        data = torch.randn(8, 4)
        buffers.remember()
        module(data)
        buffers.restore(torch.tensor(False))
        twin(data)
        assert all(torch.equal(a, b) for a, b in zip(state(module), state(twin), strict=True)), step


def test_buffers_that_never_move_are_copied_once_only():
    module = model()
    buffers = MovedBuffers(module)
    for _ in range(3):
        buffers.remember()
        module(torch.randn(8, 4))
    kept = [id(owner._buffers[name]) for owner, name in buffers._kept]
    assert id(module[2].table) not in kept and id(module[1].running_mean) in kept and id(module[2].seen) in kept


def test_events_are_json_lines_and_survive_a_cut(tmp_path):
    path = tmp_path / "deep" / "events.jsonl"
    log = EventLog(path)
    log.add("rejected", epoch=0, batches=[3, 4], value=math.nan, loss=math.inf, samples=None, ranks=(0, 1))
    log.add("rewind", step=4)
    log.add("rejected", epoch=1, batches=[7], value=-math.inf)
    with path.open("a") as file:
        file.write('{"event": "rejec')
    events = read_events(path)
    assert events[0] == {
        "event": "rejected", "epoch": 0, "batches": [3, 4], "value": "nan", "loss": "inf", "ranks": [0, 1]
    }  # fmt: skip
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()[:3]] == [
        "rejected",
        "rewind",
        "rejected",
    ]
    assert rejected_batches(events) == {(0, 3), (0, 4), (1, 7)}
    assert log.counts == {"rejected": 2, "rewind": 1}
    tried = [
        {"event": "rejected", "epoch": 0, "batches": [9], "action": how} for how in ("retry", "loss_scale_lowered")
    ]
    assert rejected_batches(tried) == set() and rejected_batches([{**tried[0], "action": "rewind"}]) == {(0, 9)}
    twin = EventLog()
    twin.load_state_dict(log.state_dict())
    assert twin.counts == log.counts


def test_a_broken_log_is_refused(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('not json\n{"event": "x"}\n')
    with pytest.raises(ValueError, match="line 1"):
        read_events(path)
    path.write_text('{"event": "x"}\n{"loss": 1}\n')
    with pytest.raises(ValueError, match="line 2: not an event log"):
        read_events(path)


def test_memory_of_the_log_is_bounded_and_other_ranks_write_nothing(tmp_path):
    log = EventLog(tmp_path / "events.jsonl", writes=False)
    for step in range(3000):
        log.add("rejected", step=step)
    assert len(log.recent) == 1000 and log.recent[-1]["step"] == 2999 and log.counts["rejected"] == 3000
    assert not (tmp_path / "events.jsonl").exists()
