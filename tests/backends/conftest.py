"""A stand-in for Transformer Engine on sys.path, gone after the test."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Generator[ModuleType, None, None]:
    def forget() -> None:
        for name in [n for n in sys.modules if n.split(".")[0] == "transformer_engine"]:
            del sys.modules[name]

    forget()
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "standin"))
    import transformer_engine.pytorch

    yield transformer_engine.pytorch
    forget()
