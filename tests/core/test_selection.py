"""Which layers become FP8, and the reasons given for the others."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, prune

from lightning_fp8 import LayerSelection
from lightning_fp8.recipes import BlockwiseScaling, DelayedScaling, MXFP8Scaling, Recipe
from lightning_fp8.selection import Decision, clean_name, find_blocks, find_head, linear_layers


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class GPT(nn.Module):
    def __init__(self, depth: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.lm_head = nn.Linear(32, 64, bias=False)  # Registered first: a head is found by its tie.
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(32)
        self.out = nn.Linear(32, 32)
        if tied:
            self.lm_head.weight = self.embed.weight


def decide(model: nn.Module, recipe: Recipe | None = None, **settings: Any) -> dict[str, Decision]:
    return {d.name: d for d in LayerSelection(**settings).decide(model, recipe or DelayedScaling())}


def taken(model: nn.Module, **settings: Any) -> set[str]:
    return {name for name, decision in decide(model, **settings).items() if decision.converted}


ALL = set(linear_layers(GPT()))
BLOCKS = {name for name in ALL if name.startswith("blocks.")}


def test_default_takes_all_but_the_head() -> None:
    assert taken(GPT()) == ALL - {"out"}
    assert taken(GPT(tied=True)) == ALL - {"lm_head"}
    assert decide(GPT())["out"].reason == "the final head stays in high precision (head=True converts it)"
    assert taken(GPT(), head=True) == ALL
    assert list(decide(GPT())) == list(linear_layers(GPT()))
    assert all(d.reason == "delayed" for d in decide(GPT(), head=True).values())


def test_a_single_layer_is_no_head() -> None:
    assert taken(nn.Linear(16, 16)) == {""}
    assert taken(nn.Sequential(nn.Linear(16, 16))) == {"0"}
    assert find_head(nn.Linear(16, 16), linear_layers(nn.Linear(16, 16))) is None


def test_patterns() -> None:
    model = GPT()
    assert taken(model, include=["*.mlp.*"]) == {n for n in BLOCKS if ".mlp." in n}
    assert taken(model, include=["*.mlp.*", "*.qkv"], exclude=["blocks.0.*"]) == {
        n for n in BLOCKS if (".mlp." in n or n.endswith("qkv")) and not n.startswith("blocks.0.")
    }
    assert taken(model, exclude=["blocks.*"]) == {"lm_head"}
    assert taken(model, include="lm_head") == {"lm_head"}  # type: ignore[arg-type]
    assert taken(model, include=["BLOCKS.*", "lm_head"][1:]) == {"lm_head"}
    reasons = decide(model, include=["*.mlp.*"], exclude=["blocks.0.mlp.0"])
    assert reasons["lm_head"].reason == "matches no include pattern"
    assert reasons["blocks.0.mlp.0"].reason == "matches an exclude pattern"


@pytest.mark.parametrize("settings", [{"include": ["*.moe.*"]}, {"exclude": ["head"]}, {"include": ["*", "Blocks.*"]}])
def test_patterns_that_match_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"matches no linear layer.*lm_head, blocks\.0\.attn\.qkv"):
        decide(GPT(), **settings)
    with pytest.raises(ValueError, match="none at all"):
        decide(nn.LayerNorm(4), **settings)


def test_filter() -> None:
    seen: list[tuple[nn.Module, str]] = []

    def wide(module: nn.Module, name: str) -> bool:
        seen.append((module, name))
        return isinstance(module, nn.Linear) and module.out_features > 32

    model = GPT()
    assert taken(model, filter=wide) == {n for n in ALL if linear_layers(model)[n].out_features > 32}
    assert all(linear_layers(model)[name] is module for module, name in seen)
    assert decide(model, filter=wide)["blocks.0.attn.proj"].reason == "left out by the filter"


def test_first_and_last_blocks() -> None:
    def blocks_of(names: set[str]) -> set[str]:
        return {name.split(".")[1] for name in names if name.startswith("blocks.")}

    assert blocks_of(taken(GPT(), keep_first_blocks=1)) == {"1", "2", "3"}
    assert blocks_of(taken(GPT(), keep_last_blocks=1)) == {"0", "1", "2"}
    assert blocks_of(taken(GPT(), keep_first_blocks=1, keep_last_blocks=2)) == {"1"}
    for settings in ({"keep_first_blocks": 9}, {"keep_last_blocks": 9}, {"keep_last_blocks": 5}):
        assert blocks_of(taken(GPT(), **settings)) == set()
    assert "first blocks" in decide(GPT(), keep_first_blocks=1)["blocks.0.mlp.0"].reason
    assert "last blocks" in decide(GPT(), keep_last_blocks=1)["blocks.3.mlp.0"].reason
    assert blocks_of(taken(GPT(12), keep_first_blocks=1)) == {str(i) for i in range(1, 12)}  # "1." is not "10.".


def test_blocks_are_found_in_the_middle_of_a_sequential() -> None:
    model = nn.Sequential(nn.Embedding(8, 32), nn.Sequential(*(Block() for _ in range(3))), nn.Linear(32, 32))
    assert find_blocks(model, linear_layers(model)) == ["1.0.", "1.1.", "1.2."]
    mlp = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 16))
    assert taken(mlp, keep_first_blocks=1) == {"2"}  # Where there are no blocks within, layers are the blocks,
    assert taken(mlp, keep_first_blocks=2) == set()  # and a ReLU is none.
    two = nn.ModuleList([nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))) for _ in range(2)])
    assert find_blocks(two, linear_layers(two)) == ["0.", "1."]


def test_keeping_blocks_of_a_model_without_any_is_refused() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    with pytest.raises(ValueError, match=r"no blocks.*exclude"):
        decide(Flat(), keep_first_blocks=1)


def test_minimum_size() -> None:
    assert taken(GPT(), min_size=32 * 96) == {n for n in BLOCKS if n.endswith(("qkv", "mlp.0", "mlp.2"))}
    assert decide(GPT(), min_size=10**9)["lm_head"].reason == "smaller than min_size=1000000000"


def test_an_empty_include_is_no_word_for_all() -> None:
    with pytest.raises(ValueError, match="include is empty"):
        LayerSelection(include=[])


@pytest.mark.parametrize("key", ["keep_first_blocks", "keep_last_blocks", "min_size"])
def test_negative_numbers_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} must be at least 0"):
        LayerSelection(**{key: -1})


@given(
    st.sets(st.sampled_from(["blocks.*", "*.qkv", "*.mlp.?", "blocks.[01].*", "lm_head", "*"]), max_size=3),
    st.sets(st.sampled_from(["blocks.2.*", "*.proj", "*0", "lm_*", "*.mlp.*"]), max_size=3),
    st.integers(0, 5),
    st.integers(0, 5),
    st.sampled_from([0, 1000, 4000]),
)
def test_settings_combine_as_sets(include: set[str], exclude: set[str], first: int, last: int, size: int) -> None:
    model = MODEL
    patterns = sorted(include) or None
    whole = taken(model, include=patterns, exclude=sorted(exclude), keep_first_blocks=first,
                  keep_last_blocks=last, min_size=size)  # fmt: skip
    parts = [
        taken(model, include=patterns),
        taken(model, exclude=sorted(exclude)),
        taken(model, keep_first_blocks=first),
        taken(model, keep_last_blocks=last),
        taken(model, min_size=size),
    ]
    assert whole == set.intersection(*parts)


MODEL = GPT()


# --- eligibility -----------------------------------------------------------------------------------------------------


class OwnForward(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


class Renamed(nn.Linear):
    pass


def replaced_forward() -> nn.Module:
    layer = nn.Linear(32, 32)
    layer.forward = lambda x: x  # type: ignore[method-assign, assignment]
    return layer


def pruned() -> nn.Module:
    layer = nn.Linear(32, 32)
    prune.l1_unstructured(layer, "weight", amount=0.5)
    return layer


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (OwnForward(32, 32), "OwnForward is a subclass of nn.Linear with a forward of its own"),
        (Renamed(32, 32), "Renamed is a subclass of nn.Linear"),
        (nn.MultiheadAttention(32, 2).out_proj, "NonDynamicallyQuantizableLinear is a subclass"),
        (parametrizations.weight_norm(nn.Linear(32, 32)), "parametrized or pruned"),
        (parametrizations.orthogonal(nn.Linear(32, 32)), "parametrized or pruned"),
        (nn.utils.spectral_norm(nn.Linear(32, 32)), "parametrized or pruned"),
        (pruned(), "parametrized or pruned"),
        (replaced_forward(), "replaced on the instance"),
        (nn.Linear(32, 24), "32 -> 24 are not multiples of 16"),
        (nn.Linear(24, 32), "24 -> 32 are not multiples of 16"),
        (nn.Linear(32, 0), "not multiples"),
        (nn.Linear(0, 32), "not multiples"),
        (nn.Linear(32, 32, dtype=torch.float64), "its weight is float64"),
        (nn.Linear(32, 32, dtype=torch.complex64), "its weight is complex64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_left_alone_and_why(layer: nn.Linear, reason: str) -> None:
    decisions = decide(nn.ModuleDict({"layer": layer, "other": nn.Linear(32, 32), "head": nn.Linear(32, 32)}))
    assert not decisions["layer"].converted
    assert reason in decisions["layer"].reason
    assert decisions["other"].converted


def test_old_weight_norm_is_left_alone() -> None:
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.Linear(32, 32))
    assert not decide(layer)[""].converted


@pytest.mark.parametrize(("recipe", "multiple"), [(MXFP8Scaling(), 32), (BlockwiseScaling(), 128)])
def test_sizes_are_the_recipes(recipe: Recipe, multiple: int) -> None:
    good, bad = nn.Linear(multiple, 2 * multiple), nn.Linear(multiple, multiple + 16)
    assert decide(good, recipe)[""].converted
    assert f"not multiples of {multiple}" in decide(bad, recipe)[""].reason


def test_shared_layers_appear_once() -> None:
    layer = nn.Linear(32, 32)
    model = nn.ModuleDict(
        {"a": nn.ModuleDict({"fc": layer}), "b": nn.ModuleDict({"fc": layer}), "head": nn.Linear(32, 16)}
    )
    assert list(decide(model)) == ["a.fc", "head"]


def test_wrappers_leave_no_trace_in_names() -> None:
    assert clean_name("blocks._orig_mod.0._checkpoint_wrapped_module.fc") == "blocks.0.fc"
    assert clean_name("_fsdp_wrapped_module.fc") == "fc"
    assert clean_name("fc._orig_mod") == "fc" and clean_name("_orig_mod") == ""
    model = nn.Sequential(torch.compile(Block()), nn.Linear(32, 32))
    assert set(linear_layers(model)) == {"0.attn.qkv", "0.attn.proj", "0.mlp.0", "0.mlp.2", "1"}
    assert taken(model, include=["0.mlp.*"]) == {"0.mlp.0", "0.mlp.2"}


def test_equality_and_text() -> None:
    assert LayerSelection(include=["a"]) == LayerSelection(include="a")  # type: ignore[arg-type]
    assert hash(LayerSelection(include=["a"])) == hash(LayerSelection(include=["a"]))
    assert LayerSelection(include=["a"]) != LayerSelection(exclude=["a"])
    assert LayerSelection(head=True) != LayerSelection() != "auto"
    assert repr(LayerSelection(exclude=["x.*"], min_size=3)) == "LayerSelection(exclude=('x.*',), min_size=3)"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("include", 3),
        ("exclude", [3]),
        ("filter", "*.mlp.*"),
        ("keep_first_blocks", "1"),
        ("keep_first_blocks", 1.0),
        ("keep_last_blocks", 0.5),
        ("keep_last_blocks", True),
        ("min_size", None),
        ("head", "false"),
    ],
)
def test_settings_of_another_type_are_refused(setting: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{setting} must be .*got {re.escape(repr(value))}"):
        LayerSelection(**{setting: value})
