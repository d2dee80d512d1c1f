"""What to do about a rejected step: skip, fall back, rewind, stop. Pure logic on plain values.

The ladder is climbed one rung at a time. Each rung gives the run ``skips`` more rejections in a row to find its feet;
``calm`` accepted steps in a row lead back to the ground::

    skip ... skip -> fall back -> skip ... skip -> rewind -> skip ... skip -> rewind -> ... -> stop
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_fp8.checks import check_flag, check_number

Rung = Literal["skip", "fall_back", "rewind", "relearn", "stop"]


@dataclass(frozen=True)
class LadderSettings:
    """Bounds of each rung; 0 switches it off.

    Attributes:
        skips: rejections in a row before the next rung is taken.
        fallbacks: times an episode may put guilty layers into bf16.
        fallback_steps: accepted steps that a layer then stays there.
        fallback_backoff: that time is multiplied by this with every further fallback of the same layer.
        rewinds: times an episode may go back to the last good state.
        relearn: spikes that outlast all that are taken for the curve's new shape, once an episode: the statistics begin
            anew. Non-finite steps are not.
        calm: accepted steps in a row that end an episode.

    Raises:
        TypeError: where a setting is of the wrong type.
        ValueError: where one makes no sense.
    """

    skips: int = 3
    fallbacks: int = 2
    fallback_steps: int = 200
    fallback_backoff: float = 2.0
    rewinds: int = 2
    relearn: bool = True
    calm: int = 100

    def __post_init__(self) -> None:
        check_number(whole=True, least=0, skips=self.skips, fallbacks=self.fallbacks, rewinds=self.rewinds)
        check_number(whole=True, least=1, fallback_steps=self.fallback_steps, calm=self.calm)
        check_number(fallback_backoff=self.fallback_backoff)
        check_flag(relearn=self.relearn)
        if not 1 <= self.fallback_backoff < math.inf:
            raise ValueError(f"fallback_backoff is {self.fallback_backoff}: give at least 1, to wait longer each time.")


@dataclass(frozen=True)
class Action:
    """What to do now.

    Attributes:
        rung: which.
        layers: to put into bf16 (``fall_back``).
        steps: for how many accepted steps, by layer.
    """

    rung: Rung
    layers: tuple[str, ...] = ()
    steps: dict[str, int] = field(default_factory=dict)


class Ladder:
    """Where a run stands.

    Args:
        settings: bounds of each rung.

    Attributes:
        in_a_row: rejections since the last accepted step.
        fallen: layers in bf16, with the accepted steps they still stay there.
    """

    def __init__(self, settings: LadderSettings) -> None:
        self.settings = settings
        self.in_a_row = 0
        self.fallen: dict[str, int] = {}
        self._falls: dict[str, int] = {}
        self._since_rung = 0
        self._calm = 0
        self._taken = {"skip": 0, "fall_back": 0, "rewind": 0, "relearn": 0}

    def rejected(
        self,
        guilty: tuple[str, ...] = (),
        *,
        finite: bool = False,
        can_rewind: bool = False,
        weights_bad: bool = False,
    ) -> Action:
        """A step was rejected.

        Args:
            guilty: FP8 layers to put into bf16, should it come to that.
            finite: it was a suspicion only.
            can_rewind: there is a good state.
            weights_bad: the weights themselves are: no other data will help.
        """
        self.in_a_row += 1
        self._since_rung += 1
        self._calm = 0
        action = self._choose(guilty, finite, can_rewind, weights_bad)
        if action.rung in self._taken:
            self._taken[action.rung] += 1
        if action.rung not in ("skip", "stop"):
            self._since_rung = 0
        return action

    def _choose(self, guilty: tuple[str, ...], finite: bool, can_rewind: bool, weights_bad: bool) -> Action:
        can_rewind = can_rewind and self._taken["rewind"] < self.settings.rewinds
        if weights_bad and can_rewind:
            return Action("rewind")
        if self._since_rung <= self.settings.skips:
            return Action("skip")
        guilty = tuple(name for name in guilty if name not in self.fallen)
        if guilty and self._taken["fall_back"] < self.settings.fallbacks:
            return self._fall_back(guilty)
        if can_rewind:
            return Action("rewind")
        if finite and self.settings.relearn and not self._taken["relearn"]:
            return Action("relearn")
        return Action("stop")

    def _fall_back(self, layers: tuple[str, ...]) -> Action:
        steps = {}
        for name in layers:
            times = self._falls[name] = self._falls.get(name, 0) + 1
            steps[name] = int(self.settings.fallback_steps * self.settings.fallback_backoff ** (times - 1))
        self.fallen.update(steps)
        return Action("fall_back", layers, steps)

    def accepted(self) -> tuple[str, ...]:
        """A step was accepted.

        Returns:
            Layers whose time in bf16 is over.
        """
        self.in_a_row = self._since_rung = 0
        self._calm += 1
        if self._calm >= self.settings.calm:
            self._taken = dict.fromkeys(self._taken, 0)
        self.fallen = {name: steps - 1 for name, steps in self.fallen.items()}
        back = tuple(name for name, steps in self.fallen.items() if steps <= 0)
        for name in back:
            del self.fallen[name]
        return back

    def story(self) -> str:
        """What was tried, for the message of a stop."""
        tried = [f"{self.in_a_row} bad steps in a row"]
        words = {"skip": "skipped", "fall_back": "fell back to bf16", "rewind": "rewound", "relearn": "relearnt"}
        tried += [f"{words[rung]} {times} time{'s' * (times > 1)}" for rung, times in self._taken.items() if times]
        return ", ".join(tried)

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "in_a_row": self.in_a_row,
            "since_rung": self._since_rung,
            "calm": self._calm,
            "taken": dict(self._taken),
            "fallen": dict(self.fallen),
            "falls": dict(self._falls),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was."""
        self.in_a_row, self._since_rung, self._calm = state["in_a_row"], state["since_rung"], state["calm"]
        self._taken = {**self._taken, **state["taken"]}
        self.fallen, self._falls = dict(state["fallen"]), dict(state["falls"])
