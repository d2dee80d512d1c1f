"""Run as ``TRITON_INTERPRET=1 python -m tests.kernels.interpreted PART`` by ``test_interpreted.py``."""

from __future__ import annotations

import functools
import itertools
import sys
import warnings
from collections.abc import Callable
from unittest import mock

import torch

from lightning_fp8 import kernels, ops
from lightning_fp8.casts import Cast
from lightning_fp8.kernels import triton_cast
from lightning_fp8.kernels.launch import at_once
from lightning_fp8.kernels.scale_update import step_scales
from lightning_fp8.recipes import ROLES, get_recipe
from lightning_fp8.statistics import StatisticsTable
from tests.kernels.agreement import (
    E4M3,
    E5M2,
    FORESEEN,
    SETTINGS,
    UNSET,
    cast_again_nothing,
    casts,
    check_cast,
    check_foreseen,
    check_later,
    mixed_values,
    up_to,
)
from tests.kernels.updates import RECIPES, check_update

#: The interpreter's conversions to FP8 are off by up to a factor of two.
TOLERANCE = 0.51


def tensorwise() -> int:
    strided = mixed_values(20, 96)[:, :48]
    inf = mixed_values(16, 32)
    inf[3, 4] = torch.inf
    checks = [(strided, "hybrid", slot, True) for slot in (UNSET, (9.0, 3.0, 5.0, -1.0), (1e6, 0.0, 5.0, -1.0))]
    checks += [(strided, setting, UNSET, True) for setting in ("straight", "transposed")]
    checks += [(strided, "hybrid", UNSET, False), (strided, "transposed", None, True)]
    checks += [(mixed_values(132, 80), "hybrid", UNSET, stored) for stored in (True, False)]
    checks += [(x, "hybrid", UNSET, True) for x in (inf, torch.zeros(16, 16), torch.ones(1, 16).half())]
    for x, setting, slot, stored in checks:
        check_cast(x, *casts(setting, "tensorwise", "tensorwise"), slot, stored, TOLERANCE)
    return len(checks)


def foreseen() -> int:
    settings = [name for name in SETTINGS if name.startswith("foreseen")]
    inf = mixed_values(16, 32)
    inf[3, 4] = torch.inf
    matrices = [mixed_values(132, 80), mixed_values(20, 96)[:, :48], inf, torch.zeros(16, 16), torch.ones(1, 16).half()]
    slots = list(FORESEEN)
    checks = list(itertools.product(matrices, settings, (slots[0], slots[4], slots[-1])))
    checks += [(up_to(12.0, 132, 80), "foreseen", slot) for slot in slots]
    for x, setting, slot in checks:
        check_cast(x, *casts(setting, "tensorwise", "tensorwise"), slot, False, TOLERANCE)
    for setting, (slot, right) in itertools.product(settings, FORESEEN.items()):
        assert check_foreseen(up_to(12.0, 20, 48), setting, slot) is right, (setting, slot)
    for recompute in (False, True):
        foreseen_weight(recompute)
    return len(checks)


def foreseen_weight(recompute_weight_cast: bool) -> None:
    """The second step of a layer whose operands are those of the first reads none of them twice."""
    casts = ops.LinearCasts.of(get_recipe("tensorwise_pow2"), False, recompute_weight_cast=recompute_weight_cast)
    table = StatisticsTable(["layer"])
    slots = tuple(table.slot(0, role) for role in ROLES)
    x, weight, gradient = (mixed_values(32, 32, seed=seed).requires_grad_() for seed in range(3))
    outcomes = []
    for launch in (at_once, cast_again_nothing):
        cast = functools.partial(triton_cast.cast, launch=launch)
        with mock.patch.object(kernels, "cast", cast):
            y = ops.scaled_linear(x, weight, casts, slots)  # type: ignore[arg-type]
            outcomes.append([y, *torch.autograd.grad(y, (x, weight), gradient.detach())])
        table.finish_step()
    for got, want in zip(*outcomes, strict=True):
        assert torch.equal(got, want), recompute_weight_cast


def later() -> int:
    """A cast made in two, against one for both operands, in the interpreter too."""
    inf = mixed_values(16, 32)
    inf[3, 4] = torch.inf
    matrices = [mixed_values(132, 80), mixed_values(128, 256), mixed_values(20, 96)[:, :48], inf, torch.zeros(16, 16)]
    slots = (UNSET, (9.0, 3.0, 5.0, -1.0), (1e6, 0.0, 5.0, -1.0), (1.0, 3.0, 0.0, -1.0))
    for x, values in itertools.product(matrices, slots):
        check_later(x, *casts("hybrid", "tensorwise", "tensorwise"), values)
    checks = [(up_to(12.0, 20, 48), values) for values in FORESEEN] + [(inf, UNSET)]
    for x, values in checks:
        check_later(x, *casts("foreseen", "tensorwise", "tensorwise"), values, triton_cast.cast_foreseen)
    return len(matrices) * len(slots) + len(checks)


def rowwise() -> int:
    strided = mixed_values(20, 96)[:, :48]
    checks = [
        (strided, casts("hybrid", "rowwise", "rowwise"), UNSET),
        (strided, casts("hybrid", "rowwise", "tensorwise"), UNSET),
        (strided, casts("straight", "rowwise", "rowwise"), UNSET),
        (mixed_values(132, 144), casts("hybrid", "rowwise", "rowwise"), None),
        # Programs that go through several of the widest tiles, the last of them ragged.
        (mixed_values(100, 8192), casts("hybrid", "rowwise", "rowwise"), UNSET),
    ]
    for x, pair, slot in checks:
        check_cast(x, *pair, slot, codes_tolerance=TOLERANCE)
    return len(checks)


def blocks() -> int:
    x = mixed_values(140, 128)
    kinds = [("1x128", "1x128"), ("128x128", "128x128"), ("1x128", "128x128"), ("128x128", "1x128")]
    kinds += [("1x128", None), (None, "128x128")]
    checks = [(x, (straight and Cast(E4M3, straight), kind and Cast(E5M2, kind, True))) for straight, kind in kinds]
    checks += [(mixed_values(130, 256, dtype), checks[0][1]) for dtype in (torch.float16, torch.float32)]
    checks += [(mixed_values(20, 96)[:, :32], (Cast(E4M3, "1x32"), Cast(E4M3, "1x32")))]
    for other in ("rowwise", "tensorwise"):  # Beside the matrix lies what must not be read.
        matrix = torch.full((256, 128), torch.nan)
        matrix[:64] = mixed_values(64, 128)
        checks += [(matrix[:64], (Cast(E4M3, "1x128"), Cast(E4M3, other)))]
    for values, pair in checks:
        check_cast(values, *pair, UNSET, codes_tolerance=TOLERANCE)
    return len(checks)


def update() -> int:
    for recipe in RECIPES:
        check_update(step_scales, recipe, "cpu")
    return len(RECIPES)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # numpy's, for divisions by zero
    parts: dict[str, Callable[[], int]] = {
        f.__name__: f for f in (tensorwise, foreseen, later, rowwise, blocks, update)
    }
    print("checked", parts[sys.argv[1]]())
