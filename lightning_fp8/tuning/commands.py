"""The subcommands ``doctor``, ``advise`` and ``bench`` of ``lightning-fp8``."""

from __future__ import annotations

import inspect
import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_fp8.backends import NAMED_BACKENDS, NativeBackend
from lightning_fp8.cli_errors import CommandParser, OneLineParser, one_line
from lightning_fp8.recipes import RECIPE_NAMES, Recipe, get_recipe
from lightning_fp8.tuning.advice import Inputs
from lightning_fp8.tuning.advice import advise as look_at
from lightning_fp8.tuning.bench import RECIPES, measure
from lightning_fp8.tuning.choice import DEFAULT_TOKENS, Source, times_on, variant_in
from lightning_fp8.tuning.decoder import SHAPES, parse_shape
from lightning_fp8.tuning.machine import describe, examine
from lightning_fp8.tuning.peaks import peak_of
from lightning_fp8.tuning.picture import draw
from lightning_fp8.tuning.table import LayerTable, shipped_tables


def doctor(args: Sequence[str] | None = None) -> int:
    """Say what this machine runs natively, emulates and refuses.

    Args:
        args: words after ``doctor``; ``None`` takes them from the command line.
    """
    parser = CommandParser("lightning-fp8 doctor", description="What this machine runs natively, emulates and refuses.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse_args(args)
    found = examine()
    print(json.dumps(found, indent=1) if parsed.json else describe(found))
    return 0


def bench(args: Sequence[str] | None = None) -> int:
    """Measure whole training steps of a decoder here: bf16, and each recipe on each backend that runs it.

    Args:
        args: words after ``bench``; ``None`` takes them from the command line.
    """
    cuda = torch.cuda.is_available()
    parser = _bench_parser(cuda)
    parsed = parser.parse_args(args)
    try:
        shapes = {text: parse_shape(text) for text in parsed.shape}
        recipes = {name: get_recipe(name) for name in parsed.recipes}
    except ValueError as error:
        parser.error(str(error))
    if parsed.rounds < 1:
        parser.error("--rounds must be at least 1.")
    for path in (parsed.json, parsed.picture):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"There is no folder {path.absolute().parent}.")
        if path is not None and path.is_dir():
            parser.error(f"{path} is a folder: name a file in it.")
    variants, left_out = _variants(parsed.backends or NAMED_BACKENDS, recipes, torch.device("cuda" if cuda else "cpu"))
    endings = {"yes": [""], "no": ["-eager"], "both": ["", "-eager"]}[parsed.compile]
    machine = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    print(f"{machine}, torch {torch.__version__}", flush=True)
    for line in left_out:
        print(f"left out: {line}")
    results = {}
    for text, shape in shapes.items():
        print(f"\n{text}: {shape}", flush=True)
        results[text] = measure(
            shape, [v + e for v in variants for e in endings], rounds=parsed.rounds, profile=True, report=_say
        )
    if parsed.json:
        figures = {text: [row.to_dict() for row in rows] for text, rows in results.items()}
        content = {"machine": machine, "torch": torch.__version__, "left_out": left_out, "results": figures}
        parsed.json.write_text(json.dumps(content, indent=1) + "\n")
    if parsed.picture:
        try:
            draw(results, parsed.picture, f"{machine}, torch {torch.__version__}")
        except (ImportError, ValueError) as error:
            parser.error(str(error))
    return 0


def _bench_parser(cuda: bool) -> CommandParser:
    parser = CommandParser("lightning-fp8 bench", description="Training steps in bf16 and FP8 on this machine.")
    parser.add_argument(
        "--shape",
        nargs="+",
        default=["8b" if cuda else "tiny"],
        help=f"of the decoder: {', '.join(SHAPES)}, or width,ffn,layers,batch,length[,heads[,kv_heads]]; by default 8b "
        "on GPUs, elsewhere tiny",
    )
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=list(RECIPES),
        help=f"of {', '.join(RECIPE_NAMES)}; by default {', '.join(RECIPES)}",
    )
    parser.add_argument("--backends", nargs="+", choices=list(NAMED_BACKENDS), help="by default all that are installed")
    parser.add_argument(
        "--compile",
        choices=["yes", "no", "both"],
        default="yes" if cuda else "no",
        help="torch.compile per block; by default on GPUs",
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of three steps; by default 5")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--picture", type=Path, help="draw them there")
    return parser


