"""FP8 collectives over NCCL against fp32 and bf16 ones, from 1 Mi to 256 Mi values.

    torchrun --nproc-per-node=2 benchmarks/comm/nccl.py --output docs/benchmarks/comm-nccl.md

With ``--captured`` each collective is replayed from a CUDA graph as well: what it takes where no host holds it up.

The medians of GPU time, with NVLink multicast off (``NCCL_NVLS_ENABLE=0``) unless the caller sets it otherwise.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fp8.comm import BlockCodec, FP8Collectives

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")


def native(name: str, dtype: torch.dtype, whole: Tensor, shard: Tensor) -> Callable[[], object]:
    """NCCL's own collective on fp32 gradients, cast to ``dtype`` and back where that is not fp32."""

    def all_reduce() -> None:
        sent = whole.to(dtype)
        dist.all_reduce(sent, op=dist.ReduceOp.AVG)
        if sent is not whole:
            whole.copy_(sent)

    def reduce_scatter() -> None:
        received = torch.empty_like(shard, dtype=dtype)
        dist.reduce_scatter_tensor(received, whole.to(dtype), op=dist.ReduceOp.AVG)
        shard.copy_(received)

    def all_gather() -> None:
        received = torch.empty_like(whole, dtype=dtype)
        dist.all_gather_into_tensor(received, shard.to(dtype))
        whole.copy_(received)

    return {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather}[name]


def fp8(name: str, collectives: FP8Collectives, whole: Tensor, shard: Tensor) -> Callable[[], object]:
    """The same in FP8."""
    return {
        "all_reduce": lambda: collectives.all_reduce(whole, dist.ReduceOp.AVG),
        "reduce_scatter": lambda: collectives.reduce_scatter(shard, whole, dist.ReduceOp.AVG),
        "all_gather": lambda: collectives.all_gather(whole, shard),
    }[name]


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The same, replayed from a CUDA graph: all the host does is to launch that."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # The group's watchdog looks at events from a thread of its own.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay


def median_milliseconds(call: Callable[[], object], repeats: int) -> float:
    """GPU time of one call; the slowest rank's median."""
    for _ in range(5):
        call()
    times = []
    for _ in range(repeats):
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    slowest = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def measure(numel: int, repeats: int, dtype: torch.dtype, codec: BlockCodec, graphs: bool) -> list[str]:
    """Table rows for one size; with ``graphs`` the times of captured collectives."""
    world = dist.get_world_size()
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    whole = torch.randn(numel, device="cuda", generator=generator).mul_(1e-3).to(dtype)
    shard = whole[: numel // world].clone()
    collectives = FP8Collectives(codec=codec)
    rows = []
    for name in COLLECTIVES:
        calls = {
            "fp32": native(name, torch.float32, whole, shard),
            "bf16": native(name, torch.bfloat16, whole, shard),
            "fp8": fp8(name, collectives, whole, shard),
        }
        times = {kind: median_milliseconds(captured(call) if graphs else call, repeats) for kind, call in calls.items()}
        rows.append(
            f"| {name}{', captured' if graphs else ''} | {numel / 2**20:g} Mi | "
            + " | ".join(f"{milliseconds:.3f}" for milliseconds in times.values())
            + f" | {times['bf16'] / times['fp8']:.2f}x |"
        )
    return rows


def main() -> None:
    """Measure all sizes and print the page on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebi", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128, 256], help="sizes in Mi")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the gradients")
    parser.add_argument("--captured", action="store_true", help="measure replays of CUDA graphs too")
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--output", type=Path, help="write the report here as well")
    arguments = parser.parse_args()

    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    dtype = getattr(torch, arguments.dtype)
    lines = [
        "# FP8 collectives over NCCL",
        "",
        f"{dist.get_world_size()} x {torch.cuda.get_device_name()}, {arguments.dtype} tensors of the size given before "
        f"the reduction or after the gather; medians of {arguments.repeats} in ms, casts included; E4M3, block "
        f"{arguments.block}; NCCL_NVLS_ENABLE={os.environ['NCCL_NVLS_ENABLE']}.",
        "",
        "| collective | values | fp32 | bf16 | FP8 | FP8 faster than bf16 |",
        "|---|---|---|---|---|---|",
    ]
    for mebi in arguments.mebi:
        for graphs in (False, True)[: 1 + arguments.captured]:
            lines += measure(mebi * 2**20, arguments.repeats, dtype, BlockCodec(block=arguments.block), graphs)
    lines += [
        "",
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, "
        f"{datetime.now(timezone.utc):%Y-%m-%d}.",
        "",
    ]
    if dist.get_rank() == 0:
        print("\n".join(lines))
        if arguments.output:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
