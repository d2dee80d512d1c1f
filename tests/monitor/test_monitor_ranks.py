"""Two ranks on gloo: a fault on one of them is named on both, and metrics reduce."""

from __future__ import annotations

import json
import math
import multiprocessing
import socket
from pathlib import Path
from typing import Any

import monitor_ranks
import pytest
import torch
import torch.multiprocessing as mp
from monitor_ranks import FAULTS, WORLD, data

from lightning_fp8.metrics import SQNR, SaturationRate, UnderflowRate


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Forked from a server that has imported everything once: importing takes longer than the checks.
    multiprocessing.set_forkserver_preload(["monitor_ranks"])
    mp.start_processes(monitor_ranks.run_rank, (str(folder), port), nprocs=WORLD, start_method="forkserver")
    pages = [str(path.relative_to(folder)) for path in folder.rglob("*.html")]
    return [{**json.loads((folder / f"{rank}.json").read_text()), "pages": pages} for rank in range(WORLD)]


@pytest.mark.parametrize("rank", range(WORLD))
def test_faults_are_named_with_their_rank_on_every_rank(results: list[dict[str, Any]], rank: int) -> None:
    single = [[f.step, f.layer, f.role, [f.rank]] for f in FAULTS if f.step < 10]
    expected = [["nonfinite", *one] for one in single]
    expected.append(["nonfinite", 10, "late", "input", [0, 1]])
    expected.append(["nonfinite", 12, "blocks.1", "input", [1]])
    expected.append(["spike", 24, "late", "input", [1]])
    assert results[rank]["events"] == expected


def test_raise_raises_on_every_rank_in_the_same_step(results: list[dict[str, Any]]) -> None:
    assert results[0]["raised"] == results[1]["raised"]
    message, step = results[0]["raised"]
    assert "weight of 'head' (forward, rank 1)" in message and step == 3


def test_the_report_is_written_once_into_the_run_s_directory(results: list[dict[str, Any]]) -> None:
    assert results[0]["pages"] == ["fp8-report.html"]


def test_metrics_reduce_over_ranks(results: list[dict[str, Any]]) -> None:
    values = [result["metrics"] for result in results]
    for metric in (UnderflowRate(), SaturationRate(), SQNR()):
        for rank in range(WORLD):
            metric.update(data(rank), scale=20.0)
        expected = metric.compute().item()
        assert [v[type(metric).__name__] for v in values] == pytest.approx([expected] * WORLD)
    largest = max(data(rank).abs().max().item() for rank in range(WORLD))
    assert [v["Amax"] for v in values] == [pytest.approx(largest)] * WORLD
    assert all(math.isnan(v["Amax of NaN"]) for v in values)
    assert torch.tensor([v["UnderflowRate"] for v in values]).gt(0).all()
