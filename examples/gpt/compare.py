"""Train in bf16 and in FP8 over several seeds, and say whether FP8 costs accuracy (see gate.py).

    python -m examples.gpt.compare
    python -m examples.gpt.compare --recipe rowwise --seeds 5
    python -m examples.gpt.compare --picture docs/images/gpt_loss.png

Every eligible layer runs in FP8 here, also where ``auto`` would leave it in bf16. A positive control shows that the
gate can fail: static scaling with scale 1 in E4M3, where gradients underflow, has to.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from jsonargparse import auto_cli
from torch import Tensor

from examples.gpt.data import TextData
from examples.gpt.gate import MIN_SIGMA_RUNS, Noise, Run, Verdict, count_spikes, judge
from examples.gpt.model import GPT
from lightning_fp8 import FP8Precision, LayerSelection, StaticScaling
from lightning_fp8.recipes import Recipe

PluginFactory = Callable[[], FP8Precision]


class Recorder(pl.Callback):
    """Keeps the losses of a run: those of training on the device until the end."""

    def __init__(self) -> None:
        self.training: list[Tensor] = []
        self.validations: list[float] = []
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.training.append(outputs["loss"].detach())

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.validations.append(float(trainer.callback_metrics["val/loss"]))
        self.steps.append(trainer.global_step)


class Experiment:
    """One configuration of the example, trained again and again.

    Args:
        config: a configuration of ``lightning-fp8 fit``; model, data and the length of the run are taken from it.
        steps: steps of each run, in place of the configuration's.
        accelerator: the Trainer's.
        precision: what bf16 runs train in, and FP8 runs around their FP8 layers.
    """

    def __init__(self, config: Path, steps: int | None, accelerator: str, precision: str) -> None:
        settings = yaml.safe_load(config.read_text())
        self.model = {**settings["model"]["init_args"], "fused": False}  # bf16 with clipping has no fused AdamW.
        self.data = settings["data"]["init_args"]
        trainer = settings["trainer"]
        self.recipe = trainer["plugins"]["init_args"]["recipe"]
        self.steps = steps or trainer["max_steps"]
        self.interval = max(1, self.steps * trainer["val_check_interval"] // trainer["max_steps"])
        self.clip = trainer["gradient_clip_val"]
        self.accelerator = accelerator
        self.precision = precision

    @property
    def key(self) -> dict[str, Any]:
        """All that a final loss depends on but the seed."""
        data = TextData(**self.data)
        data.setup("fit")
        return {
            "model": self.model,
            "data": self.data,
            "text": data.windows.digest(),
            "steps": self.steps,
            "validated every": self.interval,
            "clipped at": self.clip,
            "precision": self.precision,
            "device": torch.cuda.get_device_name() if self._on_gpu() else "cpu",
            "torch": torch.__version__,
        }

    def _on_gpu(self) -> bool:
        return self.accelerator != "cpu" and torch.cuda.is_available()

    def run(self, seed: int, plugin: PluginFactory | None) -> tuple[Run, Recorder]:
        """Train once.

        Args:
            seed: seed of weights and data.
            plugin: makes the FP8 plugin; ``None`` trains in ``precision`` alone.
        """
        pl.seed_everything(seed, verbose=False)
        recorder = Recorder()
        model = GPT(**self.model)
        fp8 = plugin() if plugin is not None else None
        how: dict[str, Any] = {"precision": self.precision} if fp8 is None else {"plugins": [fp8]}
        with tempfile.TemporaryDirectory() as folder:
            trainer = pl.Trainer(
                **how,
                accelerator=self.accelerator,
                devices=1,
                max_steps=self.steps,
                val_check_interval=self.interval,
                check_val_every_n_epoch=None,
                gradient_clip_val=self.clip,
                num_sanity_val_steps=0,
                callbacks=[recorder],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
            )
            trainer.fit(model, TextData(**{**self.data, "seed": seed}))
        fp8_layers = sum(len(part.converted) for part in fp8.conversions) if fp8 is not None else 0
        losses = torch.stack(recorder.training).tolist()
        return Run(seed, recorder.validations, count_spikes(losses), fp8_layers), recorder


class NoiseFile:
    """bf16 runs of each configuration in a JSON file, so that sigma is measured once.

    Args:
        path: the file; it is made when the first run is kept.
        key: what identifies the configuration.
        sigma_runs: number of runs that sigma is taken from; later ones only serve as pairs.
    """

    def __init__(self, path: Path, key: dict[str, Any], sigma_runs: int) -> None:
        self.path = path
        self.key = key
        self.sigma_runs = sigma_runs
        self.name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]

    def load(self) -> list[Run]:
        """The runs kept so far."""
        return [Run(**run) for run in self._read().get(self.name, {}).get("runs", [])]

    def save(self, runs: list[Run]) -> None:
        """Keep these runs, with sigma once there are enough of them."""
        entry: dict[str, Any] = {"config": self.key, "runs": [asdict(run) for run in runs]}
        if len(runs) >= self.sigma_runs:
            entry["noise"] = asdict(self.noise(runs))
        content = {**self._read(), self.name: entry}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(content, indent=1) + "\n")

    def noise(self, runs: list[Run]) -> Noise:
        """How the first runs scatter."""
        return Noise.of(runs[: self.sigma_runs])

    def _read(self) -> dict[str, Any]:
        return json.loads(self.path.read_text()) if self.path.exists() else {}


def compare(
    recipe: Recipe | str | None = None,
    seeds: int = 3,
    sigma_runs: int = MIN_SIGMA_RUNS,
    steps: int | None = None,
    config: Path = Path("examples/gpt/fp8.yaml"),
    noise_file: Path = Path("runs/gpt/noise.json"),
    picture: Path | None = None,
    accelerator: str = "auto",
    backend: str = "auto",
    precision: str = "bf16-mixed",
) -> int:
    """Train in bf16 and FP8 over several seeds and print the gap with its spread.

    Args:
        recipe: FP8 recipe; by default the configuration's.
        seeds: fewest seeds for FP8; more are run where bf16's scatter asks for them.
        sigma_runs: number of bf16 runs that sigma is taken from.
        steps: steps of each run; by default the configuration's.
        config: configuration whose model and data are trained.
        noise_file: where bf16's runs are kept.
        picture: only draw the loss of bf16 and FP8 into this file, without the gate.
        accelerator: the Trainer's.
        backend: backend of the FP8 runs.
        precision: what bf16 runs train in, and FP8 runs around their FP8 layers.

    Returns:
        0 if the gate passes, 1 if it fails, 2 if it is void.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # It introduces itself at every run.
    experiment = Experiment(config, steps, accelerator, precision)

    def fp8(chosen: Recipe | str, library: str) -> PluginFactory:
        return lambda: FP8Precision(chosen, backend=library, precision=precision, layers=LayerSelection())  # type: ignore[arg-type]

    tested = fp8(recipe or experiment.recipe, backend)
    if picture is not None:
        draw(experiment, tested, seeds, picture)
        return 0

    noise_store = NoiseFile(noise_file, experiment.key, sigma_runs)
    bf16 = noise_store.load()

    def run_bf16(count: int) -> None:
        for seed in range(len(bf16), count):
            bf16.append(report("bf16", experiment.run(seed, None)[0]))
            noise_store.save(bf16)

    run_bf16(max(sigma_runs, seeds))
    noise = noise_store.noise(bf16)
    count = max(seeds, noise.seeds_needed())
    run_bf16(count)
    print(
        f"bf16: loss {noise.loss:.4f}, sigma {noise.sigma:.4f} ({noise.sigma / noise.loss:.2%}) over "
        f"{noise.runs} runs; {count} seeds, limit {noise.limit(count):.4f} ({noise.limit(count) / noise.loss:.2%})"
    )
    runs = [report("FP8", experiment.run(seed, tested)[0]) for seed in range(count)]
    # The control is of the comparison, not of a backend: not every one has fixed scales.
    control_plugin = fp8(StaticScaling(scale=1.0, format="e4m3"), "native")
    control = [report("control", experiment.run(seed, control_plugin)[0]) for seed in range(count)]
    verdict, control_verdict = judge(runs, bf16, noise), judge(control, bf16, noise)
    print(f"{runs[0].fp8_layers} layers in FP8 ({tested().settings.recipe!r})")
    print("FP8     " + describe(verdict, noise))
    print("control " + describe(control_verdict, noise))
    if control_verdict.within_limit:
        print("VOID: the positive control passes, so this comparison cannot tell good from bad; train for longer")
        return 2
    print("PASSED" if verdict.passed else "FAILED")
    return 0 if verdict.passed else 1


