"""Nodes of a graph that launch Triton kernels: what they launch, and how to let them launch another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

from lightning_fp8.kernels.launch import with_warps


def kernel_of(node: fx.Node) -> Any:
    """The kernel that ``node`` launches, in its one configuration; ``None`` if it launches none."""
    if node.target is not torch.ops.higher_order.triton_kernel_wrapper_functional:
        return None
    kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
    return kernel if len(getattr(kernel, "configs", ())) == 1 else None


def launched_by(node: fx.Node) -> Any:
    """The function of that kernel; ``None`` if it launches none."""
    return getattr(kernel_of(node), "fn", None)


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The kernel's arguments by name: nodes, numbers and constants."""
    constants = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])  # type: ignore[arg-type]
    return {**constants, **node.kwargs["kwargs"]}  # type: ignore[dict-item]


def programs_of(node: fx.Node) -> int:
    """How many programs of the kernel, in its one configuration, ``node`` launches."""
    grids: Any = node.kwargs["grid"]
    ((programs, *_),) = grids
    return int(programs)


def relaunch(
    node: fx.Node,
    kernel: Any,
    arguments: Mapping[str, Any],
    programs: int | None = None,
    warps: int | None = None,
) -> None:
    """Let ``node`` launch ``kernel`` with ``arguments``.

    What the kernel writes must have the names of what the node's kernel has written before, or of some of it.

    Args:
        node: launches a kernel.
        kernel: what it shall launch.
        arguments: the kernel's.
        programs: how many; ``None`` for as many as before.
        warps: a program's; ``None`` for as many as before.
    """
    warps = warps or kernel_of(node).configs[0].num_warps
    constants = {name: value for name, value in arguments.items() if value is None or isinstance(value, tuple)}
    others = {name: value for name, value in arguments.items() if name not in constants}
    grids: Any = node.kwargs["grid"]
    ((before, *rest),) = grids
    written: Any = node.kwargs["tensors_to_clone"]
    written = [name for name in written if name in others]
    node.kwargs = {
        **node.kwargs,
        "kernel_idx": kernel_side_table.add_kernel(with_warps(kernel, warps)),
        "constant_args_idx": kernel_side_table.add_constant_args(constants),
        "grid": [(before if programs is None else programs, *rest)],
        "kwargs": others,
        "tensors_to_clone": written,
    }
    node.meta["val"] = {name: others[name].meta["val"] for name in written}
    # Inductor gives the kernel these very strides; what is written for them relies on it.
    values = fx.node.map_aggregate(node.kwargs, lambda a: a.meta["val"] if isinstance(a, fx.Node) else None)
    node.meta["eager_input_vals"] = ((), values)
