"""Triton kernels that compute the values they cast: their source, written for each expression.

A kernel of this kind is ``cast_stored`` or ``cast_later`` of :mod:`lightning_fp8.kernels.triton_scalar` with a function
of its own for loading a tile. Arithmetic is in fp32, rounded once, to the dtype of the matrix that is not written any
more: as Inductor does within a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import fx

from lightning_fp8.kernels.folded_values import Leaf, Operation, Value, in_order, matrices

_HEAD = '''"""A cast and what computes its values; written by lightning_fp8.kernels.folded_source."""

import triton
import triton.language as tl

from lightning_fp8.kernels.triton_common import row_numbers, tanh
from lightning_fp8.kernels.triton_scalar import {kernel}_tile
'''

_ROWS = """

@triton.jit
def computed_rows_{index}(inputs, row, column, J: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    r = row_numbers(row, J, R).to(tl.int64)
    c = column + tl.arange(0, C)
{lines}
    return {result}.to({dtype})
"""

_TILE = """

@triton.jit
def computed_tile(inputs, row, column, rows, columns, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr):
    Q: tl.constexpr = R // 4
{lines}
    return a, b, c, d
"""

_KERNEL = """

@triton.jit(do_not_specialize=["rows", "group"])
def {name}(
    {inputs}, {tensors}, rows, columns, padded, group,
    {parameters}R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):
    {kernel}_tile(
        computed_tile, ({inputs},), {tensors}, rows, columns, padded, group,
        {constants}{pieces}, R, C, EVEN,
    )
"""

#: The tensors beside the inputs and the constants before the tile's, by kernel.
_ARGUMENTS = {
    "cast_stored": (("codes", "codes_t", "decode", "decode_t", "slot"), ("STRAIGHT", "RULE", "TRANSPOSED", "RULE_T")),
    "cast_later": (("codes_t", "decode_t", "kept"), ()),
}


@dataclass(frozen=True)
class Piece:
    """A range of columns of a matrix that is computed.

    Attributes:
        value: what it is.
        columns: how many.
    """

    value: Value
    columns: int


@dataclass(frozen=True)
class Source:
    """A kernel's source.

    Attributes:
        name: the kernel's.
        text: a module.
        inputs: whose memory it reads: its first arguments, ``x0`` and so on.
    """

    name: str
    text: str
    inputs: tuple[fx.Node, ...]


def write(pieces: Sequence[Piece], dtype: torch.dtype, kernel: str = "cast_stored") -> Source:
    """The source of a ``kernel`` that casts ``pieces`` side by side, as a matrix of ``dtype``."""
    values = [piece.value for piece in pieces]
    everything = in_order(values)
    inputs = tuple(dict.fromkeys(value.node for value in everything if isinstance(value, Leaf)))
    used = dict.fromkeys(value.name for value in everything if isinstance(value, Operation))
    name = "_".join([f"{kernel}_of", *(["cat"] if len(pieces) > 1 else []), *used])[:96]
    text = _HEAD.format(kernel=kernel)
    for index, value in enumerate(values):
        text += _rows(index, value, inputs, dtype)
    text += _TILE.format(lines=_tile([piece.columns for piece in pieces]))
    tensors, constants = _ARGUMENTS[kernel]
    text += _KERNEL.format(
        kernel=kernel,
        name=name,
        inputs=", ".join(f"x{index}" for index in range(len(inputs))),
        tensors=", ".join(tensors),
        parameters="".join(f"{constant}: tl.constexpr, " for constant in constants),
        constants="".join(f"{constant}, " for constant in constants),
        pieces=len(pieces) if _share(pieces) else 1,
    )
    return Source(name, text, inputs)


def load(text: str) -> ModuleType:
    """The module with this source, which is the same for the same source; what Triton compiles must lie in a file."""
    from torch._inductor.codecache import PyCodeCache

    return PyCodeCache.load(text)


def _share(pieces: Sequence[Piece]) -> bool:
    """Whether pieces are equally wide and made from the same memory."""
    widths = {piece.columns for piece in pieces}
    read = [set(matrices([piece.value])) for piece in pieces]
    return len(pieces) > 1 and len(widths) == 1 and bool(set.intersection(*read))


def _rows(index: int, value: Value, inputs: tuple[fx.Node, ...], dtype: torch.dtype) -> str:
    """The function that computes every fourth row of a tile of a piece."""
    names: dict[Leaf | Operation, str] = {}
    lines = []
    for part in in_order([value]):
        names[part] = f"v{len(names)}"
        if isinstance(part, Leaf):
            text = _load(part, f"inputs[{inputs.index(part.node)}]")
        else:
            text = part.text.format(*(repr(v) if isinstance(v, float) else names[v] for v in part.operands))
        lines.append(f"    {names[part]} = {text}")
    result = repr(value) if isinstance(value, float) else names[value]
    return _ROWS.format(index=index, lines="\n".join(lines), result=result, dtype=f"tl.{str(dtype)[6:]}")


def _load(leaf: Leaf, pointer: str) -> str:
    """A matrix, a row, a column, or a single value, in fp32."""
    rows = f"(r * {leaf.row_stride})" if leaf.row_stride != 1 else "r"
    columns = f"(c + {leaf.offset})" if leaf.offset else "c"
    if leaf.is_matrix:
        return f"tl.load({pointer} + {rows}[:, None] + {columns}[None, :]).to(tl.float32)"
    if leaf.row_stride:
        return f"tl.load({pointer} + {rows}).to(tl.float32)[:, None]"
    return (
        f"tl.load({pointer} + {columns}).to(tl.float32)[None, :]"
        if leaf.column_stride
        else f"tl.load({pointer}).to(tl.float32)"
    )


def _tile(widths: Sequence[int]) -> str:
    """The four matrices of a tile, from the piece in which it lies."""
    lines, first = [], 0
    for index, width in enumerate(widths):
        indent = "    "
        if len(widths) > 1:
            last = index == len(widths) - 1
            lines.append("    else:" if last else f"    {'el' if index else ''}if column < {first + width}:")
            indent *= 2
        lines += [
            f"{indent}{matrix} = computed_rows_{index}(inputs, row, column{f' - {first}' if first else ''}, {j}, Q, C)"
            for j, matrix in enumerate("abcd")
        ]
        first += width
    return "\n".join(lines)
