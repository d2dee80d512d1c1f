"""A pass over joint graphs: backward makes transposed operands from what it has, instead of finding them kept.

Forward casts an operand for its own GEMM and for one of backward, and keeps the latter's codes. What they were cast
from is often kept too: the weight is a parameter, a norm's input and statistics or an activation's input are what their
own gradients need. Then the cast can be made in two: forward's codes in forward, backward's in backward, by one kernel
each, once :mod:`lightning_fp8.kernels.folding` has been over both graphs.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

from lightning_fp8.kernels.folded_values import shape_of
from lightning_fp8.kernels.folding import FILES, paths
from lightning_fp8.kernels.kept_values import KeptValues, Origin, bytes_of
from lightning_fp8.kernels.launch_nodes import arguments_of, launched_by, relaunch


class RecomputeTransposed(CustomGraphPass):
    """To be Inductor's ``joint_custom_post_pass``; changes graphs in place.

    A cast is made in two where its scale is stored or foreseen, backward alone reads its transposed codes, and less is
    kept afterwards. What backward computes again is marked as torch's activation checkpointing marks it.

    Args:
        cheap: only where backward reads no more than the matrix that was cast.
    """

    def __init__(self, cheap: bool) -> None:
        self._cheap = cheap

    def __call__(self, graph: fx.Graph) -> None:
        """Put off what is better cast in backward."""
        kept = KeptValues(graph)
        by_kept: dict[frozenset[fx.Node], list[BothOperands]] = defaultdict(list)
        for node in graph.nodes:
            cast = BothOperands.of(node, kept)
            if cast is not None and (cast.is_cheap or not self._cheap):
                by_kept[cast.origin.kept].append(cast)
        for more, casts in by_kept.items():
            if kept.bytes_more(more) < sum(bytes_of(cast.codes) for cast in casts):
                _put_off(casts, kept)

    def uuid(self) -> bytes:
        """Identifies this pass, for caches of compiled graphs."""
        return get_hash_for_files(paths((*FILES, "kept_values.py", "recomputing.py")), str(self._cheap))


class BothOperands:
    """Nodes that together cast both operands: ``triton_stored.cast_stored``, alone or as a scale was foreseen.

    Attributes:
        nodes: the node that launches ``cast_stored`` and, if there is one, ``triton_foreseen.cast_again``.
        codes: the transposed codes.
        origin: what backward can compute the matrix from.
    """

    def __init__(self, nodes: Sequence[fx.Node], codes: fx.Node, origin: Origin) -> None:
        self.nodes = nodes
        self.codes = codes
        self.origin = origin

    @staticmethod
    def of(node: fx.Node, kept: KeptValues) -> BothOperands | None:
        """Those of which ``node`` is the first, in forward, where backward alone reads the transposed codes."""
        from lightning_fp8.kernels.triton_foreseen import cast_again
        from lightning_fp8.kernels.triton_stored import cast_stored

        if launched_by(node) is not cast_stored or node in kept.backward:
            return None
        readers = [user for codes in _results(node, "codes_t") for user in codes.users]
        nodes = [node, *(reader for reader in readers if launched_by(reader) is cast_again)]
        arguments = arguments_of(node)
        codes = _results(nodes[-1], "codes_t")
        if not (arguments["STRAIGHT"] and arguments["TRANSPOSED"] and len(codes) == 1 and codes[0] in kept.backward):
            return None
        origin = kept.origin(arguments["x"])
        # What is marked already belongs to the user's own checkpointing.
        marked = any("recompute" in n.meta for n in (*nodes, *origin.computed, *origin.kept))
        known = all(shape_of(n) for n in (arguments["x"], codes[0], *origin.kept))
        return BothOperands(nodes, codes[0], origin) if known and not marked else None

    @property
    def is_cheap(self) -> bool:
        """Whether no more is read than the matrix that is cast: a weight, a norm's input, not two factors."""
        x = arguments_of(self.nodes[0])["x"]
        return self.origin.bytes_read(x.meta["val"].numel()) <= bytes_of(x)

    def put_off(self) -> fx.Node:
        """Let ``nodes`` make the straight operand, and keep the scale of the transposed one for the node returned."""
        from lightning_fp8.kernels.triton_stored import LATER, cast_later

        first, last = self.nodes[0], self.nodes[-1]
        graph = first.graph
        arguments = arguments_of(first)
        with graph.inserting_after(last):
            scale = graph.call_function(operator.getitem, (last, "decode_t"))
        # A tensor of its own: Inductor takes arguments that are one tensor for one memory.
        scale.meta["val"] = torch.empty_like(arguments["decode_t"].meta["val"])
        with graph.inserting_after(scale):
            later = graph.node_copy(first)
        with graph.inserting_before(later):
            decode = graph.node_copy(arguments["decode_t"])
        decode.meta["val"] = torch.empty_like(scale.meta["val"])
        same = ("x", "codes_t", "rows", "columns", "stride", "padded", "group", "R", "C", "EVEN")
        relaunch(later, cast_later, {**{n: arguments[n] for n in same}, "decode_t": decode, "kept": scale})
        for name in ("codes_t", "decode_t"):
            for result in _results(last, name):
                if result is not scale:
                    result.args = (later, name)
        for node in reversed(self.nodes):
            relaunch(node, launched_by(node), {**arguments_of(node), "codes_t": None, "TRANSPOSED": LATER})
            for codes in _results(node, "codes_t"):
                graph.erase_node(codes)
        return later


def _put_off(casts: Sequence[BothOperands], kept: KeptValues) -> None:
    for cast in casts:
        for node in (cast.put_off(), *cast.origin.computed):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        for node in cast.origin.kept:
            # What it is computed from, if no larger, would do too: backward would then compute and write it first.
            if kept.is_worth_keeping(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _results(node: fx.Node, name: str) -> list[fx.Node]:
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == name]