def _variants(
    backends: Iterable[str], recipes: Mapping[str, Recipe], device: torch.device
) -> tuple[list[str], list[str]]:
    """Names of what runs on ``device``, bf16 first, and a line for each recipe that a backend refuses there."""
    variants, left_out = ["bf16"], []
    for backend in backends:
        for name, recipe in recipes.items():
            support = NAMED_BACKENDS[backend].support(recipe, device)
            if support.kind == "refused":
                left_out.append(f"{backend} {name}: {support.reason}")
            else:
                variants.append(name if backend == "native" else f"{backend}:{name}")
    return variants, left_out


def advise(args: Sequence[str] | None = None) -> int:
    """Say for a model which layers gain from FP8, how much, and the expected speed-up of a step.

    Args:
        args: words after ``advise``; ``None`` takes them from the command line.
    """
    parser = CommandParser(
        "lightning-fp8 advise",
        description="Which layers of a model gain from FP8, and the expected speed-up of a step, from measured times.",
        epilog="--model pkg.Class and --model.ARGUMENT value name the model, as in `lightning-fp8 fit`.",
    )
    parser.add_argument("--config", type=Path, help="a run's YAML file: its model is looked at")
    parser.add_argument("--recipe", default="delayed", help=f"one of {', '.join(RECIPE_NAMES)}")
    parser.add_argument(
        "--gpu", help="whose times are taken; by default this machine's, else the first shipped table's"
    )
    parser.add_argument("--table", type=Path, help="a file of measured times (benchmarks/layer_table.py), not shipped")
    parser.add_argument("--tokens", type=int, default=DEFAULT_TOKENS, help="in one batch on one device")
    parser.add_argument("--input-shape", help="of the forward's argument, such as 2,8192: tells rows and attention")
    parser.add_argument("--step-ms", type=float, help="a measured bf16 step: makes the expected speed-up exact")
    parser.add_argument(
        "--eager", action="store_true", help="the model will not be compiled: the host issues it slower"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed, rest = parser.parse_known_args(args)
    if parsed.tokens < 1:
        parser.error("--tokens must be at least 1.")
    if parsed.step_ms is not None and not 0 < parsed.step_ms < math.inf:
        parser.error(f"--step-ms must be a positive number of milliseconds, got {parsed.step_ms:g}.")
    try:
        recipe = get_recipe(parsed.recipe)
        gpu, source = _times(parsed.gpu, parsed.table, recipe)
        model = _model(parsed.config, rest)
        inputs = _inputs(model, parsed.input_shape)
    except (ValueError, TypeError, ImportError, OSError) as error:
        parser.error(str(error))
    try:
        advice = look_at(
            model, recipe, source, gpu, peak_of(gpu), parsed.tokens, inputs, parsed.step_ms, not parsed.eager
        )
    except Exception as error:  # Whatever the user's forward raises.
        if inputs is None:
            raise
        given = f"an input of shape {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else "its example_input_array"
        parser.error(f"The model's forward does not take {given}: {error}")
    print(json.dumps(advice.to_dict(), indent=1) if parsed.json else advice.text())
    return 0


def _times(gpu: str | None, path: Path | None, recipe: Recipe) -> tuple[str, Source]:
    """The GPU and its times.

    Raises:
        ValueError: there are none.
        OSError: the file cannot be read.
    """
    tables = shipped_tables()
    if path is not None:
        try:
            table = LayerTable.from_json(path.read_text())
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no table of measured times.") from error
        return table.gpu, _source(table, recipe, str(path))
    if gpu is None and torch.cuda.is_available() and _native(recipe):
        return torch.cuda.get_device_name(), times_on(torch.device("cuda"), recipe, NativeBackend())
    if not tables:
        raise ValueError("No measured times are shipped: give --table FILE, which benchmarks/layer_table.py writes.")
    wanted = next(iter(tables)) if gpu is None else gpu
    found = [name for name in tables if wanted.lower() in name.lower()]
    if len(found) != 1:
        raise ValueError(f"--gpu {wanted!r} must name one of the shipped tables: {', '.join(tables)}.")
    return found[0], _source(tables[found[0]], recipe, f"the table shipped for {found[0]}")


def _native(recipe: Recipe) -> bool:
    return NativeBackend().support(recipe, torch.device("cuda")).kind == "native"


def _source(table: LayerTable, recipe: Recipe, origin: str) -> Source:
    variant = variant_in(table, recipe)
    if variant is None:
        known = ", ".join(name for name in table.times if name != "bf16")
        raise ValueError(f"The table of {table.gpu} holds no times of the {recipe.label} recipe, only of {known}.")
    return Source(table, variant, f"{origin} ({table.date}, torch {table.torch})")


def _model(config: Path | None, words: list[str]) -> nn.Module:
    """The model that the command line or the file names, on the meta device where it can be made there.

    Raises:
        ValueError: none is named, or its class cannot be made so.
        OSError: the file cannot be read.
    """
    import yaml

    parser = OneLineParser(prog="lightning-fp8 advise")
    parser.add_subclass_arguments(nn.Module, "model", required=True)
    if config is not None:
        content = yaml.safe_load(config.read_text())
        if not isinstance(content, dict) or "model" not in content:
            raise ValueError(f"{config} names no model.")
        words = ["--model", json.dumps(content["model"]), *words]
    if not words:
        raise ValueError("Name the model: --model pkg.Class, or --config run.yaml.")
    settings: Any = parser.parse_args(words)
    try:
        with torch.device("meta"):
            return parser.instantiate_classes(settings).model
    except (RuntimeError, NotImplementedError):  # It computes with its weights as it is made.
        return parser.instantiate_classes(settings).model
    except (ValueError, TypeError) as error:
        raise ValueError(one_line(str(error))) from error


def _inputs(model: nn.Module, shape: str | None) -> Inputs | None:
    """Inputs for the forward: of that shape, else the model's example; ``None`` where it has none.

    Raises:
        ValueError: the shape is none, or the forward takes more than one argument.
    """
    device = next((p.device for p in model.parameters()), torch.device("meta"))
    if shape is None:
        example: Inputs | None = getattr(model, "example_input_array", None)
        return tree_map_only(Tensor, lambda x: x.to(device), example)
    inputs = _input_of_shape(model, shape, device)
    try:
        inspect.signature(model.forward).bind(inputs)
    except TypeError as error:
        raise ValueError(
            f"--input-shape is for a forward with one argument ({error}): set example_input_array for a forward with "
            "several arguments, to a tuple or a dict of them, and leave --input-shape out."
        ) from None
    return inputs


def _input_of_shape(model: nn.Module, shape: str, device: torch.device) -> Tensor:
    """Token numbers where the model begins with an embedding, numbers elsewhere.

    Raises:
        ValueError: the shape is none.
    """
    try:
        sizes = [int(part) for part in shape.split(",")]
    except ValueError:
        raise ValueError(f"--input-shape {shape!r} is no list of sizes such as 2,8192.") from None
    if min(sizes) < 1:
        raise ValueError("The sizes in --input-shape must be at least 1.")
    first = next((m for m in model.modules() if next(m.parameters(recurse=False), None) is not None), None)
    dtype = torch.int64 if isinstance(first, nn.Embedding) else torch.get_default_dtype()
    return torch.zeros(sizes, dtype=dtype, device=device)


def _say(line: str) -> None:
    print(line, flush=True)