def report(kind: str, run: Run) -> Run:
    """Print a run when it is done."""
    print(f"{kind:8} seed {run.seed}: loss {run.final:.4f}, {run.spikes} spikes", flush=True)
    return run


def describe(verdict: Verdict, noise: Noise) -> str:
    """The gap and its spread in one line."""
    return (
        f"gap {verdict.mean:+.4f} +- {verdict.spread:.4f} ({verdict.mean / noise.loss:+.2%}) against a limit of "
        f"{verdict.limit:.4f}, {verdict.spikes} spikes against bf16's {verdict.bf16_spikes}"
    )


def draw(experiment: Experiment, fp8: PluginFactory, seeds: int, path: Path) -> None:
    """Draw the validation loss of bf16 and FP8: a line for each seed, in bits per byte, over the steps."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    kinds: list[tuple[str, PluginFactory | None, str]] = [("bf16", None, "tab:gray"), ("FP8", fp8, "tab:orange")]
    for label, plugin, colour in kinds:
        for seed in range(seeds):
            run, recorder = experiment.run(seed, plugin)
            report(label, run)
            bits = torch.tensor(recorder.validations) / torch.log(torch.tensor(2.0))
            style = "-" if plugin is None else "--"
            axes.plot(recorder.steps, bits, style, color=colour, label=label if seed == 0 else None)
    name = type(fp8().settings.recipe).__name__
    axes.set(
        xlabel="step", ylabel="validation loss [bits per byte]", title=f"bf16 and FP8 ({name}), {seeds} seeds each"
    )
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"drawn: {path}")


if __name__ == "__main__":
    sys.exit(auto_cli(compare))
