"""Recipes are plain data: names, dicts and objects give the same; bad settings are refused with the remedy."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lightning_fp8
from lightning_fp8.casts import SIZE_MULTIPLE, Cast
from lightning_fp8.formats import E4M3, E5M2, MAX_SCALE, compute_scale
from lightning_fp8.recipes import (
    GEMMS_OF,
    MAX_MARGIN,
    OPERANDS_OF,
    RECIPE_NAMES,
    ROLES,
    BlockwiseScaling,
    DelayedScaling,
    MXFP8Scaling,
    Recipe,
    RowwiseScaling,
    StaticScaling,
    TensorwiseScaling,
    get_recipe,
)
from lightning_fp8.scaling import ScalingState
from lightning_fp8.statistics import AMAX, SCALE, StatisticsTable

OBJECTS = [
    DelayedScaling(),
    DelayedScaling(7, "most_recent", 0.263, "e5m2_grad_weight", 0.5, 1e4, True, False),
    StaticScaling(),
    StaticScaling({"input": 2.0, "weight": 4.0, "grad_output": 1024.0}, "hybrid"),
    TensorwiseScaling("e4m3", 1.5, True),
    RowwiseScaling(),
    RowwiseScaling({"grad_weight.grad_output": "e5m2"}, True, False, 2.0),
    BlockwiseScaling("hybrid", True),
    BlockwiseScaling(tiled_inputs=True),
    MXFP8Scaling("hybrid"),
]


def formats(recipe: Recipe) -> dict[str, str]:
    """The format of every operand of every FP8 GEMM, found from the GEMMs' side."""
    found = {}
    for gemm, roles in OPERANDS_OF.items():
        casts = recipe.gemm_casts(gemm)
        for role, cast in zip(roles, casts or (), strict=casts is not None):
            found[f"{gemm}.{role}"] = str(cast.format)
    return found


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_every_name_gives_a_recipe(name: str) -> None:
    recipe = get_recipe(name)
    assert recipe == get_recipe({"name": name}) == get_recipe(recipe)
    assert get_recipe(recipe) is recipe
    assert type(recipe).__name__ in lightning_fp8.__all__


def test_a_mapping_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="mapping needs a 'name'"):
        get_recipe({"amax_history_len": 3})
    with pytest.raises(TypeError, match=r"amax_history_len.*'x'"):
        get_recipe({"amax_history_len": "x"})


def test_the_names_are_the_promised_ones() -> None:
    promised = {"delayed", "tensorwise", "rowwise", "rowwise_gw_hp", "blockwise", "mxfp8", "static"}
    assert {*promised, "tensorwise_pow2", "blockwise_tiled"} == set(RECIPE_NAMES)
    assert get_recipe("tensorwise_pow2") == TensorwiseScaling(power_of_two=True)
    assert get_recipe("blockwise_tiled") == BlockwiseScaling(tiled_inputs=True)
    assert get_recipe("rowwise_gw_hp") == RowwiseScaling(grad_weight_high_precision=True)
    assert get_recipe({"name": "rowwise_gw_hp", "margin": 1.0}) == RowwiseScaling(
        grad_weight_high_precision=True, margin=1.0
    )


@pytest.mark.parametrize("recipe", OBJECTS, ids=repr)
def test_to_dict_makes_an_equal_recipe(recipe: Recipe) -> None:
    plain = recipe.to_dict()
    assert get_recipe(plain) == recipe
    assert hash(get_recipe(plain)) == hash(recipe)
    assert get_recipe(plain).casts == recipe.casts
    assert copy.deepcopy(recipe) == recipe == pickle.loads(pickle.dumps(recipe))
    assert eval(repr(recipe), vars(lightning_fp8)) == recipe


def test_repr_tells_what_differs_from_the_default() -> None:
    assert repr(DelayedScaling()) == "DelayedScaling()"
    assert repr(DelayedScaling(margin=1.5, format="e4m3")) == "DelayedScaling(margin=1.5, format='e4m3')"


def test_equality_looks_at_every_setting() -> None:
    for i, left in enumerate(OBJECTS):
        assert [left == right for right in OBJECTS] == [i == j for j in range(len(OBJECTS))]
    base = DelayedScaling()
    others: list[dict[str, Any]] = [
        {"amax_history_len": 2},
        {"amax_compute_algo": "most_recent"},
        {"margin": 1.0},
        {"format": "e4m3"},
        {"smoothing": 0.1},
        {"max_scale": 2.0},
        {"power_of_two": True},
        {"reduce_amax": False},
    ]
    assert all(DelayedScaling(**other) != base for other in others)
    assert {key for other in others for key in other} == set(base.settings())
    assert base != "delayed" and TensorwiseScaling("e4m3") != RowwiseScaling("e4m3")


