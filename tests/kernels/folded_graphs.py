"""Graphs of FP8 layers, folded: run as ``python -m tests.kernels.folded_graphs`` by ``test_folding.py``.

Traced on the CPU as for a GPU that is not there, forward and backward, up to where Inductor would take over.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import triton
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code
from torch._inductor.decomposition import select_decomp_table
from triton.backends.compiler import GPUTarget

from lightning_fp8 import LayerSelection, convert_model, kernels, ops
from lightning_fp8.casts import Cast
from lightning_fp8.formats import E4M3
from lightning_fp8.kernels.folding import BLOCK, FoldIntoCasts
from lightning_fp8.kernels.launch_nodes import arguments_of
from lightning_fp8.kernels.triton_foreseen import foresee
from lightning_fp8.kernels.triton_stored import LATER, cast_later
from lightning_fp8.tuning.decoder import Block, DecoderShape
from tests.kernels.traced import written_by

ROWS, WIDTH = 128, 256


class _Traced(Exception):
    """There is nothing to run the graphs on."""


def linear(inputs: int = WIDTH, outputs: int = WIDTH) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class SeparateProjections(nn.Module):
    """As in many models: one norm for three layers, and a gate of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.q, self.k, self.v = linear(), linear(), linear()
        self.gate, self.up, self.down = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = self.q(h) * self.k(h).sigmoid() + self.v(h)
        return self.down(F.silu(self.gate(h)) * self.up(h))


class Inputs(nn.Module):
    """Layers whose inputs ``functions`` make; what else these return leaves the graph."""

    def __init__(self, *functions: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear(function(torch.empty(1, 1, WIDTH))[0].shape[-1]) for function in functions)
        self.functions = functions

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for layer, function in zip(self.layers, self.functions, strict=True):
            h, *others = function(x)
            found += [layer(h), *others]
        return found


def gelu(x: Tensor) -> tuple[Tensor]:
    return (F.gelu(x),)


def used_elsewhere(x: Tensor) -> tuple[Tensor, Tensor]:
    return (h := F.relu(x)), h


def nothing_before(x: Tensor) -> tuple[Tensor]:
    return (x,)


def a_view_before(x: Tensor) -> tuple[Tensor]:
    return (x.transpose(0, 1).reshape(x.shape),)


def ragged_columns(x: Tensor) -> tuple[Tensor]:
    return gelu(x[..., :160])


def few_columns(x: Tensor) -> tuple[Tensor]:
    return gelu(x[..., :192])


def ragged_pieces(x: Tensor) -> tuple[Tensor]:
    return (torch.cat([x[..., :64].tanh(), x[..., 64:]], -1),)


