"""Casts by Triton kernels: outputs, grids and tiles. Same results as :func:`lightning_fp8.kernels.reference.cast`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_fp8.casts import Cast, are_foreseeable
from lightning_fp8.kernels import triton_block, triton_data, triton_foreseen, triton_stored
from lightning_fp8.kernels.launch import Launch, at_once
from lightning_fp8.kernels.layout import Operands, empty_operands
from lightning_fp8.kernels.reference import pad_rows, round_up, row_multiple

# Numbers of programs follow from sizes by arithmetic, with torch.sym_min for min: where a traced graph has symbols for
# sizes, a comparison would need a graph for either outcome.


@dataclass(frozen=True)
class Tile:
    """How the work of a kernel is cut; ``benchmarks/kernels.py --sweep`` compares the choices.

    Attributes:
        rows: rows of a tile, a power of two, at least 16.
        columns: columns of a tile, a power of two.
        warps: warps a program.
        group: rows of tiles that programs walk through together; 1 goes along the rows of the matrix.
    """

    rows: int
    columns: int
    warps: int
    group: int = 1


#: Casts with one scale for the tensor, or with one for each row of values that are computed.
CAST_TILE = Tile(64, 128, 8)
#: The same where it divides columns evenly, as those of widths like 320 and 1600, and ``CAST_TILE`` does not.
NARROW_CAST_TILE = Tile(64, 64, 4)
#: Casts of a matrix in memory with a scale for each row, or column.
VECTOR_CAST_TILE = Tile(64, 128, 4, 8)
#: The amaxes of rows and columns, of a matrix in memory whose columns it divides and of any other. The wider a tile is,
#: the less passes between lanes; what computes values needs the registers.
WIDE_AMAX_TILE, VECTOR_AMAX_TILE = Tile(32, 512, 4), Tile(64, 128, 4)
#: The former for matrices of at least so many columns: with fewer, too few programs share the work.
WIDEST_AMAX_TILE, WIDEST_AMAX_COLUMNS = Tile(16, 1024, 4), 8192
#: Programs that keep the GPU busy; where there would be more, one goes through several tiles, one below the other.
VECTOR_AMAX_PROGRAMS = 512
#: The amax of the tensor, a tile a turn.
AMAX_TILE = Tile(16, 256, 4)
#: Blocks of 128: the tile is the block. For both operands, and for one.
PAIR_BLOCK_TILE, SINGLE_BLOCK_TILE = Tile(128, 128, 4), Tile(128, 128, 8)
#: Blocks of 32.
MX_TILE = Tile(64, 64, 4)
#: Programs of the tensor's amax pass, each of which leaves one word. A power of two.
AMAX_PROGRAMS = 1024
#: Programs that look whether a scale was foreseen right, and cast again where it was not.
AGAIN_PROGRAMS = 512
#: The longest row that one program holds in registers, and the values it holds at least.
MAX_ROW, MIN_ROW_TILE = 32768, 4096

_SCALAR_MODES = {None: triton_data.ABSENT, "tensorwise": triton_data.TENSOR, "rowwise": triton_data.ROWS}
_BLOCK_MODES = {None: triton_block.ABSENT, "1x128": triton_block.VECTOR, "128x128": triton_block.SQUARE}


def cast(
    x: Tensor,
    straight: Cast | None,
    transposed: Cast | None,
    slot: Tensor | None,
    stored: bool,
    launch: Launch = at_once,
) -> Operands:
    """As :func:`lightning_fp8.kernels.reference.cast`, for a CUDA matrix with at least one row and one cast.

    Rows may lie apart; a matrix whose rows are not contiguous themselves is copied.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    padded = round_up(x.shape[0], row_multiple(straight, transposed))
    stored = stored and slot is not None
    if slot is not None and not stored and are_foreseeable(straight, transposed):
        return cast_foreseen(x, padded, straight, transposed, slot, launch=launch)
    by = _caster(straight or transposed, stored)
    if straight and transposed and _caster(transposed, stored) is not by:
        # No recipe mixes such granularities: a pass for each direction does, and rows that both have.
        x = pad_rows(x, row_multiple(straight, transposed))
        codes, decode, _, _ = by(x, padded, straight, None, slot, launch=launch)
        _, _, codes_t, decode_t = _caster(transposed, stored)(x, padded, None, transposed, slot, launch=launch)
        return codes, decode, codes_t, decode_t
    return by(x, padded, straight, transposed, slot, launch=launch)


