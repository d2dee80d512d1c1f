"""All-reduce of gradients over a slow link: fp32, bf16 and FP8, two ranks, gloo.

Two network namespaces, joined by a veth pair whose both ends ``tc tbf`` limits, hold one rank each, so that the wire
and not the CPU decides, as between the nodes of a GPU cluster. Needs root and iproute2, Linux only:

    sudo python benchmarks/comm/slow_link.py --output docs/benchmarks/comm-slow-link.md

The bytes are read from the network interface, so headers count too.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

ADDRESSES = ("10.77.7.1", "10.77.7.2")
RATES = ("25mbit", "100mbit", "1gbit")
KINDS = ("fp32", "bf16", "fp8")


def shell(command: str) -> str:
    """Run a command and give back what it prints."""
    return subprocess.run(command.split(), check=True, capture_output=True, text=True).stdout


class SlowLink:
    """Two namespaces with a rate-limited link between them; gone at the end."""

    def __init__(self) -> None:
        self.namespaces = [f"lightning-fp8-{os.getpid()}-{rank}" for rank in (0, 1)]

    def __enter__(self) -> SlowLink:
        for namespace in self.namespaces:
            shell(f"ip netns add {namespace}")
        first, second = self.namespaces
        shell(f"ip link add link0 netns {first} type veth peer name link0 netns {second}")
        for namespace, address in zip(self.namespaces, ADDRESSES, strict=True):
            shell(f"ip -n {namespace} address add {address}/24 dev link0")
            shell(f"ip -n {namespace} link set link0 up")
            shell(f"ip -n {namespace} link set lo up")
        return self

    def limit(self, rate: str) -> None:
        """Let each end send this much, in tc's words."""
        # The burst goes at full speed: a millisecond's worth, or little enough not to help the smallest message. The
        # queue is long enough to drop nothing.
        burst = max(16_000, int(bits_per_second(rate) / 8 / 1000))
        for namespace in self.namespaces:
            shell(f"tc -n {namespace} qdisc replace dev link0 root tbf rate {rate} burst {burst} latency 2s")

    def __exit__(self, *_: object) -> None:
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], check=False)


def bits_per_second(rate: str) -> float:
    """Of a rate in tc's words, such as ``25mbit``."""
    return float(rate[:-4]) * {"mbit": 1e6, "gbit": 1e9}[rate[-4:]]


def sent_bytes() -> int:
    """Bytes that left through this namespace's end of the link, headers included."""
    return int(Path("/sys/class/net/link0/statistics/tx_bytes").read_text())


