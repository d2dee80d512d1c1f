"""Run as ``TRITON_INTERPRET=1 python -m tests.kernels.folded`` by ``test_folding.py``: casts that compute their values.

What is computed is stored and compared by itself, for the interpreter's conversions to FP8 are coarse.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_fp8.casts import Cast
from lightning_fp8.formats import E4M3, E5M2
from lightning_fp8.kernels import folded_source, reference, triton_cast, triton_common, triton_stored
from lightning_fp8.kernels.folding import KernelOfCast, launch_of, leading_to, on_values
from lightning_fp8.kernels.launch import at_once
from lightning_fp8.kernels.triton_stored import LATER
from tests.kernels.agreement import UNSET
from tests.kernels.folded_cases import CASES, inputs_of

#: Cases whose casts are also made in two, or again: matrices side by side, and broadcasts.
MADE_TWICE = ("swiglu gradient", "rms norm")

#: Where one division serves twice, and how it is written: that of a sigmoid is a short one.
ONE_DIVISION = {"quotient and reciprocal": " / ", "swiglu gradient": "reciprocal_from_one_on("}


@triton.jit
def store_tile(
    LOAD: tl.constexpr, VALUES: tl.constexpr, inputs, out, rows, columns,
    PIECES: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Writes the values of a tile into ``out``."""
    row, column = tl.program_id(0) * R, tl.program_id(1) * C
    loaded = LOAD(inputs, row, column, rows, columns, R, C, True)
    for J in tl.static_range(4):
        values = VALUES(loaded, row, column, J, R // 4, C)
        for piece in tl.static_range(PIECES):
            c = column + piece * (columns // PIECES) + tl.arange(0, C)
            pointers = out + (row + 4 * tl.arange(0, R // 4) + J)[:, None] * columns + c[None, :]
            tl.store(pointers, values[piece])


def look(name: str, inputs: list[Tensor], blocks: bool = False) -> tuple[KernelOfCast, fx.GraphModule]:
    """What a cast of the case's result finds to compute, as if the graph's output were it: one to blocks, or others."""
    graph = make_fx(CASES[name][0], decomposition_table=select_decomp_table())(*inputs)
    graph.graph.eliminate_dead_code()
    output = graph.graph.output_node()
    x = output.args[0]
    tile = {} if blocks else {"C": triton_cast.tile_of(x.meta["val"].shape[1]).columns}
    cast = KernelOfCast(output, {"x": x, **tile})
    cast.look(leading_to(graph.graph, [cast]))
    return cast, graph


class Folded:
    """The case's casts, which compute their values from ``memory``.

    Attributes:
        x: the matrix, as torch computes it.
        values: the same as the kernels do.
    """

    def __init__(self, name: str, inputs: list[Tensor]) -> None:
        self.cast, graph = look(name, inputs)
        assert self.cast.is_worth_folding([self.cast]), name
        recorder = _Recorder(graph)
        self.x = recorder.run(*inputs)
        self.source = self.write(triton_stored.cast_stored)
        self.memory = tuple(recorder.values[node] for node in self.source.inputs)
        module = folded_source.load(self.source.text)
        functions = triton_common.quarter_of, triton_common.as_they_are
        load, values = getattr(module, "computed_tile", functions[1]), getattr(module, "computed", functions[0])
        rows, columns = self.x.shape
        tile = triton_cast.tile_of(columns)
        grid = rows // tile.rows, columns // tile.columns // self.source.pieces
        self.values = torch.empty_like(self.x)
        store_tile[grid](
            load, values, self.memory, self.values, rows, columns, self.source.pieces, tile.rows, tile.columns
        )

    def write(self, kernel: Any) -> folded_source.Source:
        return folded_source.write(self.cast.pieces, self.x.dtype, kernel)

    def launch(self, kernel, programs, tensors, sizes, constants, warps, **changed) -> None:  # type: ignore[no-untyped-def]
        """In the place of a kernel that reads the matrix."""
        if "x" not in kernel.arg_names:
            at_once(kernel, programs, tensors, sizes, constants, warps)
            return
        source = self.write(kernel)
        arguments = dict(zip(kernel.arg_names, (*tensors, *sizes, *constants), strict=True)) | changed
        arguments = on_values(kernel, arguments, self.x.shape)
        arguments, programs, _ = launch_of(kernel, programs, arguments, source)
        assert arguments["EVEN"]
        getattr(folded_source.load(source.text), source.name)[(programs,)](*self.memory, **arguments)


def check(name: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(name, dtype)
    folded = Folded(name, inputs)
    if name in ONE_DIVISION:
        assert folded.source.text.count(ONE_DIVISION[name]) == 1, "one division does for both"
    # In bf16 torch rounds after each operation, the kernel once.
    want = CASES[name][0](*(value.float() for value in inputs))
    rtol = 2e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(folded.values.float(), want, rtol=rtol, atol=1e-2)
    # Blocks are only computed where matrices lie side by side.
    blocks = ["1x128"] if len(folded.cast.pieces) > 1 else []
    for granularity in ("tensorwise", "rowwise", *blocks):
        cases = [(False, False, UNSET)]
        if granularity == "tensorwise":
            cases.append((True, False, UNSET))
        if granularity == "tensorwise" and name in MADE_TWICE:
            # Powers of two are foreseen, rightly or not.
            right = (-1.0, 0.0, 0.0, folded.values.abs().amax().item())
            cases += [(False, True, UNSET), (False, True, right)]
        for stored, power_of_two, slot in cases:
            pair = Cast(E4M3, granularity, power_of_two), Cast(E5M2, granularity, power_of_two, margin=1.0)
            slots = [torch.tensor(slot) for _ in range(2)]
            out = triton_cast.cast(folded.x, *pair, slots[0], stored, folded.launch)
            expected = reference.cast(folded.values, *pair, slots[1], stored)
            assert torch.equal(*slots), (name, slots)
            for g, w in zip(out, expected, strict=True):
                torch.testing.assert_close(g.float(), w.float(), rtol=0.51, atol=2.0**-9)


def check_later(name: str) -> None:
    """A computed cast made in two gives the bits of the one that makes both operands."""
    folded = Folded(name, inputs_of(name, torch.bfloat16))
    rows = folded.x.shape[0]
    pair = Cast(E4M3, "tensorwise"), Cast(E5M2, "tensorwise", margin=1.0)
    made_in_two = functools.partial(folded.launch, codes_t=None, TRANSPOSED=LATER)
    slots = [torch.tensor(UNSET) for _ in range(2)]
    want = triton_cast.cast_stored(folded.x, rows, *pair, slots[0], launch=folded.launch)
    codes, decode, codes_t, kept = triton_cast.cast_stored(folded.x, rows, *pair, slots[1], launch=made_in_two)
    decode_t = torch.empty_like(kept)
    columns = folded.x.shape[1]
    tile = triton_cast.tile_of(columns)
    folded.launch(
        triton_stored.cast_later, rows // tile.rows * columns // tile.columns, (folded.x, codes_t, decode_t, kept),
        (rows, columns, columns, rows, tile.group), (tile.rows, tile.columns, True), tile.warps,
    )  # fmt: skip
    assert torch.equal(*slots)
    for g, w in zip((codes, decode, codes_t, decode_t), want, strict=True):
        assert torch.equal(g.view(torch.uint8), w.view(torch.uint8)), name


def check_blocks() -> None:
    """A tile that is held takes registers: it is computed where matrices of 16 bits lie side by side."""
    worth = {
        (name, dtype): cast.is_worth_folding([cast])
        for name in ("swiglu", "swiglu gradient", "matrices side by side")
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for cast in [look(name, inputs_of(name, dtype), blocks=True)[0]]
    }
    assert [case for case, yes in worth.items() if yes] == [
        (name, dtype)
        for name in ("swiglu gradient", "matrices side by side")
        for dtype in (torch.bfloat16, torch.float16)
    ], worth


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
    for name in MADE_TWICE:
        check(name, torch.float32)
        check_later(name)
    check_blocks()
    print("checked", len(CASES))
