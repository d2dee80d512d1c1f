from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from lightning_fp8.comm import BlockCodec

CHECKS = Path(__file__).with_name("kernel_checks.py")


def run_checks(*arguments: str, **environment: str) -> str:
    # In a process of its own: Triton reads its environment when it is imported.
    root = str(CHECKS.parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]), **environment}
    result = subprocess.run([sys.executable, CHECKS, *arguments], env=environment, capture_output=True, text=True)
    return result.stdout if result.returncode == 0 else result.stderr


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, whose interpreter runs on the CPU")
def test_kernels_give_the_references_bits_in_the_interpreter() -> None:
    assert run_checks("cpu", TRITON_INTERPRET="1").strip() == "same bits"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("fmt", ["E4M3", "E5M2"])
def test_kernels_give_the_references_bits_on_the_gpu(fmt: str, rounding: str) -> None:
    assert run_checks("cuda", fmt, rounding).strip() == "same bits"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("stochastic", [False, True])
def test_the_codec_gives_the_same_messages_on_gpu_and_cpu(stochastic: bool) -> None:
    codec = BlockCodec(stochastic=stochastic)
    x = torch.randn(1_000_003) * torch.logspace(-30, 30, 1_000_003)
    messages = codec.encode(x, 4, 250_112, seed=5)
    assert torch.equal(codec.encode(x.cuda(), 4, 250_112, seed=5).cpu(), messages)
    own = x[:250_112]
    message = codec.reduce_encode(messages, 250_112, 0.25, own, 0, seed=6)
    assert torch.equal(codec.reduce_encode(messages.cuda(), 250_112, 0.25, own.cuda(), 0, seed=6).cpu(), message)
    out, decoded = torch.empty(1_000_003), torch.empty(1_000_003, device="cuda")
    codec.decode(messages, 250_112, out)
    codec.decode(messages.cuda(), 250_112, decoded)
    assert torch.equal(decoded.cpu(), out)
