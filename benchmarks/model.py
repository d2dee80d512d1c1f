"""Whole training steps, bf16 against every recipe, in one run.

python benchmarks/model.py --shape 8b --variants bf16 delayed delayed-eager rowwise --profile --out result.json

Peers as their own users have them: ``peer-torchao-tensorwise``, ``peer-torchao-rowwise``, ``peer-te-delayed-eager``,
``peer-te-current-eager``, ``peer-te-block-eager``.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch
from peers import PEERS

from lightning_fp8.tuning.bench import RECIPES, measure
from lightning_fp8.tuning.decoder import SHAPES, parse_shape

DEFAULT = ["bf16", *RECIPES]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["8b"], help=f"{', '.join(SHAPES)}, or numbers (parse_shape)")
    parser.add_argument("--variants", nargs="+", default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="sort the time of a step by kind of kernel")
    parser.add_argument("--kernels", type=int, default=0, help="with --profile, list so many of each one's kernels")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    print(f"torch {torch.__version__}, {machine}", flush=True)
    results = {}
    for shape in args.shape:
        sizes = parse_shape(shape)
        print(f"{shape}: {sizes}", flush=True)
        rows = measure(sizes, args.variants, rounds=args.rounds, profile=args.profile, peers=PEERS, report=_say)
        results[shape] = [row.to_dict() for row in rows]
        for row in rows if args.kernels else ():
            _say(row.variant)
            for name, calls, milliseconds in row.kernel_names[: args.kernels]:
                _say(f"    {milliseconds:8.3f} ms x{calls:4.0f} {name[:100]}")
    if args.out:
        args.out.write_text(json.dumps({"torch": torch.__version__, "machine": machine, "results": results}, indent=1))


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
