"""What a node of a graph is computed from, elementwise: the values that a cast can compute itself instead of reading.

A matrix of a graph has rows (all dimensions but the last, merged) and columns (the last). Views that keep this are seen
through, slices of columns become an offset; what is not elementwise is read from memory. This understands the graphs
that Inductor optimises: functional, with its decompositions.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

aten: Any = torch.ops.aten

#: Elementwise operators: how many operands, and the Triton expression over them in fp32.
OPERATIONS: dict[Any, tuple[int, str]] = {
    aten.abs.default: (1, "tl.abs({0})"),
    aten.add.Scalar: (2, "{0} + {1}"),
    aten.add.Tensor: (2, "{0} + {1}"),
    aten.div.Scalar: (2, "{0} / {1}"),
    aten.div.Tensor: (2, "{0} / {1}"),
    aten.erf.default: (1, "tl.erf({0})"),
    # Log2(e) times, as tl.exp does; but what would be a denormal number becomes zero, without a look at each number.
    aten.exp.default: (1, "tl.exp2({0} * 1.4426950408889634)"),
    aten.ge.Scalar: (2, "{0} >= {1}"),
    aten.gt.Scalar: (2, "{0} > {1}"),
    aten.le.Scalar: (2, "{0} <= {1}"),
    aten.lt.Scalar: (2, "{0} < {1}"),
    aten.mul.Scalar: (2, "{0} * {1}"),
    aten.mul.Tensor: (2, "{0} * {1}"),
    aten.neg.default: (1, "-{0}"),
    aten.reciprocal.default: (1, "1.0 / {0}"),
    aten.relu.default: (1, "tl.where({0} <= 0.0, 0.0, {0})"),  # NaN stays NaN.
    aten.sub.Scalar: (2, "{0} - {1}"),
    aten.sub.Tensor: (2, "{0} - {1}"),
    aten.tanh.default: (1, "tanh({0})"),
    aten.where.self: (3, "tl.where({0}, {1}, {2})"),
}
#: Powers by their exponent: products, as Inductor computes them.
POWERS: dict[float, str] = {1: "{0}", 2: "{0} * {0}", 3: "{0} * {0} * {0}"}
#: Quotients: where the divisor is known to be no less than 1, they are done without what else a divisor would need.
_DIVISIONS = (aten.div.Scalar, aten.div.Tensor)
_RECIPROCAL_FROM_ONE_ON = "reciprocal_from_one_on({0})"
#: Stands for an expression of several operations.
_SIGMOID = "sigmoid"
#: Arguments that change nothing where they have these values.
_NEUTRAL = {"alpha": 1, "rounding_mode": None}
#: Views that may keep rows and columns: the shapes tell.
VIEWS = frozenset(
    {
        aten.alias.default,
        aten.expand.default,
        aten.reshape.default,
        aten.slice.Tensor,
        aten.unsqueeze.default,
        aten.view.default,
        aten._unsafe_view.default,
    }
)
SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default})
CONVERT: Any = torch.ops.prims.convert_element_type.default

#: What memory is read in and conversions lead to. All arithmetic is in fp32, whatever they say.
FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
#: The most operations one above the other between a value and memory.
_DEEPEST = 48


@dataclass(frozen=True, eq=False)
class Leaf:
    """Values read from memory.

    Attributes:
        node: whose memory.
        row_stride, column_stride: elements from one to the next; zero where all are the same.
        offset: the node's column that is the first.
    """

    node: fx.Node
    row_stride: int
    column_stride: int
    offset: int

    @property
    def is_matrix(self) -> bool:
        """Whether neither its rows nor its columns are all the same."""
        return bool(self.row_stride and self.column_stride)


@dataclass(frozen=True, eq=False)
class Operation:
    """An elementwise operation.

    Attributes:
        name: the operator's.
        text: its Triton expression, a format of the operands.
        operands: what it is applied to.
    """

    name: str
    text: str
    operands: tuple[Value, ...]


Value = Leaf | Operation | float


def in_order(values: Iterable[Value]) -> list[Leaf | Operation]:
    """Every leaf and operation of ``values`` once, operands first."""
    found: dict[Leaf | Operation, None] = {}

    def visit(value: Value) -> None:
        if isinstance(value, float) or value in found:
            return
        if isinstance(value, Operation):
            for operand in value.operands:
                visit(operand)
        found[value] = None

    for value in values:
        visit(value)
    return list(found)


def matrices(values: Iterable[Value]) -> dict[tuple[fx.Node, int], Leaf]:
    """The whole matrices that ``values`` read, by node and first column."""
    return {(v.node, v.offset): v for v in in_order(values) if isinstance(v, Leaf) and v.is_matrix}


def bytes_read(parts: Iterable[tuple[Value, int]]) -> int:
    """Bytes that values are computed from, each given with its number of elements.

    Memory that several read counts once, and what is smaller than a whole matrix not at all.
    """
    elements: dict[tuple[fx.Node, int], int] = {}
    for value, count in parts:
        for place in matrices([value]):
            elements[place] = max(count, elements.get(place, 0))
    return sum(count * node.meta["val"].element_size() for (node, _), count in elements.items())


def shape_of(node: Any) -> tuple[int, ...] | None:
    """The shape of a node that is one tensor of known sizes, else ``None``; a single value is ``(1,)``."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    shape = tuple(value.shape) or (1,)
    return shape if all(type(size) is int for size in shape) else None


