from __future__ import annotations

import functools

import pytest
from ddp_checks import CHECKS
from rank_checks import run_checks

run_once = functools.cache(lambda world_size: run_checks(CHECKS, world_size))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ddp_hook(world_size: int, check) -> None:
    failures = run_once(world_size)[check.__name__]
    assert not failures, "\n".join(failures)
