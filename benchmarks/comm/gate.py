"""Does FP8 on the wire cost accuracy? The GPT example under every strategy, against the same training without it.

    torchrun --nproc-per-node=2 benchmarks/comm/gate.py --output docs/benchmarks/comm-gate.md
    torchrun --nproc-per-node=4 benchmarks/comm/gate.py --kinds fsdp2_tp tp --output docs/benchmarks/comm-gate-4.md
    torchrun --nproc-per-node=2 benchmarks/comm/gate.py --kinds ddp fsdp2 --reference bf16 --steps 500

The gate is that of ``examples/gpt/gate.py``. The reference is DDP with FP8 layers and plain communication, so that only
communication differs, or, with ``--reference bf16``, DDP all in bf16; sigma is taken from it. A positive control,
static scaling with scale 1, has to fail. Gradients are not clipped: of a model that is split partly, no norm is defined
across its meshes.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from examples.gpt.compare import Recorder
from examples.gpt.data import TextData
from examples.gpt.gate import MIN_SIGMA_RUNS, Noise, Run, count_spikes, judge
from examples.gpt.model import GPT
from lightning_fp8 import FP8Communication, FP8Precision, LayerSelection, StaticScaling
from lightning_fp8.comm.tensor_parallel import ColwiseParallel, RowwiseParallel

VALIDATIONS = 10
BATCH = 16


class ShardedGPT(GPT):
    """Shards itself; with ``split`` the feed-forward layers are tensor parallel too."""

    split = False

    def configure_model(self) -> None:
        plan = {"blocks.*.up": ColwiseParallel(min_numel=0), "blocks.*.down": RowwiseParallel(min_numel=0)}
        self.trainer.precision_plugin.shard(self, self.device_mesh, tensor_parallel=plan if self.split else None)

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        for group in configured["optimizer"].param_groups:
            group["foreach"] = False  # Its kernels do not mix tensors of several meshes.
        return configured


class SplitGPT(ShardedGPT):
    """The same, tensor parallel."""

    split = True


@dataclass(frozen=True)
class Kind:
    """A way to train.

    Attributes:
        model: the LightningModule's class.
        tensor_parallel: ranks that split a layer; 0 stands for all of them.
        communicates: whether FP8Communication is installed.
        least_ranks: ranks that it needs.
    """

    model: type[GPT]
    tensor_parallel: int
    communicates: bool
    least_ranks: int = 2


KINDS = {
    "ddp": Kind(GPT, 1, True),
    "fsdp2": Kind(ShardedGPT, 1, True),
    "tp": Kind(SplitGPT, 0, False),
    "fsdp2_tp": Kind(SplitGPT, 2, True, least_ranks=4),
}
REFERENCE = Kind(GPT, 1, False)


def strategy_of(kind: Kind) -> tuple[Any, int]:
    """The strategy, and how many ranks have data of their own under it."""
    ranks = dist.get_world_size()
    if kind.model is GPT:
        return DDPStrategy(), ranks
    tensor = kind.tensor_parallel or ranks
    return ModelParallelStrategy(data_parallel_size=ranks // tensor, tensor_parallel_size=tensor), ranks // tensor


def run(kind: Kind, seed: int, settings: argparse.Namespace, plugin: FP8Precision | None) -> tuple[Run, str]:
    """Train once, without ``plugin`` in bf16; the loss, and what FP8Communication says."""
    pl.seed_everything(seed, verbose=False)
    recorder = Recorder()
    communication = FP8Communication(min_numel=0) if kind.communicates else None
    model = kind.model(width=settings.width, layers=settings.layers, heads=2, fused=False)
    strategy, data_ranks = strategy_of(kind)
    how: dict[str, Any] = {"precision": "bf16-mixed"} if plugin is None else {"plugins": [plugin]}
    trainer = pl.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy,
        **how,
        callbacks=[recorder, *([communication] if communication else [])],
        max_steps=settings.steps,
        val_check_interval=settings.steps // VALIDATIONS,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # Every kind sees the same windows in each step.
    trainer.fit(model, TextData(batch_size=BATCH * dist.get_world_size() // data_ranks, seed=seed))
    layers = sum(len(part.converted) for part in plugin.conversions) if plugin is not None else 0
    losses = torch.stack(recorder.training).tolist()
    result = Run(seed, recorder.validations, count_spikes(losses), layers)
    if dist.get_rank() == 0:
        name = next(name for name, other in {**KINDS, "plain": REFERENCE}.items() if other == kind)
        print(f"{name}, {layers} FP8 layers, seed {seed}: loss {result.final:.4f}", flush=True)
    return result, communication.summary() if communication else ""


def main() -> None:
    """Run all kinds and print the page on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--reference", choices=("fp8", "bf16"), default="fp8", help="the layers of the reference")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--output", type=Path, help="write the report here as well")
    settings = parser.parse_args()
    gpu = torch.cuda.is_available()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    ranks = dist.get_world_size()

    def fp8() -> FP8Precision:
        return FP8Precision(layers=LayerSelection())

    def plain() -> FP8Precision | None:
        return fp8() if settings.reference == "fp8" else None

    reference = [run(REFERENCE, seed, settings, plain())[0] for seed in range(max(MIN_SIGMA_RUNS, settings.seeds))]
    noise = Noise.of(reference)
    seeds = max(settings.seeds, noise.seeds_needed())  # Fewer would leave the limit above 1% of the loss.
    reference += [run(REFERENCE, seed, settings, plain())[0] for seed in range(len(reference), seeds)]
    control = [
        run(REFERENCE, s, settings, FP8Precision(StaticScaling(), layers=LayerSelection()))[0] for s in range(seeds)
    ]
    lines = [
        "# FP8 communication: the accuracy gate",
        "",
        f"{ranks} ranks, {torch.cuda.get_device_name() if gpu else 'CPU, gloo'}; GPT example, width {settings.width}, "
        f"{settings.layers} blocks, {settings.steps} steps, {control[0].fp8_layers} layers in FP8 (delayed). "
        f"Reference: DDP, {settings.reference} layers, plain communication; loss {noise.loss:.4f}, "
        f"sigma {noise.sigma:.4f} of {noise.runs} runs.",
        "",
        "| training | mean gap | spread | limit | spikes (reference) | gate |",
        "|---|---|---|---|---|---|",
    ]
    summaries = []
    results = {"control: static scale 1": control}
    for name in settings.kinds:
        kind = KINDS[name]
        if ranks < kind.least_ranks:
            continue
        runs = [run(kind, seed, settings, fp8()) for seed in range(seeds)]
        results[name] = [result for result, _ in runs]
        summaries += [f"{name}:", runs[-1][1]] if runs[-1][1] else []
    for name, runs_of_kind in results.items():
        verdict = judge(runs_of_kind, reference, noise)
        lines.append(
            f"| {name} | {verdict.mean:+.4f} ({verdict.mean / noise.loss:+.2%}) | {verdict.spread:.4f} | "
            f"{verdict.limit:.4f} | {verdict.spikes} ({verdict.bf16_spikes}) | "
            f"{'passed' if verdict.passed else 'failed'} |"
        )
    void = judge(control, reference, noise).within_limit
    lines += [
        "",
        "The control passes, so this comparison is VOID: train for longer."
        if void
        else "The control fails, as it must.",
        "",
        "```",
        *summaries,
        "```",
        "",
        f"Command: `torchrun --nproc-per-node={ranks} benchmarks/comm/gate.py --kinds {' '.join(settings.kinds)} "
        f"--reference {settings.reference} --steps {settings.steps} --seeds {seeds}`; torch {torch.__version__}, "
        f"{datetime.now(timezone.utc):%Y-%m-%d}.",
        "",
    ]
    if dist.get_rank() == 0:
        print("\n".join(lines))
        if settings.output:
            settings.output.parent.mkdir(parents=True, exist_ok=True)
            settings.output.write_text("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
