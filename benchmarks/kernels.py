"""Speed of the kernels on this GPU, beside a plain copy.

    python benchmarks/kernels.py [--sweep] [--only stored,amax] [--parts casts,host,layers,linear] [--json results.json]

Bandwidths count every value read once and every code written once: 4 bytes a value for cast, transpose and amax of
bf16 in one pass, 6 where the amaxes take a pass of their own. ``--sweep`` compares tiles instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor, nn

from lightning_fp8 import LayerSelection, convert_model, kernels, ops
from lightning_fp8.amax_history import AmaxHistory
from lightning_fp8.casts import Cast
from lightning_fp8.formats import E4M3, E5M2
from lightning_fp8.kernels import triton_cast
from lightning_fp8.kernels.scale_update import step_scales
from lightning_fp8.kernels.triton_cast import Tile
from lightning_fp8.recipes import ROLES, DelayedScaling, Recipe, get_recipe
from lightning_fp8.statistics import StatisticsTable
from lightning_fp8.tuning.bench import RECIPES

#: Activations and a weight of a Llama-8B-sized layer; a small model's activations.
SHAPES = [(16384, 4096), (16384, 14336), (4096, 14336), (32768, 768)]
#: (in_features, out_features) of the same layer's projections.
LINEARS = [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)]
TOKENS = 16384


def median_ms(run: Callable[[], object], budget_ms: float = 40) -> float:
    """Median GPU time of ``run``; what it reads is not in the L2 cache.

    The cache is filled by reading, not by writing: what is written there has to go to memory first, 50 MB of it on an
    H200, at the expense of what runs next.
    """
    other = torch.zeros(1 << 28, dtype=torch.int8, device="cuda").view(torch.int32)
    run()
    torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < 10 or sum(times) < budget_ms:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(10)]
        for start, end in events:
            other.max()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        times += [start.elapsed_time(end) for start, end in events]
    return statistics.median(times)


def slot_of(scale: float = 16.0) -> Tensor:
    """A slot whose scales are set."""
    return torch.tensor([-1.0, scale, scale, -1.0], device="cuda")


def random(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal values on the GPU."""
    return torch.randn(rows, columns, device="cuda", dtype=dtype)


def copy_bandwidth(rows: int, columns: int) -> float:
    """GB/s of ``copy_``, bytes read and written."""
    x = random(rows, columns)
    y = torch.empty_like(x)
    return 2 * x.numel() * x.element_size() / median_ms(lambda: y.copy_(x)) / 1e6


def cast_cases() -> list[tuple[str, float, str | None, str | None, bool, torch.dtype]]:
    """(name, bytes a value, either direction's cast but for its format, stored, dtype)."""
    bf16 = torch.bfloat16
    return [
        ("tensorwise stored", 4, "tensorwise", "tensorwise", True, bf16),
        ("tensorwise stored, fp32", 6, "tensorwise", "tensorwise", True, torch.float32),
        ("tensorwise stored, straight", 3, "tensorwise", None, True, bf16),
        ("tensorwise stored, transposed", 3, None, "tensorwise", True, bf16),
        ("tensorwise foreseen", 4, "tensorwise/pow2", "tensorwise/pow2", False, bf16),
        ("tensorwise from data", 6, "tensorwise", "tensorwise", False, bf16),
        ("rowwise pair", 6, "rowwise", "rowwise", False, bf16),
        ("rowwise straight", 3, "rowwise", None, False, bf16),
        ("rowwise, tensorwise", 6, "rowwise", "tensorwise", False, bf16),
        ("1x128 pair", 4, "1x128", "1x128", False, bf16),
        ("1x128, 128x128", 4, "1x128", "128x128", False, bf16),
        ("128x128 pair", 4, "128x128", "128x128", False, bf16),
        ("1x32 pair", 4, "1x32", "1x32", False, bf16),
    ]


