"""What monitors and recovery cost: the same training with and without them, in turns, in one process.

    python benchmarks/monitor.py                      # 8B-sized blocks on a GPU, a tiny decoder on a CPU
    python benchmarks/monitor.py --sync-debug         # also: no step may wait for the device
    python benchmarks/monitor.py --recipe none        # everything in bf16: all layers are watched
    python benchmarks/monitor.py --variants plain "snapshot every 10" --rounds 1 --warm-up 31 --steps 51

``bare loop`` is the same training without a Trainer: what Trainer.fit costs, with a logger at Lightning's default
interval.

Each round times every variant once, so that drifts of the machine meet all of them; the overhead is the median over the
rounds of the ratio to the plain run of the same round. The extra statistics are run every 10 steps to be seen above the
noise; their row says what they come to at every 100.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from lightning_fp8 import (
    AmaxMonitor,
    FP8HealthMonitor,
    FP8Precision,
    FP8Report,
    LayerSelection,
    SkipBatchRecovery,
    compile_options,
)
from lightning_fp8.model import conversions
from lightning_fp8.tuning.bench import run_step
from lightning_fp8.tuning.decoder import SHAPES as GPU_SHAPES
from lightning_fp8.tuning.decoder import Decoder, DecoderShape, random_tokens

#: Small enough for a CPU that emulates FP8.
SHAPES = {**GPU_SHAPES, "cpu": DecoderShape(64, 256, 2, 2, 64, 4, 2, 512)}
EVERY = 10
#: The first three snapshots take pinned memory, which is slow: they belong into the warm-up.
SNAPSHOT_EVERY = 10
BARE = "bare loop"


class Task(pl.LightningModule):
    """A decoder whose blocks are compiled, as people train it."""

    def __init__(self, shape: DecoderShape, compiled: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.decoder = Decoder(shape)
        self.compiled = compiled

    def compile_blocks(self) -> None:
        """After conversion, before the first step."""
        if self.compiled:
            for block in self.decoder.blocks:
                block.compile(fullgraph=True, options=compile_options())
            self.compiled = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, following = batch
        return F.cross_entropy(self.decoder(tokens).flatten(0, 1).float(), following.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Batches:
    """The same batch, on its device already, ``count`` times."""

    def __init__(self, batch: tuple[Tensor, Tensor], count: int) -> None:
        self.batch, self.count = batch, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([self.batch] * self.count)


class Clock(pl.Callback):
    """Times the steps after the warm-up; may forbid them to wait for the device."""

    def __init__(self, warm_up: int, sync_debug: bool) -> None:
        self.warm_up = warm_up
        self.sync_debug = sync_debug
        self.seconds = 0.0
        self._began = 0.0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Task)
        pl_module.compile_blocks()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.warm_up:
            _synchronize()
            self._began = time.perf_counter()
            if self.sync_debug:
                torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == trainer.max_steps:
            self._allow()
            _synchronize()
            self.seconds = time.perf_counter() - self._began

    def on_exception(self, *args: Any) -> None:
        self._allow()

    def _allow(self) -> None:
        if self.sync_debug:
            torch.cuda.set_sync_debug_mode("default")


class StaysOnDevice(SingleDeviceStrategy):
    """Leaves the model where it is when a fit ends: moving it and the optimizer's state takes longer than the steps."""

    def teardown(self) -> None:
        pass


VARIANTS: dict[str, Callable[[Path], list[pl.Callback]]] = {
    "plain": lambda _: [],
    "health every step": lambda _: [FP8HealthMonitor("log", progress_bar=False)],
    "amax every step": lambda _: [AmaxMonitor(1)],
    "report": lambda folder: [FP8Report(folder / "report.html")],
    "recovery": lambda _: [SkipBatchRecovery(rewinds=0, snapshot_every=None, log=None)],
    f"statistics every {EVERY}": lambda _: [AmaxMonitor(EVERY, statistics_every_n_steps=EVERY)],
    f"snapshot every {SNAPSHOT_EVERY}": lambda _: [SkipBatchRecovery(snapshot_every=SNAPSHOT_EVERY, log=None)],
}
#: Variants that cost more than their figure says here, and what they come to at the default of every 100 steps.
AMORTISED = {f"statistics every {EVERY}": EVERY / 100, f"snapshot every {SNAPSHOT_EVERY}": SNAPSHOT_EVERY / 100}


