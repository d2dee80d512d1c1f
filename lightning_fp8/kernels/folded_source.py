"""Triton kernels that compute the values they cast: their source, written for each expression.

A kernel of this kind is one of ``triton_stored``, ``triton_data`` or ``triton_block``, with functions of its own for
the values of a tile. Arithmetic is in fp32, rounded once, to the dtype of the matrix that is not written any more: as
Inductor does within a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import fx

from lightning_fp8.kernels.folded_values import Leaf, Operation, Value, in_order, matrices

_HEAD = '''"""A cast and what computes its values; written by lightning_fp8.kernels.folded_source."""

import triton
import triton.language as tl

from lightning_fp8.kernels.triton_common import as_they_are, quarter_of, reciprocal_from_one_on, row_numbers, tanh
from {module} import {kernel}_tile
'''

#: ``VALUES`` of ``triton_common.cast_tile``.
_VALUES = """

@triton.jit
def {name}(inputs, row, column, J: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    r = row_numbers(row, J, R).to(tl.int64)
    c = column + tl.arange(0, C)
{lines}
    return {results}
"""

#: ``LOAD`` of ``triton_stored.cast_stored_tile``, where it depends on the column what is computed.
_LOAD = """

@triton.jit
def computed_tile(inputs, row, column, rows, columns, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr):
    Q: tl.constexpr = R // 4
{lines}
    return a[0].to({dtype}), b[0].to({dtype}), c[0].to({dtype}), d[0].to({dtype})
"""

_KERNEL = """

@triton.jit
def {name}({parameters}):
    {kernel}_tile(
        {functions}, {dtype}, ({inputs},), {arguments},
        {pieces}, {tile},
    )
"""

#: Arguments of a kernel that only the matrix has which it reads from memory.
OF_THE_MATRIX = ("x", "stride")
#: Constants that kernels have last.
_OF_THE_TILE = ("R", "C", "EVEN")


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
        inputs: whose memory it reads: its first arguments, ``x0`` and so on. The others have the names that they have
            where the matrix is in memory.
        pieces: tiles that a program casts at once.
    """

    name: str
    text: str
    inputs: tuple[fx.Node, ...]
    pieces: int


def write(pieces: Sequence[Piece], dtype: torch.dtype, kernel: Any) -> Source:
    """The source of a kernel as ``kernel``, for ``pieces`` side by side, a matrix of ``dtype``."""
    values = [piece.value for piece in pieces]
    everything = in_order(values)
    inputs = tuple(dict.fromkeys(value.node for value in everything if isinstance(value, Leaf)))
    used = dict.fromkeys(value.name for value in everything if isinstance(value, Operation))
    base = kernel.__name__
    name = "_".join([f"{base}_of", *(["cat"] if len(pieces) > 1 else []), *used])[:96]
    text = _HEAD.format(kernel=base, module=kernel.fn.__module__)
    at_once = len(pieces) == 1 or _share(pieces)
    if at_once:
        text += _values("computed", values, inputs)
    else:
        for index, value in enumerate(values):
            text += _values(f"computed_{index}", [value], inputs)
        text += _LOAD.format(lines=_tile([piece.columns for piece in pieces]), dtype=_triton(dtype))
    names = [f"x{index}" for index in range(len(inputs))]
    others = [argument for argument in kernel.arg_names if argument not in OF_THE_MATRIX]
    count = len(pieces) if at_once else 1
    text += _KERNEL.format(
        kernel=base,
        name=name,
        parameters=", ".join(f"{n}: tl.constexpr" if n.isupper() else n for n in (*names, *others)),
        functions="as_they_are, computed" if at_once else "computed_tile, quarter_of",
        dtype=_triton(dtype),
        inputs=", ".join(names),
        arguments=", ".join(argument for argument in others if argument not in _OF_THE_TILE),
        pieces=count,
        tile=", ".join(argument for argument in others if argument in _OF_THE_TILE),
    )
    return Source(name, text, inputs, count)


def load(text: str) -> ModuleType:
    """The module with this source, which is the same for the same source; what Triton compiles must lie in a file."""
    from torch._inductor.codecache import PyCodeCache

    return PyCodeCache.load(text)


def _share(pieces: Sequence[Piece]) -> bool:
    """Whether there are two, equally wide and made from the same memory. More would take too many registers."""
    read = [set(matrices([piece.value])) for piece in pieces]
    return len(pieces) == 2 and pieces[0].columns == pieces[1].columns and bool(set.intersection(*read))


def _triton(dtype: torch.dtype) -> str:
    return f"tl.{str(dtype).removeprefix('torch.')}"


def _values(name: str, values: Sequence[Value], inputs: tuple[fx.Node, ...]) -> str:
    """The function that computes every fourth row of a tile of each of ``values``."""
    parts = in_order(values)
    reciprocals = {p.operands[0]: p for p in parts if isinstance(p, Operation) and p.name == "reciprocal"}
    names: dict[Leaf | Operation, str] = {}
    lines = []
    for part in in_order([*reciprocals.values(), *values]):
        names[part] = f"v{len(names)}"
        if isinstance(part, Leaf):
            text = _load(part, f"inputs[{inputs.index(part.node)}]")
        else:
            operands = [repr(v) if isinstance(v, float) else names[v] for v in part.operands]
            text = part.text.format(*operands)
            if part.name == "div" and (reciprocal := reciprocals.get(part.operands[1])) is not None:
                # One division does for both. Where a reciprocal is no number, it is none for the others either.
                text = f"{operands[0]} * {names[reciprocal]}"
        lines.append(f"    {names[part]} = {text}")
    # What has no matrix is read from memory: these are no numbers.
    results = "".join(f"{names[value]}, " for value in values if not isinstance(value, float))
    return _VALUES.format(name=name, lines="\n".join(lines), results=f"({results.strip()})")


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
    lines, first, indent = [], 0, " " * 8
    for index, width in enumerate(widths):
        last = index == len(widths) - 1
        lines.append("    else:" if last else f"    {'el' if index else ''}if column < {first + width}:")
        lines += [
            f"{indent}{matrix} = computed_{index}(inputs, row, column{f' - {first}' if first else ''}, {j}, Q, C)"
            for j, matrix in enumerate("abcd")
        ]
        first += width
    return "\n".join(lines)