def is_elementwise(node: fx.Node) -> bool:
    """Whether values may be computed through this node."""
    known = node.target in OPERATIONS or node.target in VIEWS or node.target in SPLITS
    known = known or node.target in (CONVERT, aten.pow.Tensor_Scalar, aten.sigmoid.default)
    return node.op == "call_function" and (known or _is_split_piece(node))


class Reader:
    """Finds what nodes are computed from.

    Args:
        inside: nodes that nobody needs but the casts in question, so that they never have to be in memory.
        device: where memory can be read.
    """

    def __init__(self, inside: AbstractSet[fx.Node], device: torch.device) -> None:
        self._inside = inside
        self._device = device
        self._known: dict[tuple[fx.Node, int], Value | None] = {}
        self._made: dict[tuple[str, tuple[Value, ...]], Operation] = {}

    def value(self, node: fx.Node, offset: int = 0, depth: int = 0) -> Value | None:
        """The values of ``node`` from column ``offset`` on; ``None`` if they can be neither computed nor read."""
        shape = shape_of(node)
        if shape is None:
            return None
        key = node, offset if shape[-1] > 1 else 0
        if key not in self._known:
            computed = self._computed(*key, shape, depth) if depth < _DEEPEST else None
            self._known[key] = self._leaf(*key, shape) if computed is None else computed
        return self._known[key]

    def _computed(self, node: fx.Node, offset: int, shape: tuple[int, ...], depth: int) -> Value | None:
        if node.op != "call_function":
            return None
        if node.target in (aten.full.default, aten.scalar_tensor.default):
            return _number(node.args[-1])
        source, first = see_through(node)
        if source is not None:
            return self.value(source, offset + first, depth + 1)
        computed = self._operation(node, offset, shape, depth)
        if computed is None or node in self._inside:
            return computed
        # Others need the value too, so that it is in memory or can be there: is it cheaper to read than to compute?
        elements = math.prod(shape)
        return computed if bytes_read([(computed, elements)]) <= elements * node.meta["val"].element_size() else None

    def _operation(self, node: fx.Node, offset: int, shape: tuple[int, ...], depth: int) -> Value | None:
        text, arguments = _expression(node)
        if not text or node.meta["val"].dtype not in FLOATS | {torch.bool}:
            return None
        operands: list[Value] = []
        for index, argument in enumerate(arguments):
            condition = node.target is aten.where.self and index == 0
            operand = self._operand(argument, {torch.bool} if condition else FLOATS, offset, shape, depth)
            if operand is None:
                return None
            operands.append(operand)
        if text == "{0}":
            return operands[0]
        if all(isinstance(operand, float) for operand in operands):
            return None
        if text == _SIGMOID:
            return self._sigmoid(operands[0])
        if node.target is aten.reciprocal.default:
            return self._reciprocal(operands[0])
        if node.target in _DIVISIONS and _is_one_or_more(operands[1]):
            return self._apply(aten.mul.Tensor, operands[0], self._reciprocal(operands[1]))
        return self._make(node.target._opname, text, *operands)  # type: ignore[union-attr]

    def _make(self, name: str, text: str, *operands: Value) -> Operation:
        """The one operation of this kind on these operands: what several values have in common is computed once."""
        return self._made.setdefault((text, operands), Operation(name, text, operands))

    def _sigmoid(self, x: Value) -> Operation:
        """As it stands in what silu is decomposed to, which then has it in common with its gradient."""
        exponential = self._apply(aten.exp.default, self._apply(aten.neg.default, x))
        return self._reciprocal(self._apply(aten.add.Tensor, exponential, 1.0))

    def _reciprocal(self, x: Value) -> Operation:
        if _is_one_or_more(x):
            return self._make(aten.reciprocal.default._opname, _RECIPROCAL_FROM_ONE_ON, x)
        return self._apply(aten.reciprocal.default, x)

    def _apply(self, operator: Any, *operands: Value) -> Operation:
        return self._make(operator._opname, OPERATIONS[operator][1], *operands)

    def _operand(
        self, argument: Any, dtypes: AbstractSet[torch.dtype], offset: int, shape: tuple[int, ...], depth: int
    ) -> Value | None:
        own = shape_of(argument)
        if own is None:
            return _number(argument)
        if argument.meta["val"].dtype not in dtypes or not broadcasts(own, shape):
            return None
        return self.value(argument, offset, depth + 1)

    def _leaf(self, node: fx.Node, offset: int, shape: tuple[int, ...]) -> Leaf | None:
        """How to read a node, if its rows lie at one distance from each other and its columns side by side."""
        value = node.meta["val"]
        strides = value.stride() or (1,)
        if value.dtype not in FLOATS or value.device != self._device or any(type(s) is not int for s in strides):
            return None
        rows, row_stride = 1, 0
        for size, stride in reversed(list(zip(shape[:-1], strides[:-1], strict=True))):
            if size > 1 and rows > 1 and stride != row_stride * rows:
                return None
            if size > 1 and rows == 1:
                row_stride = stride
            rows *= size
        column_stride = strides[-1] if shape[-1] > 1 else 0
        return Leaf(node, row_stride, column_stride, offset) if column_stride in (0, 1) else None


