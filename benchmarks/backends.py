"""Backends side by side on one GPU: gradients, checkpoints, loss curves, and FBGEMM's products against torch's.

python benchmarks/backends.py gradients checkpoints curves gemm --out docs/benchmarks/backends.md

What a machine lacks is left out and named. Transformer Engine and FBGEMM do not have to be there at once.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from examples.gpt.data import read_text
from examples.gpt.model import GPT
from lightning_fp8 import LayerSelection, convert_model, step
from lightning_fp8.backends import NAMED_BACKENDS
from lightning_fp8.casts import Cast
from lightning_fp8.kernels import cast, fbgemm, scaled_mm
from lightning_fp8.model import conversions
from lightning_fp8.recipes import RECIPE_NAMES, get_recipe

CUDA = torch.device("cuda")
ALL = LayerSelection()


def runnable() -> Iterator[tuple[str, str]]:
    """Backend and recipe, where they run on tensor cores or emulated here."""
    for name, backend in NAMED_BACKENDS.items():
        for recipe in RECIPE_NAMES:
            if backend.support(get_recipe(recipe), CUDA).kind != "refused":
                yield name, recipe


def refused() -> list[str]:
    """Why the others do not run, each reason once."""
    supports = {
        f"{name}: {backend.support(get_recipe(recipe), CUDA).reason}"
        for name, backend in NAMED_BACKENDS.items()
        for recipe in RECIPE_NAMES
        if backend.support(get_recipe(recipe), CUDA).kind == "refused"
    }
    return sorted(supports)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def sqnr(exact: Tensor, x: Tensor) -> float:
    """Signal to quantisation noise, dB."""
    noise = (exact - x.double()).square().sum()
    return 10 * math.log10(exact.square().sum() / noise) if noise > 0 else math.inf


def make_gpt(layers: int = 4) -> GPT:
    """The byte-level GPT of the examples."""
    torch.manual_seed(0)
    return GPT(width=512, layers=layers, heads=4, length=512).cuda()


def loss_of(model: nn.Module, text: Tensor, autocast: bool = True) -> Tensor:
    """Mean loss of the next byte, fp32 under autocast, else in the model's dtype; ``text`` is ``[batch, time + 1]``."""
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        logits = model(text[:, :-1])
    logits = logits.float() if autocast else logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def text_batches(length: int = 512, size: int = 16) -> Iterator[Tensor]:
    """Random windows, the same for every caller."""
    data = torch.frombuffer(bytearray(read_text(None, 8_000_000)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(data) - length - 1, (size,), generator=generator)
        yield torch.stack([data[s : s + length + 1] for s in starts]).long().cuda()


def gradients() -> str:
    """One step's gradients of every linear layer against float64."""
    plain = make_gpt(layers=2)
    text = next(text_batches(256, 8))

    def backward(model: nn.Module, autocast: bool) -> dict[str, Tensor]:
        loss_of(model, text, autocast).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.dim() == 2}

    exact = backward(copy.deepcopy(plain).double(), autocast=False)
    layers = [name for name in exact if name.startswith("blocks.")]
    rows = []
    for name, recipe in [("bf16", ""), *runnable()]:
        model = copy.deepcopy(plain)
        if recipe:
            convert_model(model, recipe, backend=NAMED_BACKENDS[name], layers=ALL, autocast_only=True)
        got = backward(model, autocast=True)
        values = [sqnr(exact[layer], got[layer]) for layer in layers]
        rows.append([name, recipe, f"{min(values):.1f}", *(f"{value:.1f}" for value in values)])
    return "## Gradients of one step against float64 (SQNR, dB)\n\n" + table(
        ["backend", "recipe", "worst", *layers], rows
    )


