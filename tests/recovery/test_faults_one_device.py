"""Every fault on one device: without recovery the run ends worse, with it as a clean one."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace

import pytest
from fault_table import SCENARIOS, STEPS, Scenario, check, run


@pytest.fixture
def clean_loss(made_once):
    """Of the clean run like a scenario's, and the standard deviation of clean runs over seeds."""

    def clean_loss(scenario: Scenario) -> tuple[float, float]:
        def make(directory) -> None:
            clean = replace(scenario, faults=lambda rank: [])
            losses = [run(directory, clean, faulty=False, recovery=False, seed=seed).loss for seed in (7, 8, 9, 10)]
            (directory / "losses.json").write_text(json.dumps(losses))

        name = f"clean-{scenario.fp8}-{scenario.optimizer}-{scenario.settings}"
        losses = json.loads((made_once(re.sub(r"\W+", "-", name), make) / "losses.json").read_text())
        return losses[0], statistics.stdev(losses)

    return clean_loss


@pytest.mark.parametrize("name", SCENARIOS)
def test_fault(name, tmp_path, clean_loss):
    scenario = SCENARIOS[name]
    clean, spread = clean_loss(scenario)
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
