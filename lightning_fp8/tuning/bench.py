"""Whole training steps of a decoder under bf16, every recipe and every backend, side by side in one run.

Ratios are taken within one run, against bf16 compiled per block, because machines are noisy. Every variant starts from
the same weights and sees the same data; the losses of its first steps are shown beside bf16's.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_fp8.backends import NAMED_BACKENDS
from lightning_fp8.compiling import compile_options
from lightning_fp8.model import Conversion, conversions, convert_model
from lightning_fp8.selection import LayerSelection
from lightning_fp8.tuning.decoder import Decoder, DecoderShape, random_tokens

#: Losses noted before timing.
FIRST_STEPS = 6

#: What is measured beside bf16 where nobody says otherwise.
RECIPES = ("delayed", "tensorwise", "tensorwise_pow2", "rowwise", "blockwise", "blockwise_tiled")

#: Arguments of :func:`~lightning_fp8.compile_options` by a variant's suffix.
_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "-graphs": {"mode": "reduce-overhead"},
    "-cheap": {"recompute": "cheap"},
    "-all": {"recompute": "all"},
}

#: Converts a decoder in a way of its own, and returns what makes the context of its forward.
Preparation = Callable[[Decoder], Callable[[], AbstractContextManager[Any]]]


@dataclass
class Measurement:
    """One variant's figures.

    Attributes:
        variant: its name.
        milliseconds: a step's median.
        fastest, slowest: a step's extremes.
        peak_gib: most memory allocated at any time.
        losses: of the first steps.
        speedup: over bf16, compiled where that was measured, in the same run.
        kernels: milliseconds a step by kind of kernel, where profiled.
        kernel_names: the kernels that took longest, where profiled: name, calls and milliseconds a step.
        error: why it could not run.
    """

    variant: str
    milliseconds: float = 0.0
    fastest: float = 0.0
    slowest: float = 0.0
    peak_gib: float = 0.0
    losses: list[float] = field(default_factory=list)
    speedup: float = 0.0
    kernels: dict[str, float] = field(default_factory=dict)
    kernel_names: list[tuple[str, float, float]] = field(default_factory=list)
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def measure(
    shape: DecoderShape,
    variants: Iterable[str],
    *,
    rounds: int = 7,
    profile: bool = False,
    peers: Mapping[str, Preparation] | None = None,
    report: Callable[[str], None] = print,
) -> list[Measurement]:
    """Measure ``variants`` one after the other.

    Args:
        shape: the decoder.
        variants: names: ``bf16``, or ``[backend:]recipe``, each with ``-eager`` to leave ``torch.compile`` out,
            ``-graphs`` for CUDA graphs, ``-unfolded`` for plain ``torch.compile``, or ``-cheap`` or ``-all`` for what
            backward shall recompute; a recipe with ``-auto`` before that for ``layers="auto"``.
        rounds: timed rounds of three steps.
        profile: also sort the time of a step by kind of kernel, and name the slowest kernels.
        peers: further variants, by name.
        report: takes a line as each variant is done.
    """
    results: list[Measurement] = []
    for variant in variants:
        torch.compiler.reset()
        gc.collect()
        try:
            result = _measure_one(shape, variant, rounds, profile, peers or {})
        except Exception as error:  # A variant that cannot run is a row of the table, not the end of it.
            result = Measurement(variant, error=f"{type(error).__name__}: {str(error)[:300]}")
        done = [r for r in [*results, result] if not r.error]
        base = next((r for name in ("bf16", "bf16-eager") for r in done if r.variant == name), None)
        if base is not None and not result.error:
            result.speedup = base.milliseconds / result.milliseconds
        results.append(result)
        report(format_row(result))
    return results


def format_row(result: Measurement) -> str:
    """One line of the table."""
    if result.error:
        return f"{result.variant:<34} {result.error}"
    losses = " ".join(f"{loss:.3f}" for loss in result.losses)
    memory = f"{result.peak_gib:6.2f} GiB  " if result.peak_gib else ""
    line = (
        f"{result.variant:<34} {result.milliseconds:8.2f} ms [{result.fastest:.2f}, {result.slowest:.2f}]  "
        f"x{result.speedup:.3f}  {memory}loss {losses}"
    )
    if result.kernels:
        line += "\n    " + "  ".join(f"{kind} {ms:.2f}" for kind, ms in result.kernels.items())
    return line


def _measure_one(
    shape: DecoderShape, variant: str, rounds: int, profile: bool, peers: Mapping[str, Preparation]
) -> Measurement:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = build_step(shape, variant, device, peers)
    losses = [float(step()) for _ in range(FIRST_STEPS)]
    times = [_time(step, 3, device) for _ in range(rounds)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    kernels = _kernels_of(step) if profile and device.type == "cuda" else []
    return Measurement(
        variant,
        milliseconds=statistics.median(times),
        fastest=min(times),
        slowest=max(times),
        peak_gib=peak,
        losses=losses,
        kernels=_by_kind(kernels),
        kernel_names=kernels[:_LONGEST],
    )


def build_step(
    shape: DecoderShape, variant: str, device: torch.device, peers: Mapping[str, Preparation] | None = None
) -> Callable[[], torch.Tensor]:
    """A function that runs one training step (forward, backward, fused AdamW, scales) and returns the loss.

    Args:
        shape: the decoder.
        variant: as in :func:`measure`.
        device: where it runs.
        peers: further variants, by name.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(shape).to(torch.bfloat16)
    mode = next((m for m in ("-eager", "-unfolded", *_OPTIONS) if m and variant.endswith(m)), "")
    name = variant.removesuffix(mode)
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    peer = (peers or {}).get(name)
    if peer is not None:
        context = peer(model)
    if mode == "-unfolded":
        compile_blocks(model, {})
    elif mode != "-eager":
        compile_blocks(model, compile_options(**_OPTIONS[mode]))
    if peer is None and name != "bf16":  # Compiled before, as "auto" wants to know.
        backend, _, recipe = name.removesuffix("-auto").rpartition(":")
        layers: LayerSelection | Literal["auto"] = "auto" if name.endswith("-auto") else LayerSelection()
        convert_model(model, recipe, backend=NAMED_BACKENDS[backend or "native"], layers=layers, tokens=shape.tokens)
        if layers != "auto":
            _check_converted(conversions(model)[0])
        context = conversions(model)[0].runtime.forward_context
    inputs, targets = random_tokens(shape, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    active = conversions(model)

    def compute_loss() -> torch.Tensor:
        if mode == "-graphs":
            torch.compiler.cudagraph_mark_step_begin()
        with context():
            return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    return lambda: run_step(compute_loss, optimizer, active)


def _check_converted(conversion: Conversion) -> None:
    """Refuse to measure bf16 under the name of a recipe.

    Raises:
        ValueError: no layer runs in FP8.
    """
    if not conversion.converted:
        reasons = dict.fromkeys(decision.reason for decision in conversion.decisions)
        raise ValueError(f"no layer of this shape runs in FP8: {'; '.join(reasons)}.")


def run_step(
    compute_loss: Callable[[], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    active: Sequence[Conversion],
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """One training step with FP8 layers, without a Trainer.

    Args:
        compute_loss: forward, and the loss.
        optimizer: takes the step.
        active: the model's conversions.
        group: the ranks that share amaxes; ``None`` is all of them.

    Returns:
        The loss, detached.
    """
    for conversion in active:
        conversion.step(group)
    loss = compute_loss()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    for conversion in active:
        conversion.optimizer_stepped()
    return loss.detach()


def compile_blocks(model: Decoder, options: Mapping[str, Any] | None = None) -> None:
    """Compile each block in place, by default with casts folded; equal blocks share one graph."""
    chosen = compile_options() if options is None else dict(options)
    for block in model.blocks:
        block.compile(fullgraph=True, options=chosen)


def _time(step: Callable[[], torch.Tensor], count: int, device: torch.device) -> float:
    """Milliseconds a step."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            step()
        return (time.perf_counter() - start) / count * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(count):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count


#: Kernels that a measurement names.
_LONGEST = 40
#: Steps that are profiled.
_PROFILED_STEPS = 3

#: Kinds of kernels by parts of their names, the first that fits. Casts begin so; the compiler's own names begin with
#: "triton" and may hold any word.
_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("cast", ("cast_", "foresee", "amax_", "row_and_column_scales", "step_scales", "void transformer_engine::")),
    ("attention", ("flash", "fmha", "sdpa", "cudnn_generated")),
    ("optimizer", ("multi_tensor", "adam")),
    ("gemm", ("gemm", "nvjet", "cutlass", "qqtst", "xmma", "gemv")),
    ("reduction", ("_red_", "_per_", "reduce")),
    ("copy", ("memcpy", "memset", "copy")),
    ("pointwise", ("",)),
)


def _by_kind(kernels: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    """Milliseconds by kind of kernel, the longest first."""
    kinds: dict[str, float] = {}
    for name, _, milliseconds in kernels:
        lower = name.lower()
        kind = next(k for k, parts in _KINDS if any(lower.startswith(p) if k == "cast" else p in lower for p in parts))
        kinds[kind] = kinds.get(kind, 0.0) + milliseconds
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))


def _kernels_of(step: Callable[[], torch.Tensor]) -> list[tuple[str, float, float]]:
    """The kernels of a step, a mean of several: name, calls and milliseconds, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    steps = _PROFILED_STEPS
    return [(event.key, event.count / steps, event.self_device_time_total / 1e3 / steps) for event in events]
