"""The accuracy gate: is FP8's loss higher than bf16's by more than chance explains?

sigma is the standard deviation of bf16's final loss over seeds. A mean of n paired gaps (same seed, same data) between
two equally good ways of training scatters by sigma * sqrt(2 / n) at most, so the gate passes up to twice that, and
never demands less than 0.25% of bf16's loss (DeepSeek-V3's figure, arXiv 2412.19437, section 3.3). A limit above 1% of
the loss would prove nothing: then more seeds are needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

#: A run's final loss is the mean of its last validations, which scatters less than the last one.
AVERAGED_VALIDATIONS = 5
MIN_SIGMA_RUNS = 8
RELATIVE_TOLERANCE = 0.0025
MAX_RELATIVE_LIMIT = 0.01
SPIKE_WINDOW = 128
SPIKE_WARMUP = 32
#: A spike: this many robust standard deviations above the median of the window before it.
SPIKE_DEVIATIONS = 6.0


@dataclass(frozen=True)
class Run:
    """What is kept of one training run.

    Attributes:
        seed: seed of the initial weights and of the order of the data.
        validations: validation losses in nats per byte, in order.
        spikes: number of spikes in its training loss.
        fp8_layers: number of linear layers that ran in FP8.
    """

    seed: int
    validations: list[float]
    spikes: int
    fp8_layers: int = 0

    @property
    def final(self) -> float:
        """Mean of the last validations.

        Raises:
            ValueError: there were too few.
        """
        if len(self.validations) < AVERAGED_VALIDATIONS:
            raise ValueError(f"a run needs {AVERAGED_VALIDATIONS} validations, this one had {len(self.validations)}")
        return fmean(self.validations[-AVERAGED_VALIDATIONS:])


@dataclass(frozen=True)
class Noise:
    """How bf16's final loss scatters over seeds.

    Attributes:
        loss: mean final loss.
        sigma: its standard deviation over runs.
        runs: number of runs.
    """

    loss: float
    sigma: float
    runs: int

    @staticmethod
    def of(runs: Sequence[Run]) -> Noise:
        """Measure it.

        Raises:
            ValueError: there are too few runs, or one has diverged.
        """
        finals = [run.final for run in runs]
        if len(finals) < MIN_SIGMA_RUNS:
            raise ValueError(f"sigma needs at least {MIN_SIGMA_RUNS} bf16 runs, got {len(finals)}")
        if not all(math.isfinite(final) for final in finals):
            raise ValueError("a bf16 run diverged: the gate needs a training that works in bf16")
        return Noise(fmean(finals), stdev(finals), len(finals))

    def limit(self, seeds: int) -> float:
        """Largest mean gap over ``seeds`` pairs that passes, in nats per byte."""
        return max(RELATIVE_TOLERANCE * self.loss, 2 * self.sigma * math.sqrt(2 / seeds))

    def seeds_needed(self) -> int:
        """Fewest pairs for which the limit is at most 1% of the loss."""
        return max(1, math.ceil(2 * (2 * self.sigma / (MAX_RELATIVE_LIMIT * self.loss)) ** 2))


@dataclass(frozen=True)
class Verdict:
    """One kind of runs against bf16.

    Attributes:
        gaps: final loss minus bf16's, for each seed.
        limit: largest mean gap that passes.
        spikes: number of spikes in all its runs.
        bf16_spikes: the same in bf16's runs with these seeds.
    """

    gaps: list[float]
    limit: float
    spikes: int
    bf16_spikes: int

    @property
    def mean(self) -> float:
        """Mean gap."""
        return fmean(self.gaps)

    @property
    def spread(self) -> float:
        """Standard deviation of the gaps over seeds."""
        return stdev(self.gaps) if len(self.gaps) > 1 else math.nan

    @property
    def within_limit(self) -> bool:
        """Whether the mean gap passes; one that is not finite does not."""
        return self.mean <= self.limit

    @property
    def passed(self) -> bool:
        """Whether the gap is within the limit and there are no more spikes than in bf16."""
        return self.within_limit and self.spikes <= self.bf16_spikes


def judge(runs: Sequence[Run], bf16_runs: Sequence[Run], noise: Noise) -> Verdict:
    """Pair runs with the bf16 runs of the same seeds.

    Raises:
        KeyError: bf16 was not run with one of the seeds.
    """
    bf16 = {run.seed: run for run in bf16_runs}
    gaps = [run.final - bf16[run.seed].final for run in runs]
    limit = noise.limit(len(runs))
    return Verdict(gaps, limit, sum(run.spikes for run in runs), sum(bf16[run.seed].spikes for run in runs))


def count_spikes(losses: Sequence[float]) -> int:
    """Number of training losses far above those before them; spikes themselves do not raise the bar.

    Args:
        losses: one loss for each step; a loss that is not finite is a spike.
    """
    calm: list[float] = []
    spikes = 0
    for loss in losses:
        if len(calm) >= SPIKE_WARMUP:
            middle = median(calm)
            deviation = 1.4826 * median(abs(value - middle) for value in calm)  # A normal's sigma from its MAD.
            is_spike = not loss <= middle + SPIKE_DEVIATIONS * deviation
        else:
            is_spike = not math.isfinite(loss)
        if is_spike:
            spikes += 1
        else:
            calm = [*calm[1 - SPIKE_WINDOW :], loss]
    return spikes
