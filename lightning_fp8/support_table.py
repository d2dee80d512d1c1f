"""Backend x recipe x device: what is native, emulated or refused, asked of the backends themselves.

``python -m lightning_fp8.support_table`` prints the table of ``docs/backends.md``; ``lightning-fp8 doctor`` shows
:func:`support_here`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_fp8.backends import NAMED_BACKENDS, Support
from lightning_fp8.kernels.capability import Hardware
from lightning_fp8.recipes import RECIPE_NAMES, get_recipe

#: The generations that differ, with a CUDA version that lacks nothing.
GENERATIONS: dict[str, Hardware] = {
    "CPU": Hardware("cpu"),
    "Ampere (8.0)": Hardware("cuda", (8, 0), (13, 0)),
    "Ada (8.9)": Hardware("cuda", (8, 9), (13, 0)),
    "Hopper (9.0)": Hardware("cuda", (9, 0), (13, 0)),
    "Blackwell (10.0)": Hardware("cuda", (10, 0), (13, 0)),
    "Blackwell (12.0)": Hardware("cuda", (12, 0), (13, 0)),
}


class Row(NamedTuple):
    """One line of a table.

    Attributes:
        backend: its name among :data:`~lightning_fp8.backends.NAMED_BACKENDS`.
        recipe: the recipe's name.
        support: one for each device.
    """

    backend: str
    recipe: str
    support: list[Support]


def support_by_generation() -> list[Row]:
    """What each backend does with each recipe on each of :data:`GENERATIONS`, were its library installed."""
    return [
        Row(name, recipe, [backend.support_on(get_recipe(recipe), hardware) for hardware in GENERATIONS.values()])
        for name, backend in NAMED_BACKENDS.items()
        for recipe in RECIPE_NAMES
    ]


def support_here(device: torch.device | str | None = None) -> list[Row]:
    """What each backend does with each recipe on one device, with what is installed.

    Args:
        device: by default the current CUDA device, or the CPU where there is none.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return [
        Row(name, recipe, [backend.support(get_recipe(recipe), device)])
        for name, backend in NAMED_BACKENDS.items()
        for recipe in RECIPE_NAMES
    ]


def markdown() -> str:
    """The table of :func:`support_by_generation`, in Markdown."""
    rows = [["backend", "recipe", *GENERATIONS]]
    rows += [[row.backend, row.recipe, *(support.kind for support in row.support)] for row in support_by_generation()]
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


if __name__ == "__main__":
    print(markdown())
