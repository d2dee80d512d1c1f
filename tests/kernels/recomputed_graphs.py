"""Graphs whose backward casts operands itself: run as ``python -m tests.kernels.recomputed_graphs PART``.

Traced on the CPU as for a GPU that is not there. ``graphs`` tells what is kept and launched; ``training`` runs the
graphs, with the reference in the place of the kernels.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.utils.checkpoint import checkpoint

import lightning_fp8
from lightning_fp8 import LayerSelection, convert_model
from lightning_fp8.casts import Cast
from lightning_fp8.formats import E4M3, E5M2, quantize
from lightning_fp8.kernels import reference
from lightning_fp8.kernels.launch_nodes import arguments_of, kernel_of
from lightning_fp8.kernels.recomputing import RecomputeTransposed
from lightning_fp8.kernels.triton_foreseen import cast_again, foresee
from lightning_fp8.kernels.triton_stored import LATER, cast_later, cast_stored
from lightning_fp8.model import conversions
from lightning_fp8.statistics import SCALE_TRANSPOSED
from tests.kernels.folded_graphs import (
    ROWS,
    WIDTH,
    Inputs,
    SeparateProjections,
    block,
    fold,
    gelu,
    gpu,
    nothing_before,
    ragged_columns,
    trace,
    used_elsewhere,
)

PASSES: dict[str, Callable[[fx.Graph], None]] = {
    "none": lambda graph: None,
    "cheap": RecomputeTransposed(cheap=True),
    "all": RecomputeTransposed(cheap=False),
}


def product(x: Tensor) -> tuple[Tensor]:
    """Only the factors are kept: reading them is more than reading the product."""
    return (x.sigmoid() * x.tanh().roll(1),)


def permuted(x: Tensor) -> tuple[Tensor]:
    """Nothing that it is made from is kept for another reason."""
    return (x.roll(1),)


class Checkpointed(Inputs):
    """What backward computes again is the user's choice here."""

    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


def kept(forward: fx.GraphModule) -> Counter[str]:
    """The matrices that forward returns and hands to backward."""
    nodes = [n for n in forward.graph.output_node().args[0] if isinstance(n, fx.Node) and n.meta["val"].dim() > 1]  # type: ignore[union-attr]
    given = {n: "given" if n.op == "placeholder" else str(n.meta["val"].dtype)[6:] for n in nodes}
    return Counter(f"{given[n]} {n.meta['val'].numel()}" for n in nodes if n.meta["val"].numel() >= WIDTH * WIDTH // 4)


def graphs() -> dict[str, Any]:
    """By case and setting: what is kept no longer, what is instead, and the casts of backward that come to it."""
    cases = {
        "block": (block(),),
        "foreseen": (block(), ROWS, "tensorwise_pow2"),
        "separate projections": (SeparateProjections(),),
        "functions": (Inputs(gelu, nothing_before, used_elsewhere, product, permuted),),
        "checkpointed": (Checkpointed(gelu),),
        "ragged": (Inputs(gelu, ragged_columns), 200),
    }
    found = {}
    for name, case in cases.items():
        (plain, _), *others = trace(*case, changes=list(PASSES.values()))
        before, launched = kept(plain), fold(plain.graph)
        for setting, (forward, backward) in zip(list(PASSES)[1:], others, strict=True):
            assert fold(forward.graph) == launched, "forward launches the same kernels"
            casts = Counter(cast for cast in fold(backward.graph) if cast.startswith("cast_later"))
            found[f"{name} {setting}"] = before - kept(forward), kept(forward) - before, casts
    return found


class Reference(fx.Interpreter):
    """Runs a graph, with the reference in the place of Triton kernels."""

    def run_node(self, node: fx.Node) -> Any:
        kernel = kernel_of(node)
        if kernel is None:
            return super().run_node(node)
        given = {n: self.env[a] if isinstance(a, fx.Node) else a for n, a in arguments_of(node).items()}
        kernels = {cast_stored: _both, cast_again: _both, cast_later: _later, foresee: _foresee}
        return kernels[kernel.fn](given)


def _both(given: dict[str, Any]) -> dict[str, Tensor]:
    """As ``cast_stored`` does, or ``cast_again`` where every scale was foreseen wrongly."""
    later = given["TRANSPOSED"] is not True and given["TRANSPOSED"] == LATER
    pair = [_cast(given, "codes", "RULE") if given["STRAIGHT"] else None, None]
    if given["TRANSPOSED"]:
        pair[1] = _cast(given, "codes" if later else "codes_t", "RULE_T")
    slot, stored = given["slot"].clone(), "foreseen" not in given
    out = reference.cast(given["x"], *pair, slot, stored)
    found = dict(zip(("codes", "decode", "codes_t", "decode_t"), out, strict=True))
    if later:
        kept = slot[SCALE_TRANSPOSED] if stored else 1 / found["decode_t"]
        found["decode_t"] = torch.where(kept == 0, 1.0, kept).view(1, 1)
        del found["codes_t"]
    return {**found, "slot": slot}


def _foresee(given: dict[str, Any]) -> dict[str, Tensor]:
    return {"foreseen": torch.tensor([0.0, 64.0, 64.0, 0.0])}


def _later(given: dict[str, Any]) -> dict[str, Tensor]:
    x = F.pad(given["x"], (0, 0, 0, given["padded"] - given["rows"]))
    codes = quantize(x.t().contiguous().float(), given["kept"], _cast(given, "codes_t").format)
    return {"codes_t": codes, "decode_t": 1 / given["kept"]}


def _cast(given: dict[str, Any], codes: str, rule: str | None = None) -> Cast:
    form = next(f for f in (E4M3, E5M2) if f.dtype == given[codes].dtype)
    assert rule is None or given[rule][:2] == (form.max, 1.0)
    return Cast(form, "tensorwise", power_of_two=rule is not None and given[rule][3])


def train(change: Callable[[fx.Graph], None], recipe: str) -> list[Tensor]:
    """Losses, gradients and statistics of a few steps of two microbatches; the first step's scales are unset."""
    torch.manual_seed(0)
    model = nn.ModuleList([block(), nn.Linear(16, 16)]).to(torch.bfloat16)
    convert_model(model, recipe, layers=LayerSelection())

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        change(joint.graph)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def compiler(graph: fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(lambda *inputs: Reference(graph).run(*inputs))

    backend = aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table(), partition_fn=partition)
    torch._dynamo.reset()
    compiled = torch.compile(model[0], backend=backend, fullgraph=True, dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Tensor] = []
    for _ in range(3):
        losses = []
        for _ in range(2):
            # Both forwards before the first backward: what is kept must not be what the second one changes.
            x = torch.randn(2, 36, WIDTH, dtype=torch.bfloat16, requires_grad=True)  # The cast pads 72 rows.
            losses.append(compiled(x).float().square().mean())
        for loss in losses:
            loss.backward()
            found.append(loss.detach())
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        lightning_fp8.step(model)
        found.append(conversions(model)[0].runtime.table.data.clone())
    return found


def training() -> int:
    """How many tensors are the same whatever is recomputed."""
    count = 0
    for recipe in ("delayed", "tensorwise_pow2"):
        want = train(PASSES["none"], recipe)
        for setting in ("cheap", "all"):
            got = train(PASSES[setting], recipe)
            for index, (g, w) in enumerate(zip(got, want, strict=True)):
                assert torch.equal(g, w), f"{recipe} {setting}: tensor {index} of {len(want)}, {g} for {w}"
        count += len(want)
    return count


if __name__ == "__main__":
    with gpu():
        json.dump({"graphs": graphs, "training": training}[sys.argv[1]](), sys.stdout)