def tile_of(columns: int) -> Tile:
    """The tile of a matrix of so many columns, where scales are those of a tensor or of rows."""
    even = columns % CAST_TILE.columns == 0 or columns % NARROW_CAST_TILE.columns != 0
    return CAST_TILE if even else NARROW_CAST_TILE


def vector_amax_tile(columns: int, pieces: int = 0) -> Tile:
    """The tile that finds amaxes of rows and columns, in a matrix of so many columns.

    Args:
        columns: the matrix's.
        pieces: ranges of columns that are computed at once; 0 for a matrix in memory.
    """
    if not pieces and columns >= WIDEST_AMAX_COLUMNS and columns % WIDEST_AMAX_TILE.columns == 0:
        return WIDEST_AMAX_TILE
    if not pieces and columns % WIDE_AMAX_TILE.columns == 0:
        return WIDE_AMAX_TILE
    tile = VECTOR_AMAX_TILE if tile_of(columns) is CAST_TILE else NARROW_CAST_TILE
    return replace(tile, rows=tile.rows // 2) if pieces > 1 else tile


def vector_amax_grid(rows: int, columns: int, tile: Tile) -> tuple[int, int]:
    """Programs that find amaxes of rows and columns, and the tiles that each goes through."""
    most = triton_data.MOST_ROWS // tile.rows
    turns = torch.sym_max(1, torch.sym_min(most, _tiles(rows, columns, tile) // VECTOR_AMAX_PROGRAMS))
    return -(-rows // (tile.rows * turns)) * -(-columns // tile.columns), turns


def _caster(cast: Cast | None, stored: bool) -> Callable[..., Operands]:
    """The function that casts with this granularity."""
    granularity = cast.granularity if cast else None
    if granularity == "tensorwise" and stored:
        return cast_stored
    if granularity in _SCALAR_MODES:
        return cast_from_data
    return cast_blocks_128 if granularity in _BLOCK_MODES else cast_blocks_32


def cast_stored(
    x: Tensor,
    padded: int,
    straight: Cast | None,
    transposed: Cast | None,
    slot: Tensor,
    tile: Tile | None = None,
    launch: Launch = at_once,
) -> Operands:
    """Tensorwise with the slot's scales, in one pass."""
    rows, columns = x.shape
    tile = tile or tile_of(columns)
    out = empty_operands(x, padded, straight, transposed)
    launch(
        triton_stored.cast_stored,
        _tiles(padded, columns, tile),
        (x, *_pointers(out, straight, transposed), slot),
        (rows, columns, x.stride(0), padded, tile.group),
        (
            straight is not None, _rule(straight), transposed is not None, _rule(transposed),
            tile.rows, tile.columns, is_even(rows, columns, tile),
        ),
        tile.warps,
    )  # fmt: skip
    return out


def cast_foreseen(
    x: Tensor,
    padded: int,
    straight: Cast | None,
    transposed: Cast | None,
    slot: Tensor,
    launch: Launch = at_once,
) -> Operands:
    """Tensorwise with powers of two from the data: in one pass where the slot's amaxes tell the same scales."""
    rows, columns = x.shape
    tile = tile_of(columns)
    rules = _rule(straight or transposed), _rule(transposed or straight)
    foreseen = torch.empty_like(slot)
    launch(triton_foreseen.foresee, 1, (slot, foreseen), (), rules, 1)
    out = cast_stored(x, padded, straight, transposed, foreseen, tile, launch)
    launch(
        triton_foreseen.cast_again,
        torch.sym_min(AGAIN_PROGRAMS, _tiles(padded, columns, tile)),
        (x, *_pointers(out, straight, transposed), slot, foreseen),
        (rows, columns, x.stride(0), padded),
        (
            straight is not None, rules[0], transposed is not None, rules[1],
            tile.rows, tile.columns, is_even(rows, columns, tile),
        ),
        tile.warps,
    )  # fmt: skip
    return out


def cast_from_data(
    x: Tensor,
    padded: int,
    straight: Cast | None,
    transposed: Cast | None,
    slot: Tensor | None,
    tile: Tile | None = None,
    launch: Launch = at_once,
) -> Operands:
    """Tensorwise and rowwise with scales from the data: a pass for the amaxes, then one for the codes."""
    rows, columns = x.shape
    modes = _SCALAR_MODES[_granularity(straight)], _SCALAR_MODES[_granularity(transposed)]
    if straight and transposed is None and modes[0] == triton_data.ROWS and columns <= MAX_ROW:
        return _cast_rows(x, padded, straight, slot, launch)
    tile = tile or (VECTOR_CAST_TILE if triton_data.ROWS in modes else tile_of(columns))
    out = empty_operands(x, padded, straight, transposed)
    if triton_data.ROWS in modes:
        amaxes, count, most = row_and_column_scales(x, padded, straight, transposed, out, slot, launch=launch), 1, 1
        slot = None
    else:
        amaxes = amax_partials(x, launch=launch)
        count, most = amaxes.shape[0], AMAX_PROGRAMS
    launch(
        triton_data.cast_from_amaxes,
        _tiles(padded, columns, tile),
        (x, *_pointers(out, straight, transposed), slot, amaxes),
        (rows, columns, x.stride(0), padded, tile.group, count),
        (
            modes[0], _rule(straight), modes[1], _rule(transposed), slot is not None,
            most, tile.rows, tile.columns, is_even(rows, columns, tile),
        ),
        tile.warps,
    )  # fmt: skip
    return out


def amax_partials(x: Tensor, tile: Tile = AMAX_TILE, programs: int = AMAX_PROGRAMS, launch: Launch = at_once) -> Tensor:
    """Largest magnitudes that together cover ``x``: at most ``programs`` of them, the bits of fp32 as int32."""
    rows, columns = x.shape
    stride = x.stride(0)
    if stride == columns and rows * columns % tile.columns == 0:
        rows, columns, stride = rows * columns // tile.columns, tile.columns, tile.columns
    programs = torch.sym_min(programs, _tiles(rows, columns, tile))
    partials = x.new_empty(programs, dtype=torch.int32)
    launch(
        triton_data.amax_partials,
        programs,
        (x, partials),
        (rows, columns, stride),
        (tile.rows, tile.columns, is_even(rows, columns, tile)),
        tile.warps,
    )
    return partials


def row_and_column_scales(
    x: Tensor,
    padded: int,
    straight: Cast | None,
    transposed: Cast | None,
    out: Operands,
    slot: Tensor | None,
    tile: Tile | None = None,
    launch: Launch = at_once,
) -> Tensor:
    """Scales of rows and columns and the tensor's amax, as ``triton_data.row_and_column_scales`` lays them out.

    Decode scales go to ``out``, the amax to the slot too.
    """
    rows, columns = x.shape
    tile = tile or vector_amax_tile(columns)
    finished = (padded + columns) // triton_data.FEWEST_ROWS + 2
    scratch = x.new_zeros(triton_data.SCRATCH_HEAD + padded + columns + finished, dtype=torch.int32)
    programs, turns = vector_amax_grid(rows, columns, tile)
    modes = _SCALAR_MODES[_granularity(straight)], _SCALAR_MODES[_granularity(transposed)]
    launch(
        triton_data.row_and_column_scales,
        programs,
        (x, scratch, out[1], out[3], slot),
        (rows, columns, x.stride(0), padded, turns),
        (
            modes[0] == triton_data.ROWS, _rule(straight), modes[1] == triton_data.ROWS, _rule(transposed),
            triton_data.TENSOR in modes, slot is not None, tile.rows, tile.columns, is_even(rows, columns, tile),
        ),
        tile.warps,
    )  # fmt: skip
    return scratch


def _cast_rows(x: Tensor, padded: int, straight: Cast, slot: Tensor | None, launch: Launch) -> Operands:
    """Rowwise, the straight operand alone: rows stay in registers between their amax and their codes."""
    rows, columns = x.shape
    out = empty_operands(x, padded, straight, None)
    width = 1 << (columns - 1).bit_length()
    height = max(1, MIN_ROW_TILE // width)
    launch(
        triton_data.cast_rows,
        -(-padded // height),
        (x, out[0], out[1], slot),
        (rows, columns, x.stride(0), padded),
        (_rule(straight), slot is not None, height, width),
        max(4, width // 2048),
    )
    return out


def cast_blocks_128(
    x: Tensor,
    padded: int,
    straight: Cast | None,
    transposed: Cast | None,
    slot: Tensor | None,
    tile: Tile | None = None,
    launch: Launch = at_once,
) -> Operands:
    """1x128 and 128x128, in one pass; the tile is 128 x 128."""
    rows, columns = x.shape
    modes = _BLOCK_MODES[_granularity(straight)], _BLOCK_MODES[_granularity(transposed)]
    if tile is None:
        tile = PAIR_BLOCK_TILE if straight and transposed else SINGLE_BLOCK_TILE
    out = empty_operands(x, padded, straight, transposed)
    launch(
        triton_block.cast_blocks_128,
        _tiles(padded, columns, tile),
        (x, *_pointers(out, straight, transposed), slot),
        (rows, columns, x.stride(0), padded),
        (
            modes[0], _rule(straight), modes[1], _rule(transposed), slot is not None, is_even(rows, columns, tile),
        ),
        tile.warps,
    )  # fmt: skip
    return out


def cast_blocks_32(
    x: Tensor,
    padded: int,
    straight: Cast | None,
    transposed: Cast | None,
    slot: Tensor | None,
    launch: Launch = at_once,
) -> Operands:
    """1x32, in one pass."""
    rows, columns = x.shape
    tile = MX_TILE
    out = empty_operands(x, padded, straight, transposed)
    launch(
        triton_block.cast_blocks_32,
        _tiles(padded, columns, tile),
        (x, *_pointers(out, straight, transposed), slot),
        (rows, columns, x.stride(0), padded),
        (
            straight is not None, _rule(straight)[0], transposed is not None, _rule(transposed)[0],
            slot is not None, tile.rows, tile.columns, is_even(rows, columns, tile),
        ),
        tile.warps,
    )  # fmt: skip
    return out


def _granularity(cast: Cast | None) -> str | None:
    return None if cast is None else cast.granularity


def _rule(cast: Cast | None) -> tuple[float, float, float, bool]:
    """``RULE`` of ``triton_common.compute_scale``."""
    if cast is None:
        return 1.0, 1.0, 1.0, False
    return cast.format.max, 2.0**-cast.margin, cast.max_scale, cast.power_of_two


def _tiles(rows: int, columns: int, tile: Tile) -> int:
    # triton.cdiv costs the host several microseconds a call.
    return -(-rows // tile.rows) * -(-columns // tile.columns)


def is_even(rows: int, columns: int, tile: Tile) -> bool:
    """Whether every tile lies inside the matrix; it then has no padding either."""
    # bool: it is a constant of the kernel, also where a traced graph has symbols for sizes.
    return bool(rows % tile.rows == 0 and columns % tile.columns == 0)


def _pointers(out: Operands, straight: Cast | None, transposed: Cast | None) -> tuple[Tensor | None, ...]:
    """The outputs in the order the kernels take them; ``None`` for those left out."""
    codes, decode, codes_t, decode_t = out
    if straight is None:
        return None, codes_t, None, decode_t
    if transposed is None:
        return codes, None, decode, None
    return codes, codes_t, decode, decode_t
