"""Operands of backward that backward casts itself, without a GPU."""

from __future__ import annotations

import json

import pytest
import torch

import lightning_fp8
from lightning_fp8.compiling import module_arguments
from tests.kernels.test_folding import run

pytest.importorskip("triton")


def test_what_is_cast_in_backward_is_kept_no_longer() -> None:
    """By case: what is kept no longer, what is instead, the further casts of backward and how many arrays they read.

    Forward launches the same kernels as before, and given weights are kept anyway.
    """
    found = json.loads(run("tests.kernels.recomputed_graphs", "graphs"))

    def fp8(**counts: int) -> dict[str, int]:
        return {f"float8_e4m3fn {elements[1:]}": count for elements, count in counts.items()}

    plain, computed = "cast_later 1", "cast_later of values"  # A folded norm reads its input, statistics and weight.
    weights = {"given 131072": 2, "given 65536": 1, "given 262144": 1}
    for name in ("block", "foreseen"):
        assert found.pop(f"{name} cheap") == [
            fp8(_32768=3, _131072=2, _65536=1, _262144=1), weights, {plain: 5, f"{computed} 3": 2},
        ]  # fmt: skip
        # The product of the gated layer too: then nothing is kept in FP8.
        assert found.pop(f"{name} all") == [
            fp8(_32768=3, _131072=2, _65536=2, _262144=1), weights, {plain: 5, f"{computed} 3": 2, f"{computed} 1": 1},
        ]  # fmt: skip
    # Three layers share a norm's output. What gate and up share would have to be kept in 16 bits instead.
    assert found.pop("separate projections cheap") == [
        fp8(_32768=3, _65536=6), {"given 65536": 6}, {plain: 6, f"{computed} 3": 3},
    ]  # fmt: skip
    assert found.pop("separate projections all") == [
        fp8(_32768=4, _65536=6), {"given 65536": 6}, {plain: 6, f"{computed} 3": 3, f"{computed} 2": 1},
    ]  # fmt: skip
    # An activation, the input itself, and an output, which also tells the sign that a mask was kept for; what is
    # computed from two matrices only where all is; what would have to be kept for this alone never.
    cheap, all_ = found.pop("functions cheap"), found.pop("functions all")
    assert cheap[:2] == [{**fp8(_32768=3, _65536=5), "bool 32768": 1}, {"given 65536": 5}]
    assert all_[:2] == [{**fp8(_32768=4, _65536=5), "bool 32768": 1}, {"given 65536": 5}]
    # Activation checkpointing recomputes the casts as it recomputes the rest; torch 2.11 does not mark Triton kernels,
    # so that the weight's is ours.
    marked = tuple(map(int, torch.__version__.split(".")[:2])) > (2, 11)
    checkpointed = [{}, {}, {}] if marked else [fp8(_65536=1), {"given 65536": 1}, {plain: 1}]
    assert [found.pop(f"checkpointed {setting}") for setting in ("cheap", "all")] == [checkpointed] * 2
    # Rows and columns that tiles do not divide are cast from what Inductor computes.
    ragged = [
        fp8(_53248=1, _65536=1, _33280=1, _40960=1), {"given 65536": 1, "given 40960": 1}, {plain: 4},
    ]  # fmt: skip
    assert found == {"ragged cheap": ragged, "ragged all": ragged}


def test_training_does_not_change() -> None:
    """Losses, gradients, scales: the same bits; unset scales and two forwards before a backward among the cases."""
    assert int(run("tests.kernels.recomputed_graphs", "training")) == 2 * 3 * (2 + 6 + 1)


def test_options_name_the_pass() -> None:
    name = "joint_custom_post_pass"
    assert name not in lightning_fp8.compile_options(recompute="none")
    cheap, everything = (lightning_fp8.compile_options(recompute=setting) for setting in ("cheap", "all"))  # type: ignore[arg-type]
    assert cheap[name] is not everything[name] and cheap[name].uuid() != everything[name].uuid()
    # The compiler compares options by value: blocks that were compiled one after the other share their graphs.
    assert cheap == lightning_fp8.compile_options(recompute="cheap")
    assert module_arguments({"recompute": "all", "fullgraph": True}) == {"fullgraph": True, "options": everything}
    with pytest.raises(ValueError, match="'none', 'cheap', 'all'"):
        lightning_fp8.compile_options(recompute="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="joint_custom_pre_pass"):
        lightning_fp8.compile(abs, options={name: cheap[name]}, recompute="all")
    assert lightning_fp8.compile_options(options={name: cheap[name]})[name] is cheap[name], "no pass of ours goes there"
