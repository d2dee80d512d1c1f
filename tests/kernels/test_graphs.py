"""Casts in compiled graphs: the compiler must see what they write, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
BOTH = ["codes", "codes_t", "decode", "decode_t"]


def test_a_compiler_finds_exactly_the_outputs_and_the_slot_written() -> None:
    """Else it would copy the input of every cast, or miss a change of the statistics."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.traced"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    amaxes = ["amax_rows_and_columns", "scratch", "slot"]
    assert json.loads(done.stdout) == {
        "stored": [["cast_stored", *BOTH, "slot"]],
        "stored, ragged": [["cast_stored", *BOTH, "slot"]],
        "stored, straight": [["cast_stored", "codes", "decode", "slot"]],
        "stored, transposed": [["cast_stored", "codes_t", "decode_t", "slot"]],
        "tensorwise": [["amax_partials", "partials"], ["cast_from_amaxes", *BOTH, "slot"]],
        "tensorwise, unnoted": [["amax_partials", "partials"], ["cast_from_amaxes", *BOTH]],
        "rowwise": [amaxes, ["cast_from_amaxes", *BOTH]],
        "rowwise, straight": [["cast_rows", "codes", "decode", "slot"]],
        "mixed": [amaxes, ["cast_from_amaxes", *BOTH]],
    }