def test_equal_recipes_have_equal_hashes() -> None:
    pairs = [
        (DelayedScaling(margin=0), DelayedScaling(margin=0.0)),
        (
            StaticScaling({"input": 1.0, "weight": 2.0, "grad_output": 3.0}),
            StaticScaling({"grad_output": 3.0, "weight": 2.0, "input": 1.0}),
        ),
    ]
    for left, right in pairs:
        assert left == right and hash(left) == hash(right)


# --- formats of the operands -----------------------------------------------------------------------------------------

ALL_E4M3 = {f"{gemm}.{role}": "e4m3" for gemm, roles in OPERANDS_OF.items() for role in roles}


def test_gemms_and_roles_agree_with_each_other() -> None:
    for role in ROLES:
        assert {gemm for gemm, roles in OPERANDS_OF.items() if role in roles} == set(GEMMS_OF[role])


def test_named_formats() -> None:
    hybrid = {**ALL_E4M3, "grad_input.grad_output": "e5m2", "grad_weight.grad_output": "e5m2"}
    article = {**ALL_E4M3, "grad_weight.grad_output": "e5m2"}
    for make in (DelayedScaling, TensorwiseScaling, RowwiseScaling, BlockwiseScaling, MXFP8Scaling, StaticScaling):
        assert formats(make(format="hybrid")) == hybrid
        assert formats(make(format="e4m3")) == ALL_E4M3
        assert formats(make(format="e5m2_grad_weight")) == article
    assert formats(DelayedScaling()) == formats(TensorwiseScaling()) == hybrid
    for recipe in (RowwiseScaling(), BlockwiseScaling(), MXFP8Scaling()):
        assert formats(recipe) == ALL_E4M3


def test_formats_by_role_and_by_operand() -> None:
    assert formats(TensorwiseScaling({"input": "e5m2"})) == {
        **ALL_E4M3,
        "output.input": "e5m2",
        "grad_weight.input": "e5m2",
    }
    assert formats(TensorwiseScaling({"input": "e5m2", "grad_weight.input": "e4m3"})) == {
        **ALL_E4M3,
        "output.input": "e5m2",
    }
    casts = TensorwiseScaling("e5m2_grad_weight").casts["grad_output"]
    assert (casts.straight, casts.transposed) == (Cast(E4M3, "tensorwise"), Cast(E5M2, "tensorwise"))


@pytest.mark.parametrize(
    ("choice", "gemm"),
    [
        ({"input": "e5m2", "weight": "e5m2"}, "output"),
        ({"grad_output": "e5m2", "weight": "e5m2"}, "grad_input"),
        ({"grad_weight.grad_output": "e5m2", "grad_weight.input": "e5m2"}, "grad_weight"),
    ],
)
def test_e5m2_twice_is_refused(choice: dict[str, str], gemm: str) -> None:
    with pytest.raises(ValueError, match=f"{gemm} GEMM would multiply E5M2 by E5M2.*E4M3"):
        DelayedScaling(format=choice)


def test_granularities() -> None:
    def shape(recipe: Recipe) -> dict[str, tuple[str | None, str | None]]:
        return {
            role: tuple(c.granularity if c else None for c in (casts.straight, casts.transposed))  # type: ignore[misc]
            for role, casts in recipe.casts.items()
        }

    assert shape(RowwiseScaling()) == dict.fromkeys(ROLES, ("rowwise", "rowwise"))
    assert shape(get_recipe("rowwise_gw_hp")) == {
        "input": ("rowwise", None),
        "weight": ("rowwise", "tensorwise"),
        "grad_output": ("rowwise", None),
    }
    assert get_recipe("rowwise_gw_hp").gemm_casts("grad_weight") is None
    assert get_recipe("rowwise_gw_hp").gemm_casts("grad_input") is not None
    assert shape(BlockwiseScaling()) == {
        "input": ("1x128", "1x128"),
        "weight": ("128x128", "128x128"),
        "grad_output": ("1x128", "1x128"),
    }
    assert shape(get_recipe("blockwise_tiled")) == {**shape(BlockwiseScaling()), "input": ("1x128", "128x128")}
    assert shape(MXFP8Scaling()) == dict.fromkeys(ROLES, ("1x32", "1x32"))
    multiples = {name: get_recipe(name).size_multiple for name in RECIPE_NAMES}
    blocks = {"blockwise": 128, "blockwise_tiled": 128, "mxfp8": 32}
    assert multiples == {**dict.fromkeys(RECIPE_NAMES, 16), **blocks}
    assert RowwiseScaling().casts["input"].straight == Cast(E4M3, "rowwise", power_of_two=True)


def test_settings_reach_the_casts() -> None:
    cast = DelayedScaling(margin=1.5, power_of_two=True, max_scale=1e4).casts["weight"].transposed
    assert cast == Cast(E4M3, "tensorwise", True, 1.5, 1e4)
    assert DelayedScaling().casts["weight"].straight == Cast(E4M3, "tensorwise", max_scale=MAX_SCALE)