def bench_casts() -> list[dict[str, Any]]:
    """Every kind of cast at every shape."""
    rows = []
    for shape in SHAPES:
        copy = copy_bandwidth(*shape)
        rows.append({"kernel": "copy", "shape": shape, "us": "", "GB/s": copy, "of copy": 1.0})
        x = random(*shape)
        runs: list[tuple[str, float, Callable[[], object]]] = [("amax", 2, partial(triton_cast.amax_partials, x))]
        for name, size, straight, transposed, stored, dtype in cast_cases():
            pair = [use and Cast.parse(f"e4m3/{use}") for use in (straight, transposed)]
            runs.append((name, size, partial(kernels.cast, x.to(dtype), *pair, slot_of(), stored)))
        compile_all(run for _, _, run in runs)
        rows += [bandwidth(name, shape, size, median_ms(run), copy) for name, size, run in runs]
    return rows


def bandwidth(kernel: str, shape: tuple[int, int], size: float, ms: float, copy: float) -> dict[str, Any]:
    """A row of a table."""
    rate = size * shape[0] * shape[1] / ms / 1e6
    return {"kernel": kernel, "shape": shape, "us": ms * 1e3, "GB/s": rate, "of copy": rate / copy}


def bench_host() -> list[dict[str, Any]]:
    """Host time of a call in eager mode, and GPU time of the smallest pieces."""
    x, slot = random(128, 256), slot_of()
    cases: list[tuple[str, Callable[[], object]]] = []
    for granularity, stored in (("tensorwise", True), ("tensorwise", False), ("rowwise", False), ("1x128", False)):
        pair = Cast(E4M3, granularity), Cast(E5M2, granularity)
        cases.append((f"cast {granularity}{stored * ' stored'}", partial(kernels.cast, x, *pair, slot, stored)))
    cast = Cast(E4M3, "tensorwise")
    a, decode, _, _ = kernels.cast(x, cast, None, None, False)
    cases.append(("scaled_mm", lambda: kernels.scaled_mm(a, a, decode, decode, (cast, cast), torch.bfloat16, False)))
    cases.append(("torch.mm", lambda: torch.mm(x, x.t())))
    recipe = DelayedScaling()
    table = StatisticsTable([str(i) for i in range(200)], "cuda")
    history = AmaxHistory(recipe, table)
    arguments = (table.data, history.values, history.position, history.format_maxima, recipe)
    cases.append(("step_scales, 200 layers", partial(step_scales, *arguments)))
    return [{"call": name, "host us": host_us(run), "gpu us": median_ms(run, 10) * 1e3} for name, run in cases]


def bench_layers() -> list[dict[str, Any]]:
    """Host time of forward and backward of linear layers, the tensors too small to count."""
    rows = []
    for name in ("bf16", "delayed", "tensorwise", "rowwise", "blockwise", "blockwise_tiled"):
        for compiled in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))).to("cuda", torch.bfloat16)
            if name != "bf16":
                convert_model(model, name, layers=LayerSelection())
            multiply = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
            x, g = random(128, 256).requires_grad_(), random(128, 256)
            run = partial(_forward_backward, multiply, x, g)
            layers = len(model)
            rows.append({
                "layers": name, "mode": "compiled" if compiled else "eager",
                "host us a layer": host_us(run, 100) / layers,
                "forward": host_us(partial(multiply, x), 100) / layers,
                "gpu us a layer": median_ms(run, 10) * 1e3 / layers,
            })  # fmt: skip
    return rows


def _forward_backward(model: Callable[[Tensor], Tensor], x: Tensor, g: Tensor) -> None:
    model(x).backward(g)


def host_us(run: Callable[[], object], calls: int = 300) -> float:
    """Host time a call, the GPU never waited for."""
    for _ in range(20):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / calls * 1e6


def bench_linears() -> list[dict[str, Any]]:
    """Forward and backward of one linear, against its three GEMMs alone and against bf16."""
    rows = []
    for name in RECIPES:
        recipe = get_recipe(name)
        for k, n in LINEARS:
            rows.append({"recipe": name, "K": k, "N": n, **linear_times(recipe, k, n)})
    return rows


