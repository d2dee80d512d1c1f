"""The Triton casts on the CPU, in Triton's interpreter: layouts, amaxes, scales and masks.

The interpreter must be chosen before Triton is imported, so these run in a process of their own. It rounds to FP8
wrongly and converts no NaN: bits of codes are compared on the GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("part", ["tensorwise", "foreseen", "later", "rowwise", "blocks", "update"])
def test_interpreted_casts_agree_with_the_reference(part: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.interpreted", part]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "checked" in done.stdout
