"""Casts traced for a GPU that is not there: run as ``python -m tests.kernels.traced`` by ``test_graphs.py``.

Triton compiles for a described GPU without one, as far as its intermediate code, and fake tensors stand for memory.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import torch
import triton
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget

from lightning_fp8.casts import Cast
from lightning_fp8.formats import E4M3, E5M2
from lightning_fp8.kernels import triton_cast


def written_by(kernel: Any, arguments: dict[str, Any]) -> list[str]:
    # torch 2.13 has the one, torch 2.11 the other.
    if hasattr(triton_kernel_wrap, "identify_accessed_tensors"):
        access = triton_kernel_wrap.identify_accessed_tensors(kernel, arguments, {})
        return [dep.name for dep in access.read_writes.writes]
    return triton_kernel_wrap.identify_mutated_tensors(kernel, arguments, {})


def written(rows: int, straight: Cast | None, transposed: Cast | None, noted: bool, stored: bool) -> list[list[str]]:
    """What each kernel of a cast writes, as the compiler finds it."""
    found = []

    def look(kernel, programs, tensors, sizes, constants, warps) -> None:  # type: ignore[no-untyped-def]
        arguments = dict(zip(kernel.arg_names, (*tensors, *sizes, *constants), strict=True))
        found.append([kernel.__name__, *sorted(written_by(kernel, arguments))])
        # Inductor writes the kernel and all that it calls into a module of their own: it must stand by itself.
        source = user_defined_triton_kernel_transitive_closure_source_code(kernel)
        compile(source, kernel.__name__, "exec")
        assert "inf)" not in source and "nan)" not in source

    with FakeTensorMode():
        x = torch.empty(rows, 256, dtype=torch.bfloat16)
        slot = torch.empty(4) if noted else None
        triton_cast.cast(x, straight, transposed, slot, stored, look)
    return found


def main() -> None:
    """Prints what is written, as JSON."""
    target = mock.Mock()
    target.get_current_target.return_value = GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(target)
    tensor, other = Cast(E4M3, "tensorwise"), Cast(E5M2, "tensorwise", margin=1.0)
    power, other_power = (Cast(fmt, "tensorwise", power_of_two=True) for fmt in (E4M3, E5M2))
    row = Cast(E4M3, "rowwise")
    vector, square = Cast(E4M3, "1x128"), Cast(E4M3, "128x128")
    other_vector, small = Cast(E5M2, "1x128", power_of_two=True), Cast(E4M3, "1x32")
    cases = {
        "stored": (256, tensor, other, True, True),
        "stored, ragged": (200, tensor, tensor, True, True),
        "stored, straight": (256, tensor, None, True, True),
        "stored, transposed": (256, None, other, True, True),
        "foreseen": (256, power, other_power, True, False),
        "foreseen, ragged, transposed": (200, None, power, True, False),
        "tensorwise": (256, tensor, tensor, True, False),
        "tensorwise, unnoted": (256, tensor, other, False, False),
        "rowwise": (200, row, row, True, False),
        "rowwise, straight": (256, row, None, True, False),
        "mixed": (256, row, tensor, True, False),
        "1x128": (256, vector, other_vector, True, False),
        "1x128, ragged, straight": (200, vector, None, True, False),
        "1x128, transposed, unnoted": (256, None, vector, False, False),
        "128x128": (200, square, square, True, False),
        "128x128, unnoted": (256, square, square, False, False),
        "1x128 and 128x128": (256, vector, square, True, False),
        "1x32": (200, small, small, True, False),
    }
    json.dump({name: written(*case) for name, case in cases.items()}, sys.stdout)


if __name__ == "__main__":
    main()
