"""Tables for people to read."""

from __future__ import annotations

from collections.abc import Container, Sequence


def text_table(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """A line for each row, its columns as wide as their widest cell but for the last.

    Args:
        rows: equally long, the heads among them.
        right: columns that stand to the right, as numbers do.
    """
    columns = list(zip(*rows, strict=True))
    for place, column in enumerate(columns[:-1]):
        width = max(map(len, column))
        columns[place] = tuple(cell.rjust(width) if place in right else cell.ljust(width) for cell in column)
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