def trace(
    module: nn.Module,
    rows: int = ROWS,
    recipe: str = "delayed",
    dynamic: bool = False,
    changes: Sequence[Callable[[fx.Graph], None]] = (lambda graph: None,),
) -> list[tuple[fx.GraphModule, fx.GraphModule]]:
    """The forward and the backward graph, from a joint one that each of ``changes`` has been over."""
    model = nn.Sequential(module, nn.Linear(16, 16)).to(torch.bfloat16)  # The last layer is the head.
    convert_model(model, recipe, layers=LayerSelection())
    graphs: list[tuple[fx.GraphModule, fx.GraphModule]] = []

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        for change in changes:
            changed = fx.GraphModule(joint, _copy(joint.graph))
            change(changed.graph)
            changed.graph.lint()
            graphs.append(min_cut_rematerialization_partition(changed, *args, **kwargs))
        return graphs[-1]

    def refuse(*args: Any) -> None:
        raise _Traced

    backend = aot_autograd(fw_compiler=lambda *_: refuse, decompositions=select_decomp_table(), partition_fn=partition)
    x = torch.randn(2, rows // 2, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    torch._dynamo.reset()
    with contextlib.suppress(_Traced):
        torch.compile(model[0], backend=backend, fullgraph=True, dynamic=dynamic)(x)
    return graphs


def _copy(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copied[node] = copy.node_copy(node, copied.__getitem__)
    return copy


def traced(cast: Cast, rows: Sequence[int]) -> int:
    """How often a graph that casts matrices of so many rows is traced, where sizes may change."""
    count = 0

    def compiler(graph: fx.GraphModule, _: Any) -> Any:
        nonlocal count
        count += 1
        nodes: Any = graph.graph.output_node().args[0]
        # The slot alone is looked at: it is changed in place.
        slots = [node.meta["val"].dim() == 1 for node in nodes]
        return make_boxed_func(lambda *_: [torch.zeros(4) if slot else torch.empty(0) for slot in slots])

    torch._dynamo.reset()
    function = torch.compile(ops.cast, backend=aot_autograd(fw_compiler=compiler), fullgraph=True, dynamic=True)
    for number in rows:
        # Nothing touches this memory.
        function(torch.empty(number, WIDTH, dtype=torch.bfloat16), cast, cast, torch.zeros(4))
    return count


def fold(graph: fx.Graph) -> list[str]:
    """The kernels of a graph's casts, and how many matrices each reads."""
    before = _matrices(graph)
    FoldIntoCasts()(graph)
    graph.lint()
    found = []
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.triton_kernel_wrapper_functional):
        kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"]).fn
        if kernel is foresee:
            continue  # It reads a slot alone.
        arguments = node.kwargs["kwargs"]
        reads = [value for name, value in arguments.items() if name[0] == "x"]
        # Which operations there are depends on torch's decompositions.
        name, folded, operations = kernel.__name__.partition("_of_")
        name = f"{name} of {'columns' if operations.startswith('cat') else 'values'}" if folded else name
        found.append(f"{name} {len(reads)}{', two tiles a program' if folded and _tiles_a_program(node) == 2 else ''}")
        if folded or kernel is cast_later or arguments.get("TRANSPOSED") == LATER:
            _check(node, kernel)
    return [*found, f"{before - _matrices(graph)} matrices less"]


def _tiles_a_program(node: fx.Node) -> float:
    """How many tiles a program casts; 0 for programs that go through any number of tiles."""
    arguments = arguments_of(node)
    if {"partials", "foreseen"} & set(arguments):
        return 0
    ((programs, *_),) = node.kwargs["grid"]
    tile = arguments.get("R", BLOCK) * arguments.get("C", BLOCK)
    return arguments["padded"] * arguments["columns"] / tile / programs


def _check(node: fx.Node, kernel: Any) -> None:
    """What Inductor needs of a node that was changed."""
    arguments = {**node.kwargs["kwargs"], **kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])}
    values = {name: a.meta["val"] if isinstance(a, fx.Node) else a for name, a in arguments.items()}
    assert set(values) == set(kernel.arg_names)
    assert sorted(written_by(kernel, values)) == sorted(node.kwargs["tensors_to_clone"]), kernel.__name__
    source = user_defined_triton_kernel_transitive_closure_source_code(kernel)
    compile(source, kernel.__name__, "exec")
    # The strides that Inductor is held to are those that the source has been written for.
    _, kept = node.meta["eager_input_vals"]
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    for name, value in tensors.items():
        assert kept["kwargs"][name].stride() == value.stride()
    # Arguments that are one tensor it would take for one memory.
    nodes = {arguments[name] for name in tensors}
    assert len({id(value) for value in tensors.values()}) == len(nodes)


def _matrices(graph: fx.Graph) -> int:
    """Elementwise results as large as a matrix."""
    values = [node.meta.get("val") for node in graph.nodes if node.op == "call_function"]
    return sum(isinstance(value, Tensor) and value.dtype == torch.bfloat16 and value.dim() > 1 for value in values)


@contextlib.contextmanager
def gpu() -> Iterator[None]:
    """As if the CPU were a GPU with FP8 units, as far as the kernels' intermediate code."""
    target = mock.Mock()
    target.get_current_target.return_value = GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(target)
    with mock.patch.object(kernels, "has_fast_casts", lambda device: True):
        yield


def block() -> Block:
    return Block(DecoderShape(WIDTH, 512, 1, 2, ROWS // 2, 4, 2, 1024))


def main() -> None:
    """Prints what was folded, and how often graphs were traced, as JSON."""
    cases: dict[str, tuple[Any, ...]] = {
        "block": (block(),),
        "separate projections": (SeparateProjections(),),
        "nothing to fold": (Inputs(used_elsewhere, nothing_before, a_view_before, ragged_columns, ragged_pieces),),
        "ragged rows": (Inputs(gelu), 200),
        "few columns": (Inputs(few_columns),),
        "dynamic": (Inputs(gelu), ROWS, "delayed", True),
        "block, tensorwise": (block(), ROWS, "tensorwise"),
        "block, foreseen": (block(), ROWS, "tensorwise_pow2"),
        "block, rowwise": (block(), ROWS, "rowwise"),
        "block, blockwise": (block(), ROWS, "blockwise"),
    }
    with gpu():
        found = {name: [fold(graph.graph) for graph in trace(*case)[0]] for name, case in cases.items()}
        # From one tile to as many as programs at most, and as those that take several each.
        rows = 64, 192, 1024, 64 * 1024, 64 * 8192
        casts = [Cast(E4M3, "tensorwise"), Cast(E4M3, "tensorwise", power_of_two=True), Cast(E4M3, "rowwise")]
        counts = {str(cast): traced(cast, rows) for cast in casts}
    json.dump({"folded": found, "traced": counts}, sys.stdout)


if __name__ == "__main__":
    main()
