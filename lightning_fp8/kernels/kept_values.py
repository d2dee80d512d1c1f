"""What backward can compute a matrix of forward from, elementwise, at the least memory.

A joint graph holds forward and backward; a partitioner then decides what is kept in between. Much is kept whatever
becomes of the casts: parameters, and what the gradients of other operations read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from lightning_fp8.kernels.folded_values import SPLITS, VIEWS, aten, is_elementwise, shape_of

_CONSTANTS = frozenset({aten.full.default, aten.scalar_tensor.default})


@dataclass(frozen=True)
class Origin:
    """What a matrix can be computed from.

    Attributes:
        parts: what is kept, by the part of it that is read: a view of it, or it itself.
        computed: the nodes from there to the matrix, itself among them; empty if it is kept.
    """

    parts: Mapping[fx.Node, fx.Node]
    computed: frozenset[fx.Node]

    @property
    def kept(self) -> frozenset[fx.Node]:
        """The nodes that must be kept."""
        return frozenset(self.parts.values())

    def bytes_read(self, elements: int = 1) -> float:
        """Bytes that computing reads, of parts that have at least as many elements."""
        large = ((p, kept) for p, kept in self.parts.items() if min(_elements(p), _elements(kept)) >= elements)
        return sum(min(bytes_of(part), bytes_of(kept)) for part, kept in large)


class KeptValues:
    """What a joint graph keeps for backward.

    Attributes:
        backward: the nodes that backward alone needs.
        anyway: nodes that backward needs, or as much of what is computed from them.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.backward = _of_backward(graph)
        self.anyway: set[fx.Node] = {node for node in graph.nodes if node.op == "placeholder"}
        for node in reversed(graph.nodes):
            if any(user in self.backward or self._computes_from(node, user) for user in node.users):
                self.anyway.add(node)
        self._known: dict[fx.Node, Origin] = {}

    def _computes_from(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether backward needs ``user``, and has it from ``node`` without any other matrix."""
        others = (other for other in user.all_input_nodes if other is not node)
        return user in self.anyway and _computable(user) and all(_elements(o) < _elements(user) for o in others)

    def bytes_more(self, kept: frozenset[fx.Node]) -> float:
        """Bytes of ``kept`` that are kept for nothing else."""
        return sum(bytes_of(node) for node in kept - self.anyway)

    def origin(self, node: fx.Node) -> Origin:
        """What ``node`` is best computed from: the least to keep, then the least to read."""
        if node not in self._known:
            origins = [Origin({node: node}, frozenset())]
            if _computable(node):
                origins.insert(0, self._from_inputs(node))
            self._known[node] = min(origins, key=lambda o: (self.bytes_more(o.kept), o.bytes_read()))
        return self._known[node]

    def _from_inputs(self, node: fx.Node) -> Origin:
        inputs = [self.origin(source) for source in node.all_input_nodes]
        parts = {part: kept for origin in inputs for part, kept in origin.parts.items()}
        if _is_view(node) and len(parts) == 1 and all(_is_view(n) for origin in inputs for n in origin.computed):
            (kept,) = parts.values()
            parts = {node: kept}
        return Origin(parts, frozenset({node}).union(*(origin.computed for origin in inputs)))

    def is_worth_keeping(self, node: fx.Node) -> bool:
        """Whether ``node``, if backward needs it, takes the place of something as large that it is computed from."""
        if not _computable(node) or _is_view(node):
            return False
        sources = [n for n in node.all_input_nodes if _elements(n) >= _elements(node) and n not in self.anyway]
        return any(bytes_of(source) >= bytes_of(node) for source in sources)


def bytes_of(node: fx.Node) -> float:
    """The memory of a node's tensor; infinite for what is not one tensor of known size."""
    return math.inf if shape_of(node) is None else _elements(node) * node.meta["val"].element_size()


def _elements(node: fx.Node) -> float:
    shape = shape_of(node)
    return math.inf if shape is None else math.prod(shape)


def _computable(node: fx.Node) -> bool:
    """Whether backward may compute the node again, within the kernel of a cast."""
    return is_elementwise(node) or _is_view(node) or node.target in _CONSTANTS


def _is_view(node: fx.Node) -> bool:
    known = node.target in VIEWS or node.target in SPLITS or getattr(node.target, "is_view", False)
    return known or (is_elementwise(node) and not isinstance(node.target, torch._ops.OpOverload))


def _of_backward(graph: fx.Graph) -> set[fx.Node]:
    """What depends on the gradients of the outputs, and what goes into nothing else."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        given = node.op == "placeholder" and "tangents" in str(node.target)
        if node.op != "output" and (given or any(source in found for source in node.all_input_nodes)):
            found.add(node)
    for node in reversed(graph.nodes):
        if node.op != "placeholder" and node.users and all(user in found for user in node.users):
            found.add(node)
    return found
