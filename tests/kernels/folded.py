"""Run as ``TRITON_INTERPRET=1 python -m tests.kernels.folded`` by ``test_folding.py``: casts that compute their values.

What is computed is stored and compared by itself, for the interpreter's conversions to FP8 are coarse.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_fp8.formats import E4M3, E5M2
from lightning_fp8.kernels import folded_source, reference, triton_cast
from lightning_fp8.kernels.folding import StoredCast, leading_to
from lightning_fp8.kernels.triton_scalar import LATER
from lightning_fp8.recipes import Cast
from tests.kernels.agreement import UNSET
from tests.kernels.folded_cases import CASES, inputs_of

TILE = triton_cast.CAST_TILE
STRAIGHT, TRANSPOSED = Cast(E4M3, "tensorwise"), Cast(E5M2, "tensorwise", margin=1.0)


@triton.jit
def store_tile(LOAD: tl.constexpr, inputs, out, columns, R: tl.constexpr, C: tl.constexpr):
    """Writes what ``LOAD`` gives into ``out``."""
    row, column = tl.program_id(0) * R, tl.program_id(1) * C
    a, b, c, d = LOAD(inputs, row, column, 0, columns, R, C, True)
    pointers = out + (row + 4 * tl.arange(0, R // 4))[:, None] * columns + (column + tl.arange(0, C))[None, :]
    tl.store(pointers, a)
    tl.store(pointers + columns, b)
    tl.store(pointers + 2 * columns, c)
    tl.store(pointers + 3 * columns, d)


def look(name: str, inputs: list[Tensor]) -> tuple[StoredCast, fx.GraphModule]:
    """What a cast of the case's result finds to compute, as if the graph's output were that cast."""
    graph = make_fx(CASES[name][0], decomposition_table=select_decomp_table())(*inputs)
    graph.graph.eliminate_dead_code()
    output = graph.graph.output_node()
    cast = StoredCast(output, output.args[0], TILE.columns)
    cast.look(leading_to(graph.graph, [cast]))
    return cast, graph


def check(name: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(name, dtype)
    cast, graph = look(name, inputs)
    assert cast.is_worth_folding([cast]), name
    source = folded_source.write(cast.pieces, dtype)
    module = folded_source.load(source.text)
    recorder = _Recorder(graph)
    x = recorder.run(*inputs)
    memory = tuple(recorder.values[node] for node in source.inputs)

    rows, columns = x.shape
    got = torch.empty_like(x)
    store_tile[(rows // TILE.rows, columns // TILE.columns)](
        module.computed_tile, memory, got, columns, TILE.rows, TILE.columns
    )
    # In bf16 torch rounds after each operation, the kernel once.
    want = CASES[name][0](*(value.float() for value in inputs))
    torch.testing.assert_close(got.float(), want, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-2)

    launch = functools.partial(_launch, getattr(module, source.name), memory)
    slots = [torch.tensor(UNSET) for _ in range(2)]
    out = triton_cast.cast_stored(got, rows, STRAIGHT, TRANSPOSED, slots[0], launch=launch)
    expected = reference.cast(got, STRAIGHT, TRANSPOSED, slots[1], True)
    assert torch.equal(*slots), (name, slots)
    for g, w in zip(out, expected, strict=True):
        torch.testing.assert_close(g.float(), w.float(), rtol=0.51, atol=2.0**-9)


def check_later(name: str) -> None:
    """A computed cast made in two gives the bits of the one that makes both operands."""
    inputs = inputs_of(name, torch.bfloat16)
    cast, graph = look(name, inputs)
    recorder = _Recorder(graph)
    x = recorder.run(*inputs)
    rows, columns = x.shape
    both, later = (folded_source.write(cast.pieces, x.dtype, kernel) for kernel in ("cast_stored", "cast_later"))
    memory = tuple(recorder.values[node] for node in both.inputs)
    assert both.inputs == later.inputs
    kernel, kernel_later = (getattr(folded_source.load(source.text), source.name) for source in (both, later))

    def first(_, programs, tensors, sizes, constants, warps, registers=None) -> None:  # type: ignore[no-untyped-def]
        codes, _, decode, kept, slot = tensors[1:]
        constants = (*constants[:2], LATER, *constants[3:])
        _launch(kernel, memory, _, programs, (x, codes, None, decode, kept, slot), sizes, constants, warps)

    slots = [torch.tensor(UNSET) for _ in range(2)]
    want = triton_cast.cast_stored(
        x, rows, STRAIGHT, TRANSPOSED, slots[0], launch=functools.partial(_launch, kernel, memory)
    )
    codes, decode, codes_t, kept = triton_cast.cast_stored(x, rows, STRAIGHT, TRANSPOSED, slots[1], launch=first)
    decode_t = torch.empty_like(kept)
    programs = rows // TILE.rows * columns // TILE.columns
    kernel_later[(programs,)](
        *memory, codes_t, decode_t, kept, rows, columns, rows, TILE.group, TILE.rows, TILE.columns, True
    )
    assert torch.equal(*slots)
    for g, w in zip((codes, decode, codes_t, decode_t), want, strict=True):
        assert torch.equal(g.view(torch.uint8), w.view(torch.uint8)), name


def _launch(kernel, memory, _, programs, tensors, sizes, constants, warps, registers=None) -> None:  # type: ignore[no-untyped-def]
    rows, columns, _stride, padded, group = sizes
    kernel[(programs,)](*memory, *tensors[1:], rows, columns, padded, group, *constants)


class _Recorder(fx.Interpreter):
    """Keeps every node's value."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.values: dict[fx.Node, object] = {}

    def run_node(self, node: fx.Node) -> object:
        self.values[node] = super().run_node(node)
        return self.values[node]


if __name__ == "__main__":
    for name in CASES:
        check(name, torch.bfloat16)
    for name in ("swiglu gradient", "rms norm"):
        check(name, torch.float32)
        check_later(name)
    print("checked", len(CASES))
