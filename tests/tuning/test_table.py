"""Tables of measured times: interpolation, files, and what a machine keeps for itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fp8.tuning.table import LayerTable, MeasuredTimes, grid, shipped_tables
from tests.tuning.tables import made_up_table

sizes = st.integers(16, 40000)
exponents = st.floats(0.1, 1.5)


def test_json_brings_a_table_back() -> None:
    table = LayerTable("GPU", "2.11", "2026-01-02", {"bf16": {(1024, 256, 256): 0.125}}, {"bf16": 0.0625})
    assert LayerTable.from_json(table.to_json()) == table


def test_a_table_without_times_is_told() -> None:
    table = LayerTable("GPU", "2.11", "2026-01-02", {"bf16": {}})
    with pytest.raises(ValueError, match="table is empty"):
        table.milliseconds("bf16", 1024, 256, 256)
    with pytest.raises(ValueError, match="has times"):
        LayerTable.from_json(table.to_json())


def test_measured_points_are_met() -> None:
    table = made_up_table()
    for point in grid()[::7]:
        assert table.milliseconds("bf16", *point) == pytest.approx(table.times["bf16"][point])


@given(st.integers(16, 16384), st.integers(16, 8192), st.integers(16, 8192), exponents, exponents, exponents)
def test_power_laws_are_interpolated_and_continued_exactly(
    tokens: int, in_features: int, out_features: int, a: float, b: float, c: float
) -> None:
    table = LayerTable("GPU", "", "", {"bf16": {(t, i, o): t**a * i**b * o**c for t, i, o in grid()}})
    expected = tokens**a * in_features**b * out_features**c
    assert table.milliseconds("bf16", tokens, in_features, out_features) == pytest.approx(expected, rel=1e-6)


@given(st.integers(65536, 2**20), st.integers(16384, 60000), st.integers(16384, 60000))
def test_beyond_the_most_work_time_follows_the_work(tokens: int, in_features: int, out_features: int) -> None:
    table = LayerTable("GPU", "", "", {"bf16": {(t, i, o): float(t * i * o) for t, i, o in grid()}})
    expected = tokens * in_features * out_features
    assert table.milliseconds("bf16", tokens, in_features, out_features) == pytest.approx(expected)


@given(sizes, sizes, sizes)
def test_any_size_has_a_time(tokens: int, in_features: int, out_features: int) -> None:
    assert made_up_table().milliseconds("delayed", tokens, in_features, out_features) > 0


def test_shipped_tables_are_whole() -> None:
    for gpu, table in shipped_tables().items():
        assert table.gpu == gpu and "bf16" in table.times
        assert set(table.host) == set(table.host_compiled) == set(table.times)
        for variant, points in table.times.items():
            assert set(points) == set(grid()), variant
            assert all(ms > 0 for ms in points.values())


class Clock:
    """Counts what it is asked to measure."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def layer(self, *what: object) -> float:
        self.asked.append(what)
        return 2.0

    def host(self, variant: str, compiled: bool) -> float:
        self.asked.append((variant, compiled))
        return 0.25 if compiled else 0.5


def kept(folder: Path, clock: Clock, gpu: str = "Some GPU") -> MeasuredTimes:
    return MeasuredTimes(gpu, "2.11.0+cu130", clock.layer, clock.host, folder)


def test_each_time_is_measured_once_for_all_processes(tmp_path: Path) -> None:
    clock = Clock()
    for _ in range(2):
        times = kept(tmp_path / "new", clock)
        assert times.milliseconds("bf16", 1, 2, 3) == 2.0
        assert [times.host_milliseconds("bf16", compiled) for compiled in (False, True)] == [0.5, 0.25]
    assert clock.asked == [("bf16", 1, 2, 3), ("bf16", False), ("bf16", True)]
    kept(tmp_path / "new", clock, "Another GPU").milliseconds("bf16", 1, 2, 3)
    assert len(clock.asked) == 4


@pytest.mark.parametrize("content", ["", "{", '{"bf16 host": "fast"}', "\x00"])
def test_a_damaged_file_is_measured_anew(tmp_path: Path, content: str) -> None:
    times = kept(tmp_path, Clock())
    times.path.write_text(content)
    clock = Clock()
    assert kept(tmp_path, clock).host_milliseconds("bf16", False) == 0.5 and clock.asked == [("bf16", False)]
    assert kept(tmp_path, clock).host_milliseconds("bf16", False) == 0.5 and clock.asked == [("bf16", False)]


def test_where_nothing_can_be_kept_it_is_measured_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert kept(tmp_path / "file" / "folder", Clock()).host_milliseconds("bf16", False) == 0.5
    assert "cannot be kept" in caplog.text
