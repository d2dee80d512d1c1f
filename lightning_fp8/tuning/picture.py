"""A picture of a benchmark's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_fp8.tuning.bench import Measurement


def draw(results: Mapping[str, Sequence[Measurement]], path: str | Path, title: str) -> None:
    """Bars of milliseconds a step for each shape, by kind of kernel where profiled, with speed-up and memory.

    Args:
        results: by shape.
        path: of the picture; its ending says the format.
        title: above all.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib does not know the format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Pictures need matplotlib: pip install matplotlib.") from error
    done = {shape: [row for row in rows if not row.error] for shape, rows in results.items()}
    bars = max((len(rows) for rows in done.values()), default=1)
    figure = Figure(figsize=(5.5 * max(len(done), 1), 1.8 + 0.42 * bars), layout="constrained")
    figure.suptitle(title)
    kinds = list(dict.fromkeys(kind for rows in done.values() for row in rows for kind in row.kernels))
    for axes, (shape, rows) in zip(figure.subplots(1, max(len(done), 1), squeeze=False)[0], done.items(), strict=False):
        names = [row.variant for row in rows]
        left = [0.0] * len(rows)
        for index, kind in enumerate(kinds):
            widths = [row.kernels.get(kind, 0.0) for row in rows]
            axes.barh(names, widths, left=left, color=f"C{index}", label=kind)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        # What no kernel covers: the GPU waited, or there was no profile.
        widths = [max(row.milliseconds - covered, 0.0) for row, covered in zip(rows, left, strict=True)]
        axes.barh(names, widths, left=left, color="0.8", label="other" if kinds else "step")
        for place, row in enumerate(rows):
            memory = f", {row.peak_gib:.1f} GiB" if row.peak_gib else ""
            axes.text(row.milliseconds, place, f" x{row.speedup:.2f}{memory}", va="center", fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.25)
        axes.set_title(shape)
        axes.set_xlabel("milliseconds a step")
        axes.legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=150)
