"""A whole training step of 8B-sized blocks on several GPUs: bf16, FP8 layers, and FP8 layers with FP8 on the wire.

    torchrun --nproc-per-node=2 benchmarks/comm/step.py --output docs/benchmarks/comm-step.md

DDP and FSDP2, weights in bf16, blocks compiled, fused AdamW. ``alone`` is the same step without other ranks. Every rank
has 2 x 8192 tokens of its own. Medians over rounds of three steps, the slowest rank's, in one run.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_fp8 import LayerSelection, convert_model, shard
from lightning_fp8.comm import FP8GradientState, fp8_gradient_hook
from lightning_fp8.model import conversions
from lightning_fp8.tuning.bench import compile_blocks, run_step
from lightning_fp8.tuning.decoder import SHAPES, Decoder, random_tokens

STRATEGIES = ("alone", "ddp", "fsdp2")
PRECISIONS = ("bf16", "fp8", "fp8 + wire")
WARM_UP = 5


def build(strategy: str, precision: str, model: Decoder) -> nn.Module:
    """``model``, converted and spread over the ranks."""
    everything: dict[str, Any] = {"recipe": "delayed", "layers": LayerSelection()}
    if strategy == "fsdp2":
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        # Gradients are bf16, and so are messages in bf16.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        if precision == "bf16":
            compile_blocks(model)
            for block in model.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            return fully_shard(model, mesh=mesh, mp_policy=policy)
        wire = "fp8" if precision == "fp8 + wire" else "bf16"
        return shard(
            model,
            mesh,
            **everything,
            compile={"fullgraph": True},
            mp_policy=policy,
            grad=wire,  # type: ignore[arg-type]
            param=wire,  # type: ignore[arg-type]
            min_numel=0,
        )
    if precision != "bf16":
        convert_model(model, **everything)
    compile_blocks(model)
    if strategy == "alone":
        return model
    spread = DistributedDataParallel(
        model, device_ids=[torch.cuda.current_device()], gradient_as_bucket_view=True, bucket_cap_mb=256
    )
    if precision == "fp8 + wire":
        spread.register_comm_hook(FP8GradientState(), fp8_gradient_hook)
    return spread


def make_step(strategy: str, precision: str, shape: str) -> Callable[[], Tensor]:
    """One training step."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Decoder(SHAPES[shape]).to(torch.bfloat16)
    spread = build(strategy, precision, model)
    optimizer = torch.optim.AdamW(spread.parameters(), lr=1e-4, fused=True)
    inputs, targets = (part.roll(dist.get_rank(), -1) for part in random_tokens(SHAPES[shape], torch.device("cuda")))
    solo = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    group = solo[dist.get_rank()] if strategy == "alone" else dist.group.WORLD
    active = conversions(model)

    def compute_loss() -> Tensor:
        return F.cross_entropy(spread(inputs).flatten(0, 1), targets.flatten())

    return lambda: run_step(compute_loss, optimizer, active, group)


def measure(step: Callable[[], Tensor], rounds: int) -> tuple[float, float]:
    """Milliseconds a step on the slowest rank, and the loss after the warm-up."""
    loss = [step() for _ in range(WARM_UP)][-1]
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1000 / 3)
    slowest = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest), float(loss)


def main() -> None:
    """Measure everything and print the page on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", choices=list(SHAPES))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="write the report here as well")
    settings = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    lines = [
        "# Training steps on several GPUs",
        "",
        f"{dist.get_world_size()} x {torch.cuda.get_device_name()}, {settings.shape}: {SHAPES[settings.shape]}; recipe "
        f"delayed, compiled, bf16 weights and gradients. Medians of {settings.rounds} rounds of three steps.",
        "",
        "| strategy | precision | ms a step | over bf16 | peak GiB | loss after 5 steps |",
        "|---|---|---|---|---|---|",
    ]
    for strategy, precision in itertools.product(settings.strategies, PRECISIONS):
        if strategy == "alone" and precision == "fp8 + wire":
            continue
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        milliseconds, loss = measure(make_step(strategy, precision, settings.shape), settings.rounds)
        if precision == "bf16":
            base = milliseconds
        peak = torch.cuda.max_memory_allocated() / 2**30
        lines.append(
            f"| {strategy} | {precision} | {milliseconds:.1f} | {base / milliseconds:.3f} | {peak:.1f} | {loss:.3f} |"
        )
        if dist.get_rank() == 0:
            print(lines[-1], flush=True)
    lines += [
        "",
        f"Command: `torchrun --nproc-per-node={dist.get_world_size()} benchmarks/comm/step.py`; torch "
        f"{torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, "
        f"{datetime.now(timezone.utc):%Y-%m-%d}.",
        "",
    ]
    if dist.get_rank() == 0 and settings.output:
        settings.output.parent.mkdir(parents=True, exist_ok=True)
        settings.output.write_text("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
