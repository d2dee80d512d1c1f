"""Backends by name, the choice of "auto", FBGEMM's conditions, and the table of what runs where."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_fp8 import FP8Precision
from lightning_fp8.backends import (
    BACKEND_NAMES,
    NativeBackend,
    Support,
    TorchaoBackend,
    TransformerEngineBackend,
    get_backend,
    resolve_backend,
)
from lightning_fp8.backends.registry import choose
from lightning_fp8.kernels import fbgemm
from lightning_fp8.kernels.capability import Hardware
from lightning_fp8.recipes import RECIPE_NAMES, TensorwiseScaling, get_recipe
from lightning_fp8.support_table import GENERATIONS, markdown, support_by_generation, support_here
from tests.backends.models import batch, convert

CPU = torch.device("cpu")
HOPPER = Hardware("cuda", (9, 0), (13, 0))


def test_names() -> None:
    assert BACKEND_NAMES == ("auto", "native", "torchao", "transformer_engine")
    assert get_backend("torchao") == TorchaoBackend()
    assert get_backend("transformer_engine") == TransformerEngineBackend() != TransformerEngineBackend(fp8_dpa=True)
    backend = NativeBackend()
    assert get_backend(backend) is backend and get_backend("native") == backend
    choice = resolve_backend(backend, get_recipe("delayed"), CPU)
    assert choice.backend is backend and choice.support.kind == "emulated" and choice.support.reason
    assert eval(repr(TransformerEngineBackend(fuse=[("a", "b")]))).fuse == (("a", "b"),)
    with pytest.raises(ValueError, match="transformer_engine"):
        get_backend("apex")
    with pytest.raises(TypeError):
        get_backend(3)  # type: ignore[arg-type]


def test_auto_is_native_where_that_is_fastest() -> None:
    choice = choose(Support("native", ""), iter(()))
    assert choice.backend == NativeBackend() and "fastest" in choice.reason


def test_auto_prefers_a_library_over_emulation() -> None:
    others = [(TorchaoBackend(), Support("emulated", "")), (TransformerEngineBackend(), Support("native", ""))]
    choice = choose(Support("emulated", "1x128 scales need Hopper"), others)
    assert choice.backend == TransformerEngineBackend() and "Hopper" in choice.reason
    assert choose(Support("emulated", "why"), others[:1]).backend == NativeBackend()


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_auto_on_the_cpu(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(backend: object, recipe: object) -> None:
        raise AssertionError("A library that would emulate as well need not be imported.")

    monkeypatch.setattr(TorchaoBackend, "why_not_installed", look)
    assert resolve_backend("auto", get_recipe(recipe), CPU).backend == NativeBackend()


def test_a_preset_is_called_by_its_name() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    summary = convert(model, "rowwise_gw_hp", "native").summary()
    assert "FP8      rowwise_gw_hp" in summary
    assert get_recipe({"name": "rowwise_gw_hp", "margin": 1}).label == "rowwise_gw_hp"
    assert {name: get_recipe(name).label for name in RECIPE_NAMES} == {name: name for name in RECIPE_NAMES}
    with pytest.raises(ValueError, match="cannot run the rowwise_gw_hp recipe"):
        convert(model, "rowwise_gw_hp", "transformer_engine")


# --- mistakes are told when settings are given


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what only a CPU machine lacks")
@pytest.mark.parametrize(
    ("backend", "recipe", "words"),
    [
        ("transformer_engine", "delayed", "CUDA"),
        ("transformer_engine", "rowwise", "no such recipe"),
        ("torchao", "delayed", "from the data"),
        (NativeBackend(gemm="fbgemm"), "rowwise", "gemm='torch'"),
    ],
)
def test_refused_at_construction(backend: str, recipe: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        FP8Precision(recipe, backend=backend)
    assert "\n" not in str(caught.value)


def test_unknown_gemm() -> None:
    with pytest.raises(ValueError, match="fbgemm"):
        NativeBackend(gemm="cutlass")  # type: ignore[arg-type]


def test_a_library_built_for_another_torch_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformer_engine", "fbgemm_gpu"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(
            "raise ImportError('undefined symbol: _ZN3c10\\n  a page of advice')"
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    for against in (
        TransformerEngineBackend().why_not_installed(get_recipe("delayed")),
        NativeBackend(gemm="fbgemm").why_not_installed(get_recipe("rowwise")),
    ):
        assert against is not None and "does not load (undefined symbol: _ZN3c10)" in against
        assert "install" in against and "\n" not in against


# --- FBGEMM


def test_fbgemm_conditions() -> None:
    for name in RECIPE_NAMES:
        against = fbgemm.why_not(get_recipe(name), HOPPER)
        assert (against is None) is (name != "mxfp8"), name
        assert "Hopper" in str(fbgemm.why_not(get_recipe(name), Hardware("cuda", (10, 0), (13, 0))))
    no_e4m3_pair = TensorwiseScaling(format={"input": "e5m2", "grad_output": "e4m3"})
    assert fbgemm.why_not(no_e4m3_pair, HOPPER) is None  # The input gradient is one.
    assert "pip install" in str(fbgemm.why_not_installed())


def test_products_that_fbgemm_does_not_take_are_torchs() -> None:
    torch.manual_seed(0)
    ours, native = nn.Linear(32, 32), nn.Linear(32, 32)
    native.load_state_dict(ours.state_dict())

    class Anywhere(NativeBackend):
        def support_on(self, recipe: object, hardware: Hardware) -> Support:
            return Support("emulated", "on the CPU every product is torch's")

        def why_not_installed(self, recipe: object) -> None:
            return None

    convert(ours, "delayed", Anywhere(gemm="fbgemm")), convert(native, "delayed", "native")
    assert ours.fp8.training_casts.gemm == "fbgemm"
    assert torch.equal(ours(batch(0)), native(batch(0)))


# --- the table


def test_table_in_the_docs_is_generated() -> None:
    assert markdown() in (Path(__file__).parents[2] / "docs" / "backends.md").read_text()


def test_table_says_what_is_known_of_hopper() -> None:
    kinds = {
        (row.backend, row.recipe): dict(zip(GENERATIONS, (s.kind for s in row.support), strict=True))
        for row in support_by_generation()
    }
    assert kinds["native", "delayed"]["Hopper (9.0)"] == "native"
    assert kinds["native", "blockwise"]["Blackwell (10.0)"] == "emulated"
    assert kinds["torchao", "rowwise"]["CPU"] == "emulated"
    assert kinds["transformer_engine", "rowwise"]["Hopper (9.0)"] == "refused"
    assert all(kind["CPU"] != "native" for kind in kinds.values())


def test_table_of_this_machine() -> None:
    rows = {(row.backend, row.recipe): row.support[0] for row in support_here("cpu")}
    assert rows["native", "mxfp8"].kind == "emulated"
    assert rows["transformer_engine", "delayed"].kind == "refused"
    assert all(support.reason for support in rows.values())