def main() -> None:
    """Measure and print."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b" if cuda else "cpu", choices=list(SHAPES))
    parser.add_argument("--recipe", default="delayed", help="or none, for bf16")
    parser.add_argument("--precision", default="bf16-true", choices=("bf16-true", "bf16-mixed"))
    parser.add_argument("--steps", type=int, default=24 if cuda else 14)
    parser.add_argument("--warm-up", type=int, default=4, help="steps that are not timed: compilation, allocation")
    parser.add_argument("--rounds", type=int, default=5 if cuda else 2)
    parser.add_argument("--eager", action="store_true", help="do not compile the blocks")
    parser.add_argument("--sync-debug", action="store_true", help="let a synchronisation in a timed step be an error")
    parser.add_argument("--variants", nargs="+", default=[*list(VARIANTS)[:-1], BARE], choices=[*VARIANTS, BARE])
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    if args.sync_debug and not cuda:
        parser.error("--sync-debug needs a GPU")
    if (args.steps - args.warm_up) % EVERY:
        parser.error(f"--steps must be {args.warm_up} more than a multiple of {EVERY}")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    shape = SHAPES[args.shape]
    task = Task(shape, compiled=cuda and not args.eager)
    device = torch.device("cuda" if cuda else "cpu")
    times: dict[str, list[float]] = {name: [] for name in args.variants}
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if cuda else 'CPU'}, {args.shape}: {shape}")
    with tempfile.TemporaryDirectory() as folder:
        run(task, shape, device, args, [], folder, steps=2)  # Compiles.
        for _ in range(args.rounds):
            for name in args.variants:
                if name not in times:
                    continue
                try:
                    if name == BARE:
                        times[name].append(run_bare(task, shape, device, args))
                    else:
                        times[name].append(run(task, shape, device, args, VARIANTS[name](Path(folder)), folder))
                except RuntimeError as error:  # A step that waits for the device; the others are still worth knowing.
                    traceback.print_exception(error)
                    print(f"{name} fails: {error}", flush=True)
                    del times[name]
                else:
                    print(f"{name}: {1000 * times[name][-1] / (args.steps - args.warm_up):.2f} ms a step", flush=True)
    rows = table(times, args.steps - args.warm_up)
    if args.out:
        args.out.write_text(json.dumps({"torch": torch.__version__, "shape": args.shape, "rows": rows}, indent=1))


def run(
    task: Task,
    shape: DecoderShape,
    device: torch.device,
    args: Any,
    callbacks: list[pl.Callback],
    folder: str,
    steps: int | None = None,
) -> float:
    """Seconds that the timed steps of one fit take."""
    steps = steps or args.steps
    gc.collect()  # The last fit's optimizer.
    clock = Clock(args.warm_up, args.sync_debug)
    precision: dict[str, Any] = {"precision": args.precision}
    if args.recipe != "none":
        plugin = FP8Precision(args.recipe, precision=args.precision, layers=LayerSelection())
        precision = {"plugins": [plugin]}
    trainer = pl.Trainer(
        accelerator=device.type,
        devices=1,
        strategy=StaysOnDevice(torch.device(device.type, 0) if device.type == "cuda" else device),
        max_steps=steps,
        callbacks=[clock, *callbacks] if args.sync_debug else [*callbacks, clock],
        logger=TensorBoardLogger(folder, version=str(time.time_ns())),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **precision,
    )
    trainer.fit(task, Batches(random_tokens(shape, device), steps))
    return clock.seconds


def run_bare(task: Task, shape: DecoderShape, device: torch.device, args: Any) -> float:
    """The same steps in a loop of their own."""
    batch, active = random_tokens(shape, device), conversions(task)
    task.to(device).train()
    optimizer = task.configure_optimizers()

    def compute_loss() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16-mixed"):
            return task.training_step(batch, 0)

    for index in range(args.steps):
        if index == args.warm_up:
            _synchronize()
            began = time.perf_counter()
        run_step(compute_loss, optimizer, active)
    _synchronize()
    return time.perf_counter() - began


def table(times: dict[str, list[float]], steps: int) -> list[dict[str, Any]]:
    """Print the overheads, and return the rows."""
    rows = []
    print(f"{'variant':<22} {'ms a step':>10} {'overhead':>9}   [least, most]")
    for name, seconds in times.items():
        ratios = [100 * (mine / plain - 1) for mine, plain in zip(seconds, times["plain"], strict=True)]
        row: dict[str, Any] = {
            "variant": name,
            "milliseconds": 1000 * statistics.median(seconds) / steps,
            "overhead_percent": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
        }
        rows.append(row)
        if name in AMORTISED:
            amortised = {key: ratio * AMORTISED[name] for key, ratio in row.items() if isinstance(ratio, float)}
            plain_ms = 1000 * statistics.median(times["plain"]) / steps
            amortised["milliseconds"] = plain_ms * (1 + amortised["overhead_percent"] / 100)
            rows.append({"variant": "  at every 100", **amortised})
    for row in rows:
        print(
            f"{row['variant']:<22} {row['milliseconds']:>10.2f} {row['overhead_percent']:>8.2f}%   "
            f"[{row['least']:.2f}, {row['most']:.2f}]"
        )
    return rows


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
