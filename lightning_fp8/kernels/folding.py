"""A pass over Inductor's graphs: casts compute the values they cast, instead of reading them.

Inductor does not look into a Triton kernel that is not its own: between the elementwise operations before a cast and
the cast itself it would write the values to memory, to be read again at once. Here the operations move into the cast;
where scales come from the data, into the pass for their amaxes as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from lightning_fp8.kernels import folded_source
from lightning_fp8.kernels.folded_source import OF_THE_MATRIX, Piece, Source
from lightning_fp8.kernels.folded_values import (
    Leaf,
    Reader,
    aten,
    bytes_read,
    in_order,
    is_elementwise,
    matrices,
    see_through,
    shape_of,
)
from lightning_fp8.kernels.launch_nodes import arguments_of, launched_by, programs_of, relaunch

#: Matrices that a cast may read. Each takes registers.
MOST_MATRICES = 8

#: Columns of a tile of 128-blocks.
BLOCK = 128

#: What decides on graphs that casts are folded in, and on their kernels.
FILES = (
    "folding.py",
    "folded_source.py",
    "folded_values.py",
    "launch.py",
    "launch_nodes.py",
    "triton_block.py",
    "triton_cast.py",
    "triton_common.py",
    "triton_data.py",
    "triton_foreseen.py",
    "triton_stored.py",
)


class FoldIntoCasts(CustomGraphPass):
    """To be Inductor's ``post_grad_custom_pre_pass``; changes graphs in place.

    A cast is folded where all that its input goes into are such casts, tiles divide it evenly, and no more bytes move
    than before. What is folded: arithmetic, common activations, conversions, broadcast rows and columns, slices of
    columns, and one concatenation of columns.
    """

    def __call__(self, graph: fx.Graph) -> None:
        """Fold what can be folded."""
        casts = [cast for node in graph.nodes if (cast := KernelOfCast.of(node)) is not None]
        while casts:
            inside = leading_to(graph, casts)
            for cast in casts:
                cast.look(inside)
            remaining = [cast for cast in casts if cast.is_worth_folding(casts)]
            if len(remaining) == len(casts):
                break
            # What the others have to read is in memory after all, which may change what is best for these.
            casts = remaining
        if not casts:
            return
        for cast in casts:
            cast.fold()
        for node in reversed(list(graph.nodes)):
            if node in inside and not node.users:
                graph.erase_node(node)

    def uuid(self) -> bytes:
        """Identifies this pass and the kernels it writes, for caches of compiled graphs."""
        return get_hash_for_files(paths(FILES))


class KernelOfCast:
    """A node that launches a kernel of a cast: one that writes codes, or finds amaxes for it.

    Attributes:
        node: the node.
        arguments: those of the kernel.
        x: the matrix it reads.
        root: what the matrix is but for views.
        pieces: what it can compute, side by side; empty for nothing.
        holds_tile: whether its programs have a whole tile in registers, as those for 128-blocks, of one size.
        reads_seldom: whether it mostly leaves the matrix alone.
    """

    def __init__(self, node: fx.Node, arguments: Mapping[str, Any]) -> None:
        self.node = node
        self.arguments = arguments
        self.x: fx.Node = arguments["x"]
        self.root = self.x
        self.pieces: list[Piece] = []
        self.holds_tile = "C" not in arguments
        self.reads_seldom = "foreseen" in arguments

    @staticmethod
    def of(node: fx.Node) -> KernelOfCast | None:
        """That of ``node``, where it is one, of known sizes that tiles divide evenly."""
        from lightning_fp8.kernels import triton_block, triton_data, triton_foreseen, triton_stored

        kernel = launched_by(node)
        if kernel not in (
            triton_stored.cast_stored,
            triton_stored.cast_later,
            triton_foreseen.cast_again,
            triton_data.amax_partials,
            triton_data.row_and_column_scales,
            triton_data.cast_from_amaxes,
            triton_block.cast_blocks_128,
        ):
            return None
        arguments = arguments_of(node)
        shape = shape_of(arguments["x"])
        if shape is None or any(isinstance(a, fx.Node) and shape_of(a) is None for a in arguments.values()):
            return None
        arguments = on_values(kernel, arguments, shape)
        return KernelOfCast(node, arguments) if arguments["EVEN"] else None

    def look(self, inside: AbstractSet[fx.Node]) -> None:
        """Find ``root`` and ``pieces``; ``inside`` are the nodes that lead to casts to be folded and nowhere else."""
        self.root, self.pieces = self.x, []
        while self.root in inside:
            source, _ = see_through(self.root)
            if source is None or shape_of(source)[-1] != shape_of(self.root)[-1]:  # type: ignore[index]
                break
            self.root = source
        if self.root not in inside:
            return
        reader = Reader(inside, self.x.meta["val"].device)
        columns = BLOCK if self.holds_tile else self.arguments["C"]
        pieces = []
        for part in _side_by_side(self.root):
            shape, value = shape_of(part), reader.value(part)
            if value is None or shape is None or shape[-1] % columns or not matrices([value]):
                return
            pieces.append(Piece(value, shape[-1]))
        self.pieces = pieces

    def is_worth_folding(self, casts: Sequence[KernelOfCast]) -> bool:
        """Whether there is something to compute, and reading for it costs no more than the matrix did."""
        values = [piece.value for piece in self.pieces]
        read = [value for value in in_order(values) if isinstance(value, Leaf)]
        x = self.x.meta["val"]
        if not read or (values == read[:1] and read[0].node.meta["val"].dtype == x.dtype):
            return False
        if self.holds_tile and (len(values) == 1 or x.element_size() > 2):
            # With arithmetic besides, or 32 bits a value, so few programs fit on a multiprocessor that they take as
            # long as two kernels at the speed of memory (H200, silu times a matrix: 0.62 ms for 0.60). Inductor's
            # kernels for matrices side by side are slower than that (gradient of gate and up: 1.09 ms for 1.62).
            return False
        if len(matrices(values)) > MOST_MATRICES or any(_is_changed(leaf.node, self.node) for leaf in read):
            return False
        # Where several casts have the same input, each reads all that it is computed from.
        times = sum(cast.root is self.root and not cast.reads_seldom for cast in casts)
        sources = bytes_read((piece.value, x.shape[0] * piece.columns) for piece in self.pieces)
        return times * sources <= sources + (times + 1) * x.numel() * x.element_size()

    def fold(self) -> None:
        """Let the node launch a kernel that computes the pieces."""
        launched = launched_by(self.node)
        source = folded_source.write(self.pieces, self.x.meta["val"].dtype, launched)
        arguments, programs, warps = launch_of(launched, programs_of(self.node), self.arguments, source)
        memory = {f"x{index}": read for index, read in enumerate(source.inputs)}
        kernel = getattr(folded_source.load(source.text), source.name)
        relaunch(self.node, kernel, {**memory, **arguments}, programs, warps)


def launch_of(
    kernel: Any, programs: int, arguments: Mapping[str, Any], source: Source
) -> tuple[dict[str, Any], int, int | None]:
    """How to launch ``source`` in the place of ``programs`` programs of ``kernel``.

    Returns:
        Its arguments but for the memory it reads, how many programs, and the warps of one: ``None`` for as many as
        before.
    """
    from lightning_fp8.kernels.triton_cast import NARROW_CAST_TILE, tile_of, vector_amax_grid, vector_amax_tile
    from lightning_fp8.kernels.triton_data import amax_partials, row_and_column_scales
    from lightning_fp8.kernels.triton_foreseen import cast_again

    named = {name: value for name, value in arguments.items() if name not in OF_THE_MATRIX}
    if kernel is amax_partials:
        # Programs go through tiles until there are no more, and each has its word to write.
        return named, programs, None
    if kernel is row_and_column_scales:
        tile = vector_amax_tile(named["columns"], source.pieces)
        programs, turns = vector_amax_grid(named["rows"], named["columns"] // source.pieces, tile)
        return {**named, "turns": turns, "R": tile.rows}, programs, tile.warps
    if "C" not in named:
        return named, programs // source.pieces, None
    # Two wide tiles at once take so many registers that fewer warps fit on a multiprocessor.
    tile = NARROW_CAST_TILE if source.pieces > 1 else tile_of(named["columns"])
    named |= {"R": tile.rows, "C": tile.columns}
    if kernel is not cast_again:  # That goes through tiles until there are no more.
        programs = named["rows"] * named["columns"] // (tile.rows * tile.columns * source.pieces)
    return named, programs, tile.warps


def on_values(kernel: Any, arguments: Mapping[str, Any], shape: Sequence[int]) -> dict[str, Any]:
    """A kernel's arguments where the matrix, of this shape, is computed.

    What finds amaxes, or casts with scales of rows, has other tiles then, and may have taken memory as rows of any
    length.
    """
    from lightning_fp8.kernels.triton_cast import is_even, tile_of, vector_amax_tile
    from lightning_fp8.kernels.triton_data import amax_partials, cast_from_amaxes, row_and_column_scales

    rows, columns = shape
    if kernel in (amax_partials, cast_from_amaxes):
        tile = tile_of(columns)
    elif kernel is row_and_column_scales:
        tile = vector_amax_tile(columns, pieces=1)
    else:
        return dict(arguments)
    even = is_even(rows, columns, tile)
    return {**arguments, "rows": rows, "columns": columns, "R": tile.rows, "C": tile.columns, "EVEN": even}


def leading_to(graph: fx.Graph, casts: Sequence[KernelOfCast]) -> set[fx.Node]:
    """The nodes that lead to the inputs of ``casts`` and nowhere else."""
    input_of = {cast.node: cast.x for cast in casts}
    inside: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        leads = is_elementwise(node) or node.target is aten.cat.default
        if leads and node.users and all(user in inside or input_of.get(user) is node for user in node.users):
            inside.add(node)
    return inside


def _side_by_side(root: fx.Node) -> Sequence[fx.Node]:
    """The matrices whose columns, one after the other, are those of ``root``."""
    if root.target is not aten.cat.default:
        return [root]
    parts: Sequence[fx.Node] = root.args[0]  # type: ignore[assignment]
    dim = root.args[1] if len(root.args) > 1 else root.kwargs.get("dim", 0)
    shape = shape_of(root)
    return parts if shape is not None and dim in (-1, len(shape) - 1) else [root]


def _is_changed(node: fx.Node, before: fx.Node) -> bool:
    """Whether the memory of ``node`` is written before ``before`` runs."""
    return any(
        user < before and isinstance(user.target, torch._ops.OpOverload) and user.target._schema.is_mutable
        for user in node.users
    )


def paths(names: Sequence[str]) -> tuple[str, ...]:
    """Files beside this one."""
    return tuple(str(Path(__file__).parent / name) for name in names)
