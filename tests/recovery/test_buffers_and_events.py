from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations
from torch import nn

from lightning_fp8.files import located, why_not_writable
from lightning_fp8.recovery.buffers import MovedBuffers
from lightning_fp8.recovery.events import EventLog, batches_to_leave_out, read_events, rejected_batches


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
def test_what_the_first_forward_sets_from_its_data_without_counting_is_put_back(on_device):
    module = Counting()
    buffers = MovedBuffers(module)
    buffers.remember()
    module.table.data.fill_(math.nan)
    buffers.restore(torch.tensor(True) if on_device else None)
    assert (module.table == 1).all()
    buffers.remember()
    assert buffers._kept[module, "table"]._version == 1, "it is taken for one that does not move"


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


class LazyCount(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", nn.UninitializedBuffer())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if nn.parameter.is_lazy(self.count):
            self.count.materialize((1,))
            self.count.zero_()
        self.count += 1
        return x


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_lazy_buffers_have_nothing_to_go_back_to_but_their_beginning(late, on_device):
    layers = nn.ModuleList([nn.Linear(4, 6), nn.LazyBatchNorm1d(), LazyCount()])
    buffers = MovedBuffers(layers)
    rejected, accepted = (torch.tensor(True), torch.tensor(False)) if on_device else (None, torch.tensor(False))

    def forward(x: torch.Tensor, layers: Sequence[nn.Module]) -> None:
        buffers.remember()
        for layer in layers:
            x = layer(x)

    if late:
        forward(torch.randn(8, 4), layers[:1])
        buffers.restore(accepted)
    forward(torch.full((8, 4), math.nan), layers)
    buffers.restore(rejected)
    twin = nn.BatchNorm1d(6)
    assert all(torch.equal(layers[1].state_dict()[name], value) for name, value in twin.state_dict().items())
    for _ in range(2):
        forward(torch.randn(8, 4), layers)
        buffers.restore(accepted)
    before = state(layers)
    forward(torch.full((8, 4), math.nan), layers)
    buffers.restore(rejected)
    assert all(torch.equal(a, b) for a, b in zip(before, state(layers), strict=True))


def test_a_buffer_that_is_made_late_is_watched_from_its_first_step():
    layers = nn.Sequential(LazyCount())
    buffers = MovedBuffers(layers)
    buffers.remember()
    layers(torch.ones(1))
    buffers.restore(torch.tensor(False))
    buffers.remember()
    layers(torch.ones(1))
    buffers.restore()
    assert layers[0].count == 1


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
        buffers.restore(torch.tensor(False))
    kept = {name: copy for (_, name), copy in buffers._kept.items()}
    assert [kept[name]._version for name in ("table", "seen", "running_mean")] == [1, 3, 3]


class Late(nn.Module):
    """Its buffers move from the fourth forward on, in place or replaced, twice over."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("codes", torch.ones(3))
        self.register_buffer("average", torch.ones(3))
        self.register_buffer("cache", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 3:
            self.codes *= 2
            for _ in range(2):  # The second may lie where the first buffer was.
                self.average = self.average * 2
            self.cache = None
        return x


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("outside", [None, "loaded", "moved"])
def test_what_first_moves_in_a_later_step_is_put_back(on_device, outside):
    module = Late()
    buffers = MovedBuffers(module)
    for _ in range(3):
        buffers.remember()
        module(torch.ones(1))
        if on_device:
            buffers.restore(torch.tensor(False))
    if outside == "loaded":
        module.load_state_dict({name: torch.full((3,), 5.0) for name in module.state_dict()})
    elif outside == "moved":
        module.to(torch.float64)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for _ in range(2):
        buffers.remember()
        module(torch.ones(1))
        buffers.restore(torch.tensor(True) if on_device else None)
        if on_device:  # What is gone cannot be chosen there.
            before.pop("cache", None)
        assert state(module) and all(torch.equal(getattr(module, name), value) for name, value in before.items())
        assert module.codes.dtype == before["codes"].dtype


class Codebook(nn.Module):
    """Averaged in forward, as a buffer or a frozen parameter; beside frozen layers, which forward does not move."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        codes = torch.ones(3)
        self.codes = nn.Buffer(codes) if "buffer" in kind else nn.Parameter(codes, requires_grad=False)
        self.backbone, self.teacher = (nn.Linear(3, 3).requires_grad_(False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            codes = self.codes.data if "data" in self.kind else self.codes
            codes.lerp_(x.detach(), 0.1)
        return x + self.codes.detach()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("kind", ["buffer", "buffer.data", "parameter", "parameter.data"])
@pytest.mark.parametrize("steps_before", [1, 2, 5])
def test_what_moves_without_counting_or_as_a_frozen_parameter_is_put_back(kind, on_device, steps_before):
    module = Codebook(kind)
    buffers = MovedBuffers(module)
    for _ in range(steps_before):
        buffers.remember()
        module(torch.randn(3))
        buffers.after_forward()
        if on_device:
            buffers.restore(torch.tensor(False))
        with torch.no_grad():
            module.teacher.weight.mul_(0.9)  # As an average that follows the step.
    before = module.codes.clone()
    for bad in (math.nan, 1e9):
        buffers.remember()
        module(torch.full((3,), bad))
        buffers.after_forward()
        buffers.restore(torch.tensor(True) if on_device else None)
        assert torch.equal(module.codes, before)
    if steps_before > 2:
        assert {name for _, name in buffers._kept} == {"codes"}, "of what never moves there is no copy"


def test_what_is_frozen_for_a_while_only_is_the_optimizers():
    """As of two networks that take turns."""
    module = nn.Sequential(nn.Linear(3, 3))
    module.requires_grad_(False)
    buffers = MovedBuffers(module)
    for step in range(4):
        buffers.remember()
        module.requires_grad_(True)
        module(torch.ones(3)).sum().backward()
        buffers.after_forward()
        with torch.no_grad():
            module[0].weight.sub_(module[0].weight.grad)
        module.requires_grad_(False)
        stepped = module[0].weight.clone()
        buffers.restore()
        assert torch.equal(module[0].weight, stepped), step


@pytest.mark.parametrize("on_device", [False, True])
def test_buffers_that_cannot_be_written_are_left_alone(on_device):
    module = nn.Module()
    with torch.inference_mode():
        module.register_buffer("inferred", torch.ones(3))
    module.register_buffer("expanded", torch.ones(3).expand(2, 3))
    module.register_buffer("sparse", torch.eye(3).to_sparse_csr())
    module.register_buffer("nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    module.register_buffer("counter", torch.zeros(3))
    before = dict(module.named_buffers())
    buffers = MovedBuffers(module)
    for _ in range(4):
        buffers.remember()
        module.counter += 1
        if not on_device:
            module.expanded = torch.full((3,), math.nan).expand(2, 3)
        buffers.restore(torch.tensor(True) if on_device else None)
        assert all(buffer is before[name] for name, buffer in module.named_buffers())
        assert not module.counter.any()


def test_a_buffer_that_users_take_away_does_not_come_back():
    module = Late()
    buffers = MovedBuffers(module)
    buffers.remember()
    module(torch.ones(1))
    module.cache = None
    buffers.remember()
    buffers.restore()
    assert module.cache is None


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


def test_what_keeps_a_log_from_being_written_is_told(tmp_path, monkeypatch):
    (tmp_path / "there.jsonl").touch()
    for path in (tmp_path / "there.jsonl", tmp_path / "new" / "deep" / "log.jsonl", "log.jsonl"):
        assert why_not_writable(path) is None
    assert not (tmp_path / "new").exists()
    assert why_not_writable(tmp_path) == "it is a directory"
    assert why_not_writable("memory://log.jsonl") is None
    EventLog("memory://folder/log.jsonl").add("rewind")
    assert why_not_writable("memory://folder") == "it is a directory"
    monkeypatch.setitem(known_implementations, "cloud", {"class": "missing.CloudFiles", "err": "Install cloudfs"})
    assert why_not_writable("cloud://bucket/log.jsonl") == "Install cloudfs"
    assert "nowhere" in why_not_writable("nowhere://log.jsonl")
    assert "give it as text" in why_not_writable(Path("s3://bucket/log.jsonl"))
    assert "there.jsonl is no directory" in why_not_writable(tmp_path / "there.jsonl" / "deep" / "log.jsonl")
    monkeypatch.setattr(os, "access", lambda place, mode: place != tmp_path)
    assert "may not be written to" in why_not_writable(tmp_path / "log.jsonl")


def test_a_log_may_lie_where_fsspec_reaches():
    address = "memory://bucket/deep/recovery.jsonl"
    for step, log in enumerate([EventLog(address), EventLog(address)]):  # The second goes on after the first.
        log.add("rejected", epoch=0, batches=[step])
        log.add("rewind")
        assert log.path == address
    assert [event["event"] for event in read_events(address)] == ["rejected", "rewind"] * 2
    assert batches_to_leave_out(address) == {(0, 0), (0, 1)}
    with pytest.raises(FileNotFoundError):
        read_events("memory://bucket/none.jsonl")


def test_an_address_may_name_how_it_is_reached():
    assert located("simplecache::memory://bucket/log.jsonl") == "simplecache::memory://bucket/log.jsonl"
    assert located("C:/logs/log.jsonl") == Path("C:/logs/log.jsonl")


def test_a_remote_log_that_cannot_be_written_ends(monkeypatch, caplog):
    """Whatever exceptions its file system has."""

    class Denied(Exception):
        pass

    def deny(self, *args, **kwargs):
        raise Denied("no rights")

    log = EventLog("memory://bucket/denied.jsonl")
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", deny)
    log.add("rejected", epoch=0, batches=[1])
    assert log.path is None and "Denied: no rights" in caplog.text and log.counts == {"rejected": 1}


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
