"""Measure the table that ``layers="auto"`` chooses from, for the GPU at hand.

python benchmarks/layer_table.py --out lightning_fp8/tuning/data/nvidia-h200.json
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

import torch

from lightning_fp8.recipes import get_recipe
from lightning_fp8.tuning.bench import RECIPES
from lightning_fp8.tuning.layers import measure_host, measure_layer
from lightning_fp8.tuning.table import LayerTable, grid


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=[*RECIPES, "rowwise_gw_hp"])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    table = LayerTable(torch.cuda.get_device_name(), torch.__version__, datetime.date.today().isoformat())
    for variant in ("bf16", *args.recipes):
        recipe = None if variant == "bf16" else get_recipe(variant)
        table.host[variant] = measure_host(recipe)
        table.host_compiled[variant] = measure_host(recipe, compiled=True)
        print(
            f"{variant}: the host needs {table.host[variant]:.3f} ms a layer, "
            f"{table.host_compiled[variant]:.3f} ms in a compiled model",
            flush=True,
        )
        table.times[variant] = {point: measure_layer(*point, recipe) for point in grid()}
    args.out.write_text(table.to_json() + "\n")
    for point in [(8192, 768, 3072), (8192, 4096, 4096), (16384, 4096, 28672)]:
        bf16 = table.milliseconds("bf16", *point)
        gains = [f"{name} x{bf16 / table.milliseconds(name, *point):.2f}" for name in args.recipes]
        print(f"tokens, in, out = {point}: {', '.join(gains)}")


if __name__ == "__main__":
    main()