def measure(rank: int, numel: int, repeats: int) -> None:
    """Print median seconds, bytes on the interface and relative error for each kind; runs inside a namespace."""
    import torch
    import torch.distributed as dist

    from lightning_fp8.comm import FP8Collectives

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "link0"
    dist.init_process_group(
        "gloo", init_method=f"tcp://{ADDRESSES[0]}:29500", rank=rank, world_size=2, timeout=timedelta(minutes=10)
    )
    gradients = [torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-3 for seed in (0, 1)]
    exact = (gradients[0].double() + gradients[1].double()) / 2
    collectives = FP8Collectives()

    def reduce_plain(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        total = gradient.to(dtype)
        dist.all_reduce(total)
        return total.float() / 2

    def reduce_fp8(gradient: torch.Tensor) -> torch.Tensor:
        collectives.all_reduce(gradient, dist.ReduceOp.AVG)
        return gradient

    reduce = {
        "fp32": lambda gradient: reduce_plain(gradient, torch.float32),
        "bf16": lambda gradient: reduce_plain(gradient, torch.bfloat16),
        "fp8": reduce_fp8,
    }
    for kind in KINDS:
        seconds = []
        for repeat in range(repeats + 1):
            gradient = gradients[rank].clone()
            dist.barrier()
            before, start = sent_bytes(), time.perf_counter()
            result = reduce[kind](gradient)
            elapsed, sent = time.perf_counter() - start, sent_bytes() - before
            if repeat:  # the first one warms up
                seconds.append(elapsed)
        error = float((result.double() - exact).norm() / exact.norm())
        if rank == 0:
            print(kind, statistics.median(seconds), min(seconds), max(seconds), sent, error, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run(link: SlowLink, rate: str, numel: int, repeats: int) -> dict[str, list[float]]:
    """Measure all kinds at one rate: ``{kind: [median, fastest, slowest, bytes, error]}``."""
    link.limit(rate)
    processes = [
        subprocess.Popen(
            f"ip netns exec {namespace} {sys.executable} {__file__} "
            f"--rank {rank} --numel {numel} --repeats {repeats}".split(),
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        for rank, namespace in enumerate(link.namespaces)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("A rank failed; its error is above.")
    rows = (line.split() for line in outputs[0].splitlines())
    return {kind: [float(value) for value in rest] for kind, *rest in rows if kind in KINDS}


def report(results: dict[str, dict[str, list[float]]], arguments: argparse.Namespace) -> str:
    """The Markdown page."""
    import torch

    lines = [
        "# FP8 all-reduce over a slow link",
        "",
        f"Two ranks, gloo, all-reduce (mean) of {arguments.numel:,} fp32 gradients, block 128, E4M3; median of "
        f"{arguments.repeats} after one to warm up, in brackets the range. One rank per network namespace, one thread "
        "per rank, joined by a veth pair limited by `tc tbf` in both directions. Times include the casts.",
        "",
        "| link | format | seconds | MB sent by a rank | faster than fp32 | faster than bf16 | relative error |",
        "|---|---|---|---|---|---|---|",
    ]
    for rate, rows in results.items():
        for kind, (median, fastest, slowest, sent, error) in rows.items():
            speedups = [f"{rows[other][0] / median:.2f}x" for other in ("fp32", "bf16")]
            lines.append(
                f"| {rate} | {kind} | {median:.3f} ({fastest:.3f}-{slowest:.3f}) | {sent / 1e6:.2f} | "
                f"{speedups[0]} | {speedups[1]} | {error:.2g} |"
            )
    lines += ["", crossover(results), ""]
    lines += [
        f"Command: `python benchmarks/comm/slow_link.py --numel {arguments.numel} --repeats {arguments.repeats}` "
        f"on {os.cpu_count()} cores ({machine()}), Linux {platform.release()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, {datetime.now(timezone.utc):%Y-%m-%d}.",
        "",
    ]
    return "\n".join(lines)


def crossover(results: dict[str, dict[str, list[float]]]) -> str:
    """From the fastest link on which FP8's casts still show: where they would eat up what the wire saves."""
    rate, rows = list(results.items())[-1]
    bits = {kind: 8 * values[3] for kind, values in rows.items()}
    wire = bits_per_second(rate)
    beyond_wire = {kind: max(rows[kind][0] - bits[kind] / wire, 0.0) for kind in ("bf16", "fp8")}
    extra = beyond_wire["fp8"] - beyond_wire["bf16"]
    if extra <= 0:
        return f"At {rate} FP8 still costs no more beside the wire than bf16 does: no cross-over was found here."
    limit = (bits["bf16"] - bits["fp8"]) / extra
    return (
        f"Cross-over: beside the time on the wire, FP8 takes {extra * 1e3:.0f} ms more than bf16 on one CPU thread "
        f"(casts, sums, and a second round of messages), measured at {rate}. What it saves on the wire is worth that "
        f"up to about {limit / 1e9:.2g} Gbit/s; on faster links between CPU ranks, keep FP8 off (`min_numel`)."
    )


def machine() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def main() -> None:
    """Run the benchmark, or one rank of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=4 * 2**20, help="gradients to reduce")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rates", nargs="+", default=list(RATES), help="of the link, in tc's words, slowest first")
    parser.add_argument("--output", type=Path, help="write the report here as well")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        measure(arguments.rank, arguments.numel, arguments.repeats)
        return
    with SlowLink() as link:
        results = {rate: run(link, rate, arguments.numel, arguments.repeats) for rate in arguments.rates}
    text = report(results, arguments)
    print(text)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
