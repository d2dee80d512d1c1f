"""The programs in docs/recovery.md run as they stand."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "recovery.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def run(beginning: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that a program prints."""
    (program,) = [block for block in BLOCKS if beginning in block]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(program, {})
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.startswith("from")])
def test_callbacks_go_together(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(block, {})


def test_the_plain_loop(capsys):
    (line,) = run("StepGuard(model", capsys)
    assert line.startswith("{'step': 7}") and "where='batch'" in line


def test_the_rehearsal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [line.split() for line in run("faults = [", capsys) if line.startswith(("rejected", "rewind"))]
    assert [(line[1], line[4]) for line in lines[:4]] == [
        ("20", "skip"), ("30", "skip"), ("40", "skip"), ("55", "rewind"),
    ]  # fmt: skip
    assert lines[4][:2] == ["rewind", "56"]
