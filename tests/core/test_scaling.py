"""From amaxes to scales: history, cold start, what is ignored, and what ranks share."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fp8.host_copy import on_cpu
from lightning_fp8.recipes import DelayedScaling, Recipe, StaticScaling, TensorwiseScaling
from lightning_fp8.scaling import ScalingState, reduce_amax, with_gradients_times
from lightning_fp8.statistics import AMAX, LAST_AMAX, NOT_SEEN, SCALE, SCALE_TRANSPOSED, StatisticsTable

NAMES = ["a", "b"]


def make(recipe: Recipe | None = None, names: list[str] | None = None, **settings: Any) -> ScalingState:
    recipe = recipe or DelayedScaling(**settings)
    return ScalingState(recipe, StatisticsTable(NAMES if names is None else names))


def run(state: ScalingState, amax: float, layer: int = 0, role: int = 0) -> tuple[float, float]:
    """One step in which one operand has this amax; its next scales."""
    state.table.data[layer, role, AMAX] = amax
    state.step()
    return tuple(state.table.data[layer, role, [SCALE, SCALE_TRANSPOSED]].tolist())  # type: ignore[return-value]


def state_of(state: ScalingState) -> dict[str, Any]:
    """As a checkpoint holds it."""
    return on_cpu(state.live_state())


def test_roles_take_the_maximum_of_their_formats() -> None:
    state = make(format="e5m2_grad_weight")
    state.table.data[..., AMAX] = 2.0
    state.step()
    assert state.table.data[0, :, SCALE].tolist() == [224.0, 224.0, 224.0]
    assert state.table.data[1, :, SCALE_TRANSPOSED].tolist() == [224.0, 224.0, 28672.0]


class Oracle:
    """One operand's scale under delayed scaling, in Python numbers."""

    def __init__(self, recipe: DelayedScaling) -> None:
        self.recipe = recipe
        self.past: list[float] = []
        self.scale = 0.0

    def step(self, amax: float) -> None:
        if math.isnan(amax) or math.isinf(amax) or amax < 0:
            return
        recipe = self.recipe
        self.past = [*self.past, amax][-recipe.amax_history_len :]
        basis = max(self.past) if recipe.amax_compute_algo == "max" else amax
        if basis == 0:
            return
        new = min(max(448.0 / basis / 2**recipe.margin, 2.0**-126), 2.0**126)
        if recipe.smoothing and self.scale:
            new = recipe.smoothing * self.scale + (1 - recipe.smoothing) * new
        if recipe.max_scale:
            new = min(new, recipe.max_scale)
        self.scale = 2.0 ** math.floor(math.log2(new)) if recipe.power_of_two else new


amaxes = st.one_of(st.sampled_from([0.0, -1.0, math.nan, math.inf]), st.floats(2.0**-30, 2.0**30, width=32))


@settings(max_examples=60)
@given(
    recipe=st.builds(
        DelayedScaling,
        amax_history_len=st.integers(1, 5),
        amax_compute_algo=st.sampled_from(["max", "most_recent"]),
        margin=st.sampled_from([0.0, 0.263, 2.0]),
        smoothing=st.sampled_from([0.0, 0.5]),
        max_scale=st.sampled_from([None, 100.0]),
    ),
    sequences=st.lists(st.tuples(amaxes, amaxes), min_size=1, max_size=14),
)
def test_any_sequence_of_steps(recipe: DelayedScaling, sequences: list[tuple[float, float]]) -> None:
    state = make(recipe)
    oracles = [Oracle(recipe), Oracle(recipe)]
    for window in sequences:
        state.table.data[:, 0, AMAX] = torch.tensor(window)
        state.step()
        for oracle, amax in zip(oracles, window, strict=True):
            oracle.step(amax)
        expected = [oracle.scale for oracle in oracles]
        np.testing.assert_allclose(state.table.data[:, 0, SCALE].numpy(), expected, rtol=1e-6)
        assert state.table.amax.eq(NOT_SEEN).all()
    assert state.table.data[:, 1:, SCALE].eq(0).all()  # Never seen: still unset.


def test_maximum_of_the_window_leaves_with_its_step() -> None:
    state = make(amax_history_len=3)
    scales = [run(state, amax)[0] for amax in (1.0, 4.0, 2.0, 1.0, 1.0, 0.5)]
    assert scales == [448.0, 112.0, 112.0, 112.0, 224.0, 448.0]


