from __future__ import annotations

import json

import pytest

from lightning_fp8.recovery.ladder import Ladder, LadderSettings


def climb(ladder: Ladder, times: int, **facts) -> list[str]:
    return [ladder.rejected(**facts).rung for _ in range(times)]


def test_whole_ladder_in_order_and_bounded():
    ladder = Ladder(LadderSettings(skips=2, fallbacks=1, rewinds=2))
    rungs = climb(ladder, 12, guilty=("a", "b"), can_rewind=True)
    s = "skip"
    assert rungs == [s, s, "fall_back", s, s, "rewind", s, s, "rewind", s, s, "stop"]


def test_rungs_can_be_switched_off():
    assert climb(Ladder(LadderSettings(skips=0, fallbacks=0, rewinds=0)), 1, guilty=("a",), can_rewind=True) == ["stop"]
    assert climb(Ladder(LadderSettings(skips=1, fallbacks=0)), 2, guilty=("a",), can_rewind=True) == ["skip", "rewind"]
    assert climb(Ladder(LadderSettings(skips=1, rewinds=0)), 2, can_rewind=True) == ["skip", "stop"]


def test_single_bad_batches_never_climb():
    ladder = Ladder(LadderSettings(skips=1))
    for _ in range(1000):
        assert ladder.rejected(guilty=("a",), can_rewind=True).rung == "skip"
        ladder.accepted()


def test_bad_weights_rewind_at_once():
    ladder = Ladder(LadderSettings(skips=5, rewinds=1))
    assert ladder.rejected(can_rewind=True, weights_bad=True).rung == "rewind"
    assert ladder.rejected(can_rewind=True, weights_bad=True).rung == "skip"
    assert Ladder(LadderSettings(skips=5)).rejected(can_rewind=False, weights_bad=True).rung == "skip"


def test_layers_come_back_and_back_off():
    ladder = Ladder(LadderSettings(skips=0, fallbacks=3, fallback_steps=2, fallback_backoff=3.0))
    action = ladder.rejected(("a",))
    assert (action.rung, action.layers, action.steps) == ("fall_back", ("a",), {"a": 2})
    assert ladder.accepted() == ()
    assert ladder.accepted() == ("a",)
    assert ladder.rejected(("a", "b")).steps == {"a": 6, "b": 2}
    assert [ladder.accepted() for _ in range(6)] == [(), ("b",), (), (), (), ("a",)]
    assert ladder.fallen == {}


def test_a_fallen_layer_is_not_asked_again():
    ladder = Ladder(LadderSettings(skips=0, fallbacks=3))
    assert ladder.rejected(("a",)).rung == "fall_back"
    assert ladder.rejected(("a",), can_rewind=True).rung == "rewind"


def test_calm_gives_the_rungs_back():
    ladder = Ladder(LadderSettings(skips=0, fallbacks=0, rewinds=1, calm=3))
    assert climb(ladder, 2, can_rewind=True) == ["rewind", "stop"]
    ladder.accepted(), ladder.accepted()
    assert climb(ladder, 1, can_rewind=True) == ["stop"]
    ladder.accepted(), ladder.accepted(), ladder.accepted()
    assert climb(ladder, 1, can_rewind=True) == ["rewind"]


def test_lasting_spikes_are_relearnt_once_but_never_nans():
    settings = LadderSettings(skips=1, fallbacks=0, rewinds=0)
    assert climb(Ladder(settings), 4, finite=True) == ["skip", "relearn", "skip", "stop"]
    assert climb(Ladder(settings), 2, finite=False) == ["skip", "stop"]
    assert climb(Ladder(LadderSettings(skips=1, fallbacks=0, rewinds=0, relearn=False)), 2, finite=True)[1] == "stop"


def test_state_is_plain_and_complete():
    settings = LadderSettings(skips=1, fallback_steps=5)
    ladder, facts = Ladder(settings), {"guilty": ("a", "b"), "can_rewind": True}
    climb(ladder, 3, **facts)
    ladder.accepted()
    twin = Ladder(settings)
    twin.load_state_dict(json.loads(json.dumps(ladder.state_dict())))
    for _ in range(10):
        assert ladder.rejected(**facts) == twin.rejected(**facts)
        assert ladder.story() == twin.story()
    assert [ladder.accepted() for _ in range(20)] == [twin.accepted() for _ in range(20)]


def test_story_tells_what_was_tried():
    ladder = Ladder(LadderSettings(skips=1, fallbacks=0, rewinds=1))
    climb(ladder, 4, can_rewind=True)
    assert ladder.story() == "4 bad steps in a row, skipped 2 times, rewound 1 time"


@pytest.mark.parametrize(
    "bad",
    [
        {"skips": -1},
        {"fallbacks": -1},
        {"rewinds": -2},
        {"fallback_steps": 0},
        {"calm": 0},
        {"fallback_backoff": 0.5},
        {"fallback_backoff": float("nan")},
    ],
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        LadderSettings(**bad)
