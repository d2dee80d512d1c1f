"""Does FP8 on the wire cost accuracy? The GPT example under every strategy, against the same training without it.

    torchrun --nproc-per-node=2 benchmarks/comm/gate.py --output docs/benchmarks/comm-gate.md
    torchrun --nproc-per-node=4 benchmarks/comm/gate.py --kinds fsdp2_tp --reference-ranks 2
    torchrun --nproc-per-node=2 benchmarks/comm/gate.py --kinds ddp fsdp2 --reference bf16 --steps 500

The gate is that of ``examples/gpt/gate.py``. The reference is DDP with FP8 layers and plain communication, so that only
communication differs, or, with ``--reference bf16``, DDP all in bf16; sigma is taken from it. A positive control,
static scaling with scale 1, has to fail. Gradients are not clipped, for of a model that is split partly no norm is
defined across its meshes; so the learning rate is lower than the example's.

All kinds see the same windows in each step, on any number of ranks. Runs are kept in ``--runs`` as they are done, and
taken from there; with ``--reference-ranks`` reference and control are those of another number of ranks. With
``--train`` kinds are trained without a report, so that several processes can share the work.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass
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
#: Windows a step, of all ranks together.
BATCH = 32
LEARNING_RATE = 2e-3


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
        recipe: of the layers; ``None`` for bf16.
    """

    model: type[GPT] = GPT
    tensor_parallel: int = 1
    communicates: bool = False
    least_ranks: int = 2
    recipe: Any = "delayed"


CONTROL = "control"
REFERENCES = {"bf16": Kind(recipe=None), "fp8": Kind()}
TESTED = {
    "ddp": Kind(communicates=True),
    "fsdp2": Kind(ShardedGPT, communicates=True),
    "tp": Kind(SplitGPT, 0),
    "fsdp2_tp": Kind(SplitGPT, 2, communicates=True, least_ranks=4),
}
KINDS = {**REFERENCES, CONTROL: Kind(recipe=StaticScaling()), **TESTED}