def linear_times(recipe: Recipe, k: int, n: int) -> dict[str, float]:
    """Times of one linear, of its GEMMs with operands ready, and of bf16, all eager."""
    x, w = random(TOKENS, k).requires_grad_(), random(n, k).requires_grad_()
    g = random(TOKENS, n)
    casts = ops.LinearCasts.of(recipe, recipe.source != "data")
    slots = tuple(slot_of() for _ in ROLES)

    def linear() -> None:
        y = ops.scaled_linear(x, w, casts, slots)
        torch.autograd.grad(y, (x, w), g)

    def bf16() -> None:
        torch.autograd.grad(x @ w.t(), (x, w), g)

    operands = [
        kernels.cast(values.detach(), recipe.casts[role].straight, recipe.casts[role].transposed, None, False)
        for values, role in zip((x, w, g), ROLES, strict=True)
    ]
    pairs = [recipe.gemm_casts(gemm) for gemm in ("output", "grad_input", "grad_weight")]

    def gemms() -> None:
        (xq, xd, xt, xtd), (wq, wd, wt, wtd), (gq, gd, gt, gtd) = operands
        kernels.scaled_mm(xq, wq, xd, wd, pairs[0], torch.bfloat16, True)
        kernels.scaled_mm(gq, wt, gd, wtd, pairs[1], torch.bfloat16, False)
        kernels.scaled_mm(gt, xt, gtd, xtd, pairs[2], torch.bfloat16, False)

    # In turns: the clock falls as the card gets hot.
    rounds = [[median_ms(run, 30) for run in (linear, gemms, bf16)] for _ in range(5)]
    linear_ms, gemms_ms, bf16_ms = map(statistics.median, zip(*rounds, strict=True))
    return {
        "linear ms": linear_ms,
        "3 GEMMs ms": gemms_ms,
        "GEMMs/linear": gemms_ms / linear_ms,
        "bf16 ms": bf16_ms,
        "speed-up": bf16_ms / linear_ms,
    }


# --- sweep -----------------------------------------------------------------------------------------------------------

#: Rows, columns, warps.
CAST_TILES = [
    (32, 128, 2), (32, 128, 4), (32, 256, 4), (32, 256, 8), (64, 64, 2), (64, 64, 4), (64, 128, 4), (64, 128, 8),
    (64, 256, 8), (128, 32, 2), (128, 32, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8), (128, 128, 16), (256, 32, 4),
    (256, 32, 8), (256, 64, 8), (256, 64, 16),
]  # fmt: skip
PAIR_TILES = [
    (64, 64, 4), (64, 128, 4), (64, 128, 8), (128, 64, 4), (128, 64, 8), (128, 128, 8), (128, 128, 16),
]  # fmt: skip
VECTOR_TILES = [
    (16, 512, 4), (32, 256, 4), (32, 512, 4), (32, 512, 8), (32, 1024, 8), (64, 128, 4), (64, 128, 8), (64, 256, 8),
    (64, 512, 8), (128, 128, 8), (128, 256, 8),
]  # fmt: skip
AMAX_TILES = [(16, 256, 4), (32, 256, 4), (32, 256, 8), (64, 256, 8), (16, 512, 8), (32, 512, 16), (16, 1024, 8)]
BLOCK_TILES = [(128, 128, 4), (128, 128, 8), (128, 128, 16)]
GROUPS = (1, 8, 1 << 20)


