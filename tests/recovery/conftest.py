"""Tests marked slow are skipped, with the reason told, unless chosen with ``-m slow``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" in config.getoption("markexpr"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow: run it with -m slow"))


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """``made_once(name, make)``: a directory that ``make`` fills, by whichever test process comes first."""
    base = tmp_path_factory.getbasetemp()
    # Each process of pytest-xdist has a directory of its own in the common one.
    common = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def made(name: str, make: Callable[[Path], object]) -> Path:
        directory = common / name
        with FileLock(common / f"{name}.lock"):
            if not (directory / "done").exists():
                directory.mkdir(exist_ok=True)
                make(directory)
                (directory / "done").touch()
        return directory

    return made