def test_most_recent() -> None:
    state = make(amax_history_len=3, amax_compute_algo="most_recent")
    assert [run(state, amax)[0] for amax in (1.0, 4.0, 2.0, 0.0)] == [448.0, 112.0, 224.0, 224.0]


def test_layers_that_did_not_run_keep_their_history() -> None:
    state = make(amax_history_len=2)
    run(state, 8.0, layer=0)
    run(state, 1.0, layer=1)
    kept = state.history.values[0].clone()  # type: ignore[union-attr]
    for _ in range(5):
        run(state, 1.0, layer=1)
    assert torch.equal(state.history.values[0], kept)  # type: ignore[union-attr]
    assert state.table.data[0, 0, SCALE] == 56.0
    assert state.table.data[0, 0, LAST_AMAX] == 8.0
    assert run(state, 1.0, layer=0)[0] == 56.0  # Two steps of its own long, whatever the others did.
    assert run(state, 1.0, layer=0)[0] == 448.0


def test_zeros_tell_nothing() -> None:
    state = make(amax_history_len=2)
    assert run(state, 0.0) == (0.0, 0.0)  # Unset: the first telling data decide.
    assert run(state, 2.0) == (224.0, 224.0)
    assert [run(state, 0.0)[0] for _ in range(4)] == [224.0] * 4
    assert run(state, 1.0)[0] == 448.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_amaxes_are_kept_out_and_shown(bad: float) -> None:
    state = make(amax_history_len=2)
    run(state, 2.0)
    before = copy.deepcopy(state.history.live_state())  # type: ignore[union-attr]
    assert run(state, bad) == (224.0, 224.0)
    assert all(torch.equal(value, before[key]) for key, value in state.history.live_state().items())  # type: ignore[union-attr]
    assert not state.table.data[0, 0, LAST_AMAX].isfinite()


def test_smoothing_cap_and_power_of_two() -> None:
    state = make(amax_history_len=1, smoothing=0.5)
    assert [run(state, amax)[0] for amax in (1.0, 4.0, 4.0)] == [448.0, 280.0, 196.0]
    state = make(amax_history_len=1, max_scale=300.0)
    assert [run(state, amax)[0] for amax in (1.0, 4.0)] == [300.0, 112.0]
    state = make(amax_history_len=1, max_scale=300.0, power_of_two=True)
    assert [run(state, amax)[0] for amax in (1.0, 4.0)] == [256.0, 64.0]
    state = make(amax_history_len=1, margin=1.0)
    assert run(state, 1.0)[0] == 224.0


def test_tiny_amaxes_give_finite_scales() -> None:
    state = make()
    scale, _ = run(state, 1e-45)
    assert math.isfinite(scale) and math.isfinite(1 / scale)


def test_static_scales_never_move() -> None:
    recipe = StaticScaling({"input": 2.0, "weight": 4.0, "grad_output": 8.0})
    state = make(recipe)
    for _ in range(2):
        assert state.table.data[0, :, SCALE].tolist() == state.table.data[1, :, SCALE_TRANSPOSED].tolist() == [2, 4, 8]
        state.table.data[..., AMAX] = 100.0
        state.step()
        state.discard()
    assert state.history is None and state.table.data[..., LAST_AMAX].eq(100.0).all()


def test_scales_from_the_data_leave_only_amaxes() -> None:
    state = make(TensorwiseScaling())
    assert run(state, 3.0) == (0.0, 0.0)
    assert state.history is None and state.table.data[0, 0, LAST_AMAX] == 3.0


# --- rejected steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rejected", [True, torch.tensor(True)], ids=["bool", "tensor"])
def test_a_rejected_step_leaves_no_trace(rejected: Any) -> None:
    state = make(amax_history_len=3)
    run(state, 2.0)
    before = state_of(state)
    state.table.data[0, 0, AMAX] = 1000.0
    # Layer b ran for the first time: its scale came from the rejected step's data.
    state.table.data[1, 0] = torch.tensor([1000.0, 0.448, 0.448, NOT_SEEN])
    state.discard(rejected)
    state.step()
    after = state_of(state)
    assert torch.equal(after["table"]["data"], before["table"]["data"])
    assert torch.equal(after["history"], before["history"]) and torch.equal(after["position"], before["position"])


