"""Every fault on one device: without recovery the run ends worse, with it as a clean one."""

from __future__ import annotations

import functools
import statistics

import pytest
from fault_table import SCENARIOS, STEPS, Scenario, check, run


@functools.cache
def clean_loss(fp8, optimizer: str, accumulate: int, clip: float | None, directory) -> tuple[float, float]:
    """Of the clean run, and the standard deviation of clean runs over seeds."""
    settings = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    scenario = Scenario(lambda rank: [], ("", "", ""), fp8=fp8, optimizer=optimizer, settings=settings)
    losses = [run(directory, scenario, faulty=False, recovery=False, seed=seed).loss for seed in (7, 8, 9, 10)]
    return losses[0], statistics.stdev(losses)


@pytest.mark.parametrize("name", SCENARIOS)
def test_fault(name, tmp_path, tmp_path_factory, record_property):
    scenario = SCENARIOS[name]
    directory = tmp_path_factory.getbasetemp()
    clean, spread = clean_loss(
        scenario.fp8,
        scenario.optimizer,
        scenario.settings.get("accumulate_grad_batches", 1),
        scenario.settings.get("gradient_clip_val"),
        directory,
    )
    without = run(tmp_path, scenario, recovery=False)
    with_recovery = run(tmp_path, scenario)
    print(f"{name}: clean {clean:.5f} +- {spread:.5f}, without {without.loss:.5f}, with {with_recovery.loss:.5f}")
    check(clean, spread, without, with_recovery, scenario)
    if scenario.ranks and scenario.verdict[0] != "spike":
        assert with_recovery.events[0]["ranks"] == [0]


def test_the_table_is_long_enough():
    kinds = {fault.kind for scenario in SCENARIOS.values() for fault in scenario.faults(None)}
    assert len(SCENARIOS) >= 20 and STEPS >= 100
    assert kinds == {"batch", "activation", "gradient", "weight", "bit_flip", "loss", "amax"}