@given(
    st.builds(
        Cast,
        st.sampled_from([E4M3, E5M2]),
        st.sampled_from(sorted(SIZE_MULTIPLE)),
        st.booleans(),
        st.floats(0, 100, allow_nan=False),
        st.floats(2.0**-126, 2.0**126),
    )
)
def test_casts_survive_as_text(cast: Cast) -> None:
    assert Cast.parse(str(cast)) == cast


def test_no_cast_as_text() -> None:
    assert Cast.parse("") is None
    with pytest.raises(ValueError, match="choose one of tensorwise"):
        Cast.parse("e4m3/columnwise")


# --- bad settings ----------------------------------------------------------------------------------------------------

BAD: list[tuple[type[Recipe], dict[str, Any], str]] = [
    (DelayedScaling, {"amax_history_len": 0}, "amax_history_len must be at least 1, got 0"),
    (DelayedScaling, {"amax_history_len": -3}, "at least 1"),
    (DelayedScaling, {"amax_history_len": 10**30}, "amax_history_len must be a number that fits 64 bits"),
    (DelayedScaling, {"amax_compute_algo": "mean"}, "'max' or 'most_recent'"),
    (DelayedScaling, {"margin": -1.0}, "margin must be .* from 0 to 14, got -1.0"),
    (DelayedScaling, {"margin": math.nan}, "from 0 to 14"),
    (DelayedScaling, {"margin": math.inf}, "from 0 to 14"),
    (DelayedScaling, {"margin": 200}, "from 0 to 14, got 200"),
    (DelayedScaling, {"margin": 10**400}, "margin must be a number that fits a float"),
    (DelayedScaling, {"smoothing": 1.0}, r"smoothing must lie in \[0, 1\)"),
    (DelayedScaling, {"smoothing": -0.1}, r"\[0, 1\)"),
    (DelayedScaling, {"smoothing": math.nan}, r"\[0, 1\)"),
    (DelayedScaling, {"max_scale": 0.0}, "max_scale must"),
    (DelayedScaling, {"max_scale": -1.0}, "max_scale must"),
    (DelayedScaling, {"max_scale": math.inf}, "max_scale must"),
    (DelayedScaling, {"max_scale": math.nan}, "max_scale must"),
    (DelayedScaling, {"max_scale": 1e60}, "max_scale must"),
    (DelayedScaling, {"max_scale": 10**60}, "max_scale must"),
    (DelayedScaling, {"max_scale": 1e-60}, "max_scale must"),
    (DelayedScaling, {"format": "e5m2"}, "choose 'hybrid', 'e4m3', 'e5m2_grad_weight', or give a mapping"),
    (DelayedScaling, {"format": None}, "choose 'hybrid'"),
    (DelayedScaling, {"format": {"gradient": "e5m2"}}, "choose among .*grad_output"),
    (DelayedScaling, {"format": {3: "e5m2", "gradient": "e5m2"}}, "choose among .*grad_output"),
    (DelayedScaling, {"format": {"output.grad_output": "e5m2"}}, "choose among"),
    (DelayedScaling, {"format": {"input": "fp8"}}, "choose 'e4m3' or 'e5m2'"),
    (TensorwiseScaling, {"margin": -0.5}, "from 0 to 14"),
    (TensorwiseScaling, {"margin": 14.1}, "from 0 to 14, got 14.1"),
    (RowwiseScaling, {"margin": -0.5}, "from 0 to 14"),
    (RowwiseScaling, {"margin": 200}, "from 0 to 14"),
    (RowwiseScaling, {"format": "e3m4"}, "choose 'hybrid'"),
    (BlockwiseScaling, {"format": "e3m4"}, "choose 'hybrid'"),
    (MXFP8Scaling, {"format": "e3m4"}, "choose 'hybrid'"),
    (StaticScaling, {"scale": 0.0}, "positive"),
    (StaticScaling, {"scale": -2.0}, "positive"),
    (StaticScaling, {"scale": math.nan}, "positive"),
    (StaticScaling, {"scale": math.inf}, "positive"),
    (StaticScaling, {"scale": 1e300}, "between"),
    (StaticScaling, {"scale": 1e-300}, "between"),
    (StaticScaling, {"scale": {"input": 1.0}}, "one scale for each of input, weight, grad_output"),
    (StaticScaling, {"scale": {"input": 1.0, "weight": 1.0, "output": 1.0}}, "one scale for each"),
    (StaticScaling, {"scale": {"input": 1.0, 3: 1.0}}, "one scale for each"),
]