def sweep(only: set[str] | None = None) -> list[dict[str, Any]]:
    """Tiles of every kernel (of those in ``only``) at the first shape, the best first."""
    shape = SHAPES[0]
    copy = copy_bandwidth(*shape)
    x, slot = random(*shape), slot_of()
    tensor, row = Cast(E4M3, "tensorwise"), Cast(E4M3, "rowwise")
    out = kernels.cast(x, row, row, slot, False)
    cases: list[tuple[str, float, Tile, Callable[[], object]]] = []

    def add(name: str, size: float, tiles: Iterable[Tile], run: Callable[[Tile], Callable[[], object]]) -> None:
        if only is None or name in only:
            cases.extend((name, size, tile, run(tile)) for tile in tiles)

    def each(sizes: list[tuple[int, int, int]], groups: tuple[int, ...] = GROUPS) -> list[Tile]:
        return [Tile(*size, group) for size in sizes for group in groups]

    rows = shape[0]
    add("stored", 4, each(CAST_TILES), lambda t: lambda: triton_cast.cast_stored(x, rows, tensor, tensor, slot, t))
    add("rowwise pair", 6, each(PAIR_TILES), lambda t: lambda: triton_cast.cast_from_data(x, rows, row, row, slot, t))
    add(
        "row and column scales",
        2,
        each(VECTOR_TILES, (1,)),
        lambda t: lambda: triton_cast.row_and_column_scales(x, rows, row, row, out, slot, t),
    )
    for programs in (528, 1024, 2048, 4096):
        # The group of such a tile is its number of programs.
        tiles = [Tile(*size, programs) for size in AMAX_TILES]
        add("amax", 2, tiles, lambda t: lambda: triton_cast.amax_partials(x, t, t.group))
    for name in ("1x128", "128x128"):
        cast = Cast(E4M3, name)
        add(
            name,
            4,
            each(BLOCK_TILES, (1,)),
            lambda t, c=cast: lambda: triton_cast.cast_blocks_128(x, rows, c, c, slot, t),
        )
    # Groups and programs are no constants of a kernel.
    compile_all({(name, t.rows, t.columns, t.warps): run for name, _, t, run in cases}.values())
    results = []
    for name, size, tile, run in cases:
        result = bandwidth(name, shape, size, median_ms(run, 15), copy)
        results.append({**result, "tile": f"{tile.rows}x{tile.columns}/{tile.warps} g{tile.group}"})
    return sorted(results, key=lambda r: (r["kernel"], -r["of copy"]))


def compile_all(runs: Iterable[Callable[[], object]]) -> None:
    """Run each once; Triton compiles in the threads side by side."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda run: run(), runs))
    torch.cuda.synchronize()


# --- command ---------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "casts": bench_casts,
    "host": bench_host,
    "layers": bench_layers,
    "linear": bench_linears,
}


def print_table(rows: list[dict[str, Any]], top: int | None = None) -> None:
    """Columns of ``rows``; of a sweep the ``top`` of each kernel only."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names]
    seen: dict[str, int] = {}
    for row in rows:
        kernel = str(row.get("kernel"))
        seen[kernel] = seen.get(kernel, 0) + 1
        if top is None or seen[kernel] <= top:
            cells.append([_text(row.get(name, "")) for name in names])
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value < 100
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )


def main() -> None:
    """Measure, write JSON if asked, print tables last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="compare tiles instead")
    parser.add_argument("--only", help="kernels that the sweep is about, separated by commas; by default all")
    parser.add_argument("--parts", default=",".join(PARTS), help="which tables, separated by commas")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    parser.add_argument("--top", type=int, default=6, help="how many tiles of each kernel a sweep prints")
    arguments = parser.parse_args()
    start = time.perf_counter()
    only = set(arguments.only.split(",")) if arguments.only else None
    parts = (
        {"sweep": partial(sweep, only)}
        if arguments.sweep
        else {part: PARTS[part] for part in arguments.parts.split(",")}
    )
    tables = {name: part() for name, part in parts.items()}
    seconds = time.perf_counter() - start
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    if arguments.json:
        arguments.json.write_text(json.dumps({**about, "seconds": seconds, **tables}, indent=1))
    for name, rows in tables.items():
        print(f"\n{name} ({', '.join(about.values())}, {seconds:.0f} s in all)")
        print_table(rows, arguments.top if arguments.sweep else None)


if __name__ == "__main__":
    main()