def _is_one_or_more(value: Value) -> bool:
    """Whether this is an exponential plus 1 or more, as in a sigmoid, or no number."""
    if not isinstance(value, Operation) or value.name != "add":
        return False
    exponentials = [isinstance(part, Operation) and part.name == "exp" for part in value.operands]
    return any(exponentials) and any(isinstance(part, float) and part >= 1 for part in value.operands)


def broadcasts(own: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a tensor of shape ``own`` is to one of ``shape`` a matrix, a row, a column, or a single value."""
    if own[-1] not in (1, shape[-1]):
        return False
    return math.prod(own[:-1]) == 1 or tuple(own[:-1]) == tuple(shape[:-1])


def see_through(node: fx.Node) -> tuple[fx.Node | None, int]:
    """What ``node`` is a view of, row by row, and the column there at which it begins; ``(None, 0)`` if it is none.

    A view that repeats rows or columns counts too.
    """
    if _is_split_piece(node):
        return _split_piece(*node.args)
    source = node.args[0] if node.target in VIEWS else None
    own, shape = shape_of(source), shape_of(node)
    if not isinstance(source, fx.Node) or own is None or shape is None:
        return None, 0
    if node.target is aten.slice.Tensor and own != shape:
        return _slice(source, own, *node.args[1:])
    if node.target is aten.expand.default:
        return (source, 0) if broadcasts(own, shape) else (None, 0)
    return (source, 0) if own[-1] == shape[-1] and math.prod(own) == math.prod(shape) else (None, 0)


def _slice(
    source: fx.Node, own: tuple[int, ...], dim: Any = 0, start: Any = None, end: Any = None, step: Any = 1
) -> tuple[fx.Node | None, int]:
    first = 0 if start is None else start
    if type(first) is not int or step != 1 or dim not in (-1, len(own) - 1):
        return None, 0
    # One before the first column counts as the first.
    return source, first if first >= 0 else max(first + own[-1], 0)


def _is_split_piece(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target in SPLITS


def _split_piece(split: Any, index: Any) -> tuple[fx.Node | None, int]:
    source, sizes = split.args[:2]
    dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    own = shape_of(source)
    if own is None or dim not in (-1, len(own) - 1):
        return None, 0
    before = [sizes] * index if isinstance(sizes, int) else sizes[:index]
    return (source, sum(before)) if all(type(size) is int for size in before) else (None, 0)


def _expression(node: fx.Node) -> tuple[str, Sequence[Any]]:
    """The Triton expression of an operation and what it takes; empty if it is none, or takes what is not known here."""
    if node.target is CONVERT:
        return "{0}", node.args[:1]
    if node.target is aten.pow.Tensor_Scalar:
        exponent: Any = node.args[1]
        return (POWERS.get(exponent, "") if isinstance(exponent, int | float) else ""), node.args[:1]
    if node.target is aten.sigmoid.default:
        return _SIGMOID, node.args
    count, text = OPERATIONS.get(node.target, (0, ""))
    plain = all(name in _NEUTRAL and value == _NEUTRAL[name] for name, value in node.kwargs.items())
    return (text if plain and len(node.args) == count else ""), node.args


def _number(argument: Any) -> float | None:
    if isinstance(argument, bool) or not isinstance(argument, int | float) or not math.isfinite(argument):
        return None
    return float(argument)