@pytest.mark.parametrize(("cls", "settings", "remedy"), BAD, ids=lambda value: str(value)[:40])
def test_bad_settings_name_the_remedy(cls: type[Recipe], settings: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        cls(**settings)
    with pytest.raises(ValueError, match=remedy):
        get_recipe({"name": cls.name, **settings})


@pytest.mark.parametrize(
    ("recipe", "error", "remedy"),
    [
        ("fp4", ValueError, "Unknown FP8 recipe 'fp4': choose one of delayed, tensorwise"),
        ("", ValueError, "choose one of delayed"),
        ({"amax_history_len": 3}, ValueError, "choose one of delayed"),
        ({"name": "delayed", "length": 3}, ValueError, "no setting length: choose among amax_history_len"),
        ({"name": "mxfp8", "margin": 1.0}, ValueError, "no setting margin: choose among format"),
        ({"name": "rowwise_gw_hp", "self": 1}, ValueError, "no setting self"),
        ({"name": "delayed", 3: 1, "length": 3}, ValueError, "no setting 3, length"),
        ({"name": ["delayed"]}, TypeError, r"name must be text, got \['delayed'\]"),
        (3, TypeError, "A recipe is a name, a mapping or a Recipe object, got int"),
        (None, TypeError, "got NoneType"),
        (DelayedScaling, TypeError, r"write DelayedScaling\(\)"),
    ],
)
def test_what_is_no_recipe(recipe: Any, error: type[Exception], remedy: str) -> None:
    with pytest.raises(error, match=remedy):
        get_recipe(recipe)


def test_a_mapping_given_is_not_changed() -> None:
    given_mapping = {"name": "rowwise_gw_hp", "margin": 1.0}
    get_recipe(given_mapping)
    assert given_mapping == {"name": "rowwise_gw_hp", "margin": 1.0}


def test_users_may_subclass() -> None:
    class Mine(DelayedScaling):
        def __init__(self, amax_history_len: int = 3) -> None:
            super().__init__(amax_history_len, margin=1.0)

    assert Mine().settings() == {"amax_history_len": 3}
    assert Mine() == Mine(3) != DelayedScaling(3, margin=1.0)


def test_a_class_path_that_a_command_line_left_as_it_was() -> None:
    left = {"class_path": "lightning_fp8.DelayedScaling", "init_args": {"amax_history_len": 4}}
    assert get_recipe(left) == DelayedScaling(amax_history_len=4)
    with pytest.raises(ValueError, match="'delayed' has no setting amax_history: choose among amax_history_len"):
        get_recipe({"class_path": "lightning_fp8.recipes.DelayedScaling", "init_args": {"amax_history": 4}})
    with pytest.raises(ValueError, match="Unknown FP8 recipe 'Delayed': choose one of"):
        get_recipe({"class_path": "lightning_fp8.Delayed"})


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("delayed", "amax_history_len", "16"),
        ("delayed", "amax_history_len", None),
        ("delayed", "amax_history_len", True),
        ("delayed", "amax_history_len", 1.0),
        ("delayed", "amax_history_len", math.inf),
        ("delayed", "margin", "0.5"),
        ("delayed", "smoothing", "half"),
        ("delayed", "max_scale", "1e4"),
        ("delayed", "power_of_two", "false"),
        ("delayed", "reduce_amax", "false"),
        ("tensorwise", "power_of_two", 1),
        ("rowwise", "power_of_two", None),
        ("rowwise", "grad_weight_high_precision", "no"),
        ("blockwise", "power_of_two", "false"),
        ("static", "scale", "1"),
    ],
)
def test_settings_of_another_type_are_refused(name: str, setting: str, value: Any) -> None:
    """From YAML anything may come, and the text "false" would count as true."""
    with pytest.raises(TypeError, match=f"{setting}.* must be .*got {value!r}"):
        get_recipe({"name": name, setting: value})


def test_a_format_of_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match="Unknown format"):
        DelayedScaling(format=["e4m3"])


def test_the_largest_margin_keeps_operands_within_the_formats() -> None:
    recipe = TensorwiseScaling("e4m3", margin=MAX_MARGIN)
    cast = recipe.casts["input"].straight
    assert cast is not None
    amax = torch.tensor([1e-30, 1.0, 1e30])
    codes = amax * compute_scale(amax, cast.format.max, cast.margin)
    assert (codes >= cast.format.smallest_normal).all() and (codes < 2 * cast.format.smallest_normal).all()


def test_ints_beyond_64_bits_are_numbers_like_others() -> None:
    """torch takes none, so that they failed at the first scale."""
    delayed, static = DelayedScaling(max_scale=10**30), StaticScaling(10**30)
    assert delayed == DelayedScaling(max_scale=1e30)
    for recipe in (delayed, static):
        state = ScalingState(recipe, StatisticsTable(["layer"]))
        state.table.data[..., AMAX] = 1e-35
        state.step()
        assert (state.table.data[..., SCALE] == torch.tensor(1e30)).all()