def train(model: GPT, steps: int, batches: Iterator[Tensor], optimizer: torch.optim.Optimizer) -> list[float]:
    """Losses of ``steps`` steps."""
    losses = []
    for text in itertools.islice(batches, steps):
        loss = loss_of(model, text)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if conversions(model):
            step(model)
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all runs."""
    return torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)


def checkpoints() -> str:
    """A checkpoint written by each backend goes on in each other: the first losses there."""
    names = [name for name in NAMED_BACKENDS if (name, "tensorwise") in set(runnable())]

    def make(name: str) -> GPT:
        model = make_gpt()
        if name != "bf16":
            convert_model(model, "tensorwise", backend=NAMED_BACKENDS[name], layers=ALL, autocast_only=True)
        return model

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for source in ["bf16", *names]:
            model = make(source)
            optimizer, batches = adamw(model), text_batches()
            before = train(model, 60, batches, optimizer)[-5:]
            file = Path(folder) / "checkpoint.pt"
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            cells = []
            for target in ["bf16", *names]:
                saved = torch.load(file, weights_only=True)
                other = make(target)
                other.load_state_dict(saved["model"])
                optimizer = adamw(other)
                optimizer.load_state_dict(saved["optimizer"])
                after = train(other, 5, itertools.islice(text_batches(), 60, None), optimizer)
                cells.append(f"{sum(after) / 5:.4f}")
            rows.append([source, f"{sum(before) / 5:.4f}", *cells])
    return "## One checkpoint through all backends (mean loss of 5 steps before and after)\n\n" + table(
        ["written by", "before", *(f"goes on in {name}" for name in ["bf16", *names])], rows
    )


def curves(steps: int = 200) -> str:
    """One seed's loss for each backend and recipe."""
    marks = [steps // 8, steps // 4, steps // 2, steps]
    rows = []
    for name, recipe in [("bf16", ""), *runnable()]:
        model = make_gpt()
        if recipe:
            convert_model(model, recipe, backend=NAMED_BACKENDS[name], layers=ALL, autocast_only=True)
        losses = train(model, steps, text_batches(), adamw(model))
        rows.append([name, recipe, *(f"{sum(losses[mark - 10 : mark]) / 10:.4f}" for mark in marks)])
    head = ["backend", "recipe", *(f"step {mark}" for mark in marks)]
    return "## Loss, one seed (mean of the last 10 steps)\n\n" + table(head, rows)


def gemm() -> str:
    """Products of torch and of FBGEMM, TFLOP/s, interleaved."""
    shapes = [(16384, 6144, 4096), (16384, 28672, 4096), (16384, 4096, 14336), (8192, 8192, 8192)]
    kinds = {"tensorwise": ("tensorwise",) * 2, "rowwise": ("rowwise",) * 2, "blockwise": ("1x128", "128x128")}
    have = fbgemm.why_not_installed() is None
    rows = []
    for m, n, k in shapes:
        variants: dict[str, Callable[[], Tensor]] = {}
        for kind, granularities in kinds.items():
            casts = tuple(Cast(get_recipe("rowwise").casts["input"].straight.format, g) for g in granularities)  # type: ignore[arg-type, union-attr]
            a, decode_a, *_ = cast(torch.randn(m, k, device=CUDA, dtype=torch.bfloat16), casts[0], None, None, False)
            b, decode_b, *_ = cast(torch.randn(n, k, device=CUDA, dtype=torch.bfloat16), casts[1], None, None, False)
            for fast in (True, False):
                operands = (a, b, decode_a, decode_b, casts)
                label = f"{kind}{'' if fast else ' exact'}"
                variants[f"torch {label}"] = lambda o=operands, f=fast: scaled_mm(*o, torch.bfloat16, f)
                if have:
                    variants[f"FBGEMM {label}"] = lambda o=operands, f=fast: fbgemm.scaled_mm(*o, f)
        times: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(12):
            for name, run in variants.items():
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                run()
                end.record()
                end.synchronize()
                if turn >= 2:
                    times[name].append(begin.elapsed_time(end))
        medians = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
        rows.append([f"{m}, {n}, {k}", *(f"{2e-9 * m * n * k / medians[name]:.0f}" for name in variants)])
    return "## Products (TFLOP/s, bf16 output)\n\n" + table(["M, N, K", *variants], rows)


PARTS = {"gradients": gradients, "checkpoints": checkpoints, "curves": curves, "gemm": gemm}


def main() -> None:
    """Run the parts asked for and write one page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=list(PARTS), default=[])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    page = [f"# Backends on one {torch.cuda.get_device_name()}, torch {torch.__version__}"]
    for part in options.parts or PARTS:
        page.append(PARTS[part]())
        print(page[-1], flush=True)
    page.append("## Not run\n\n" + "\n".join(f"- {reason}" for reason in refused()))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("\n\n".join(page) + "\n")


if __name__ == "__main__":
    main()