@pytest.mark.parametrize("rejected", [False, torch.tensor(False)], ids=["bool", "tensor"])
def test_an_accepted_step_is_kept(rejected: Any) -> None:
    state = make()
    state.table.data[1, 0] = torch.tensor([4.0, 112.0, 112.0, NOT_SEEN])
    before = state.table.data.clone()
    state.discard(rejected)
    assert torch.equal(state.table.data, before)


# --- state -----------------------------------------------------------------------------------------------------------


def assert_plain(value: Any) -> None:
    """What torch.load takes with weights_only=True."""
    if isinstance(value, dict):
        for key, item in value.items():
            assert isinstance(key, str)
            assert_plain(item)
    elif isinstance(value, list):
        for item in value:
            assert_plain(item)
    else:
        assert value is None or type(value) in (str, int, float, bool, torch.Tensor)


def test_state_dict_round_trip(tmp_path: Path) -> None:
    state, other = (
        make(amax_history_len=2, format={"grad_output": "e5m2"}),
        make(amax_history_len=2, format={"grad_output": "e5m2"}),
    )
    for amax in (3.0, 2.0, 1.0):
        run(state, amax)
    state.table.data[1, 2, AMAX] = 7.0  # In mid-window.
    saved = state_of(state)
    assert_plain(saved)
    torch.save(saved, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert other.load_state_dict(loaded) == []
    state.table.data.add_(1)  # The saved state is a copy.
    assert torch.equal(other.table.data, saved["table"]["data"])
    state.table.data.sub_(1)
    for both in (state, other):
        both.step()
    one, two = state_of(state), state_of(other)
    assert torch.equal(one["table"]["data"], two["table"]["data"])
    assert torch.equal(one["history"], two["history"]) and torch.equal(one["position"], two["position"])


def test_layers_are_matched_by_name() -> None:
    state = make(names=["a", "b"], amax_history_len=2)
    run(state, 2.0, layer=0)
    run(state, 4.0, layer=1)
    other = make(names=["new", "b", "a"], amax_history_len=2)
    assert other.load_state_dict(state_of(state)) == ["new"]
    assert other.table.data[:, 0, SCALE].tolist() == [0.0, 112.0, 224.0]
    assert other.history.values[:, 0, 0].tolist() == [0.0, 4.0, 2.0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "recipe", [DelayedScaling(3), DelayedScaling(margin=1.0), StaticScaling(), TensorwiseScaling()]
)
def test_another_recipes_state_is_refused_and_changes_nothing(recipe: Recipe) -> None:
    state = make()
    run(state, 2.0)
    before = state.table.data.clone()
    with pytest.raises(ValueError, match="belongs to the recipe"):
        state.load_state_dict(state_of(make(recipe)))
    assert torch.equal(state.table.data, before)


def test_a_state_that_knows_fewer_settings_is_the_same_recipes() -> None:
    """An earlier build may have written it."""
    state = make()
    run(state, 2.0)
    saved = state_of(state)
    del saved["recipe"]["smoothing"]
    other = make()
    assert other.load_state_dict(saved) == []
    assert torch.equal(other.table.data, state.table.data)
    recipe = DelayedScaling(margin=1.0)
    del recipe.smoothing
    assert pickle.loads(pickle.dumps(recipe)) == DelayedScaling(margin=1.0)


def test_copies_are_independent() -> None:
    state = make(amax_history_len=2)
    run(state, 2.0)
    for twin in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        run(twin, 8.0)
        assert twin.table.data[0, 0, SCALE] == 56.0
        assert state.table.data[0, 0, SCALE] == 224.0


def test_table_names_no_layers() -> None:
    state = make(names=[])
    state.step()
    state.discard()
    assert state.load_state_dict(state_of(state)) == []


@pytest.mark.parametrize("settings", [{}, {"smoothing": 0.5}, {"power_of_two": True}])
def test_a_state_follows_gradients_of_another_size(settings: dict[str, Any]) -> None:
    """As if they had always been of that size; of the rest nothing changes, and the state given stays as it is."""
    small, large = make(amax_history_len=3, **settings), make(amax_history_len=3, **settings)
    for state, factor in ((small, 1.0), (large, 2.0**16)):
        for amax in (3.0, 0.7):
            run(state, amax)
            run(state, amax * factor, role=2)
        state.table.data[0, 2, AMAX] = 5.0 * factor  # Of the window that is open.
    before = state_of(small)
    for target, factor, source in ((large, 2.0**16, small), (small, 2.0**-16, large)):
        changed, expected = with_gradients_times(factor, state_of(source)), state_of(target)
        assert torch.equal(changed["table"]["data"], expected["table"]["data"])
        assert torch.equal(changed["history"], expected["history"])
        assert torch.equal(changed["position"], expected["position"])
    assert torch.equal(small.table.data, before["table"]["data"])


def test_scales_that_follow_stay_within_the_recipe() -> None:
    state = make(max_scale=100.0)
    run(state, 2.0**20, role=2)
    state.table.data[1, 2, LAST_AMAX] = math.inf
    data = with_gradients_times(2.0**-20, state_of(state))["table"]["data"]
    assert data[0, 2, [SCALE, SCALE_TRANSPOSED]].tolist() == [100.0, 100.0]
    assert data[1, 2].tolist() == [NOT_SEEN, 0.0, 0.0, math.inf]
    constant = make(StaticScaling(8.0))
    constant.table.data[0, 2, LAST_AMAX] = 2.0
    assert with_gradients_times(4.0, state_of(constant))["table"]["data"][0, 2].tolist() == [NOT_SEEN, 8.0, 8.0, 8.0]


# --- ranks -----------------------------------------------------------------------------------------------------------


def rank_main(rank: int, store: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        found: dict[str, Any] = {}
        amax = torch.tensor([[1.0, NOT_SEEN, NOT_SEEN], [math.nan, 2.0, 5.0]] if rank == 0 else
                            [[3.0, NOT_SEEN, 4.0], [1.0, math.inf, NOT_SEEN]])  # fmt: skip
        table = torch.zeros(2, 3, 4)
        table[..., AMAX] = amax
        reduce_amax(table[..., AMAX])
        found["reduced"] = table[..., AMAX].tolist()
        found["rest"] = table[..., 1:].abs().sum().item()

        shared = make(amax_history_len=2)
        run(shared, [2.0, 8.0][rank])
        found["shared"] = run(shared, [NOT_SEEN, 4.0][rank])[0]
        # Ranks whose layer took its first scale from different data agree after the step.
        found["tables_agree"] = shared.table.data[..., SCALE].tolist()
        smooth = make(amax_history_len=2, smoothing=0.5)
        smooth.table.data[0, 0, SCALE] = [224.0, 56.0][rank]  # Each from its own data, in the first step.
        found["smooth"] = [run(smooth, [2.0, 8.0][rank])[0], run(smooth, [1.0, 4.0][rank])[0]]
        alone = make(amax_history_len=2, reduce_amax=False)
        found["alone"] = run(alone, [2.0, 8.0][rank])[0]

        groups = [dist.new_group([r]) for r in range(2)]
        own = make(amax_history_len=2)
        own.table.data[0, 0, AMAX] = [2.0, 8.0][rank]
        own.step(groups[rank])
        found["group"] = own.table.data[0, 0, SCALE].item()
        torch.save(found, f"{results}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_ranks_share_their_amaxes(tmp_path: Path) -> None:
    # Forked: there is no backward and no large tensor here, and importing everything anew takes long.
    mp.start_processes(rank_main, (str(tmp_path / "store"), str(tmp_path)), nprocs=2, start_method="fork")
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    # A NaN on one rank is an Inf on all; what nobody saw stays not seen.
    expected = [[3.0, NOT_SEEN, 4.0], [math.inf, math.inf, 5.0]]
    assert [r["reduced"] for r in ranks] == [expected, expected]
    assert [r["rest"] for r in ranks] == [0.0, 0.0]
    assert [r["shared"] for r in ranks] == [56.0, 56.0]
    assert ranks[0]["tables_agree"] == ranks[1]["tables_agree"]
    assert [r["smooth"] for r in ranks] == [[56.0, 56.0]] * 2
    assert [r["alone"] for r in ranks] == [224.0, 56.0]
    assert [r["group"] for r in ranks] == [224.0, 56.0]


def test_without_ranks_nothing_is_reduced() -> None:
    amax = torch.tensor([math.nan, 1.0])
    reduce_amax(amax)
    assert amax[0].isnan()
