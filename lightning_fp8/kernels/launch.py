"""How a Triton kernel is launched: at once, with little work for the host, or as a node of a graph that is traced.

Either way a kernel takes its tensors first, then its sizes, then its constants.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import triton
from torch import Tensor
from triton.runtime import driver


class Launch(Protocol):
    """Runs ``programs`` programs of ``kernel``, of so many ``warps``."""

    def __call__(
        self,
        kernel: Any,
        programs: int,
        tensors: tuple[Tensor | None, ...],
        sizes: tuple[int, ...],
        constants: tuple[Any, ...],
        warps: int,
    ) -> None: ...


#: Compiled kernels by all that Triton compiles them for.
_compiled: dict[tuple[Any, ...], Any] = {}
_MOST_COMPILED = 4096
#: The versions of Triton whose compiled kernels are called like this.
_DIRECT = (3, 3) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7)


def at_once(
    kernel: Any,
    programs: int | tuple[int, int],
    tensors: tuple[Tensor | None, ...],
    sizes: tuple[int | float, ...],
    constants: tuple[Any, ...],
    warps: int,
    fuse_products: bool = True,
) -> None:
    """Launch on the current stream.

    Triton's own way to a compiled kernel takes the host several times as long as the launch: it looks at every
    argument anew. Here the dtypes of the first two tensors, the sizes and the constants stand for all of them: the
    constants tell which tensors are left out and what is written. Tensors that are not
    aligned go Triton's way.

    Args:
        kernel: takes the tensors, the sizes and the constants, in this order.
        programs: how many, in one dimension or two.
        tensors: those after the second have always the same dtype.
        sizes: numbers; a launch with others than before goes Triton's way once.
        constants: the kernel's.
        warps: a program's.
        fuse_products: whether a product and the sum it goes into may be rounded once.
    """
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    x: Any = tensors[0]
    device = x.get_device()
    first = tensors[1]
    dtypes = x.dtype, None if first is None else first.dtype
    key = (id(kernel), device, dtypes, sizes, constants, warps, fuse_products)
    found = _compiled.get(key)
    alignment = 0
    for pointer in pointers:
        alignment |= pointer or 0
    if found is None or alignment % 16:
        compiled = by_triton(kernel, programs, tensors, sizes, constants, warps, fuse_products)
        # Triton's interpreter has nothing to compile.
        if _DIRECT and compiled is not None and not alignment % 16:
            if len(_compiled) >= _MOST_COMPILED:
                _compiled.clear()
            _compiled[key] = compiled.run, compiled.function, compiled.packed_metadata, driver.active.get_current_stream
        return
    run, function, metadata, current_stream = found
    run(
        *_grid(programs), 1, current_stream(device), function, metadata, None, None, None,
        *pointers, *sizes, *constants,
    )  # fmt: skip


def by_triton(
    kernel: Any,
    programs: int | tuple[int, int],
    tensors: tuple[Tensor | None, ...],
    sizes: tuple[int | float, ...],
    constants: tuple[Any, ...],
    warps: int,
    fuse_products: bool = True,
) -> Any:
    """As :func:`at_once`, in Triton's own way: for sizes that are others at every call.

    Returns:
        The compiled kernel; ``None`` in Triton's interpreter.
    """
    return kernel[_grid(programs)](*tensors, *sizes, *constants, num_warps=warps, enable_fp_fusion=fuse_products)


def _grid(programs: int | tuple[int, int]) -> tuple[int, int]:
    return (programs, 1) if isinstance(programs, int) else programs


def in_graph(
    kernel: Any,
    programs: int,
    tensors: tuple[Tensor | None, ...],
    sizes: tuple[int, ...],
    constants: tuple[Any, ...],
    warps: int,
) -> None:
    """Add to the graph that is traced, where a compiler sees what is read and written."""
    from torch.library import wrap_triton

    wrap_triton(with_warps(kernel, warps))[(programs,)](*tensors, *sizes, *constants)


@functools.cache
def with_warps(kernel: Any, warps: int) -> Any:
    """``kernel`` with this one configuration."""
    return triton.autotune([triton.Config({}, num_warps=warps)], key=[])(kernel)