def strategy_of(kind: Kind) -> tuple[Any, int]:
    """The strategy, and how many ranks have data of their own under it."""
    ranks = dist.get_world_size()
    if kind.model is GPT:
        return DDPStrategy(), ranks
    tensor = kind.tensor_parallel or ranks
    return ModelParallelStrategy(data_parallel_size=ranks // tensor, tensor_parallel_size=tensor), ranks // tensor


def train(kind: Kind, seed: int, settings: argparse.Namespace) -> tuple[Run, str]:
    """Train once; the losses, and what FP8Communication says."""
    pl.seed_everything(seed, verbose=False)
    recorder = Recorder()
    communication = FP8Communication(min_numel=0) if kind.communicates else None
    model = kind.model(width=settings.width, layers=settings.layers, heads=2, fused=False, lr=LEARNING_RATE)
    strategy, data_ranks = strategy_of(kind)
    plugin = FP8Precision(kind.recipe, layers=LayerSelection()) if kind.recipe is not None else None
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
    trainer.fit(model, TextData(batch_size=BATCH // data_ranks, seed=seed))
    layers = sum(len(part.converted) for part in plugin.conversions) if plugin is not None else 0
    losses = torch.stack(recorder.training).tolist()
    run = Run(seed, recorder.validations, count_spikes(losses), layers)
    return run, communication.summary() if communication else ""


def runs_of(name: str, seeds: int, settings: argparse.Namespace) -> list[tuple[Run, str]]:
    """The runs of a kind, those that are kept already not trained again.

    Raises:
        ValueError: runs of another number of ranks are missing.
    """
    ranks = dist.get_world_size() if name in TESTED else settings.reference_ranks or dist.get_world_size()
    # Runs of other settings are none of this gate's.
    parts = ranks, "gpu" if torch.cuda.is_available() else "cpu", settings.steps, settings.width, settings.layers
    file = settings.runs / "-".join(map(str, parts)) / f"{name}.json"
    dist.barrier()  # Rank 0 has written.
    kept = json.loads(file.read_text()) if file.exists() else []
    dist.barrier()  # All ranks have looked before rank 0 writes.
    runs = [(Run(**run), summary) for run, summary in kept]
    if len(runs) < seeds and ranks != dist.get_world_size():
        raise ValueError(f"{file} has {len(runs)} of {seeds} runs: train them on {ranks} ranks first.")
    for seed in range(len(runs), seeds):
        runs.append(train(KINDS[name], seed, settings))
        if dist.get_rank() == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps([(asdict(run), summary) for run, summary in runs]))
            print(f"{name}, seed {seed}: loss {runs[-1][0].final:.4f}", flush=True)
    return runs


def report(settings: argparse.Namespace) -> str:
    """The page."""
    ranks = dist.get_world_size()
    least = max(MIN_SIGMA_RUNS, settings.seeds)
    noise = Noise.of([run for run, _ in runs_of(settings.reference, least, settings)][:least])
    seeds = max(settings.seeds, noise.seeds_needed())  # Fewer would leave the limit above 1% of the loss.
    reference = [run for run, _ in runs_of(settings.reference, max(least, seeds), settings)]
    results = {
        name: runs_of(name, seeds, settings)[:seeds]
        for name in (CONTROL, *settings.kinds)
        if ranks >= KINDS[name].least_ranks
    }
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, gloo"
    lines = [
        "# FP8 communication: the accuracy gate",
        "",
        f"{ranks} ranks, {machine}; GPT example, width {settings.width}, {settings.layers} blocks, {settings.steps} "
        f"steps, {results[CONTROL][0][0].fp8_layers} layers in FP8 (delayed). Reference: DDP"
        f"{f' on {settings.reference_ranks} ranks' if settings.reference_ranks else ''}, {settings.reference} "
        f"layers, plain communication; loss {noise.loss:.4f}, sigma {noise.sigma:.4f} of {noise.runs} runs; {seeds} "
        "seeds.",
        "",
        "| training | mean gap | spread | limit | spikes (reference) | gate |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        verdict = judge([run for run, _ in runs], reference, noise)
        lines.append(
            f"| {name} | {verdict.mean:+.4f} ({verdict.mean / noise.loss:+.2%}) | {verdict.spread:.4f} | "
            f"{verdict.limit:.4f} | {verdict.spikes} ({verdict.bf16_spikes}) | "
            f"{'passed' if verdict.passed else 'failed'} |"
        )
    void = judge([run for run, _ in results[CONTROL]], reference, noise).within_limit
    told = [f"{name}:\n{runs[-1][1]}" for name, runs in results.items() if runs[-1][1]]
    return "\n".join(
        [
            *lines,
            "",
            "The control passes, so this is VOID: train for longer." if void else "The control fails, as it must.",
            "",
            *(["```", *told, "```", ""] if told else []),
            f"Command: `torchrun --nproc-per-node={ranks} benchmarks/comm/gate.py --kinds {' '.join(settings.kinds)} "
            f"--reference {settings.reference} --steps {settings.steps} --seeds {seeds}"
            f"{f' --reference-ranks {settings.reference_ranks}' if settings.reference_ranks else ''}`; "
            f"torch {torch.__version__}, {datetime.now(timezone.utc):%Y-%m-%d}.",
            "",
        ]
    )


def main() -> None:
    """Run all kinds and print the page on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(TESTED), default=list(TESTED))
    parser.add_argument("--reference", choices=list(REFERENCES), default="fp8", help="the layers of the reference")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--reference-ranks", type=int, help="take reference and control from runs on so many ranks")
    parser.add_argument("--runs", type=Path, default=Path("runs/comm-gate"), help="where runs lie")
    parser.add_argument("--train", nargs="+", choices=list(KINDS), help="only train these, for --seeds seeds")
    parser.add_argument("--output", type=Path, help="write the report here as well")
    settings = parser.parse_args()
    gpu = torch.cuda.is_available()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    if settings.train:
        for name in settings.train:
            runs_of(name, settings.seeds, settings)
    else:
        page = report(settings)
        if dist.get_rank() == 0:
            print(page)
            if settings.output:
                settings.output.parent.mkdir(parents=True, exist_ok=True)
                settings.output.write_text(page)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
