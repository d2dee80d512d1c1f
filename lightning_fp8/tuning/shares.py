"""What linear layers add to a step, in bf16 and in FP8: the GPU's time, or the host's where the GPU waits for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lightning_fp8.tuning.table import Times

#: What a layer must gain to become FP8. A gain within the noise of the measurement (a few percent from run to run on an
#: H200) is none, and rounding to FP8 is not for nothing.
LEAST_SPEEDUP = 1.05


class Place(NamedTuple):
    """How a layer is used.

    Attributes:
        tokens: rows of its input.
        in_features: of the layer.
        out_features: of the layer.
        compiled: whether it runs in compiled code.
    """

    tokens: int
    in_features: int
    out_features: int
    compiled: bool


class Share(NamedTuple):
    """A layer's share of a step, forward and backward.

    Attributes:
        bf16: milliseconds in bf16.
        fp8: milliseconds in FP8.
        host_bound: the latter are what the host needs to issue the layer.
    """

    bf16: float
    fp8: float
    host_bound: bool

    @property
    def speedup(self) -> float:
        """How many times faster the layer is in FP8."""
        return self.bf16 / self.fp8

    @property
    def gains(self) -> bool:
        """Whether that is enough."""
        return self.speedup >= LEAST_SPEEDUP


def shares_of_step(times: Times, variant: str, places: Mapping[str, Place]) -> dict[str, Share]:
    """The share of each layer in a step.

    The host issues work ahead of the GPU, which waits for it only where the host takes longer for all layers together,
    those in FP8 that the GPU runs faster so. Then a layer takes what the host needs to issue it, where that is more:
    FP8 has more to issue than bf16 has.

    Args:
        times: of layers alone.
        variant: the name under which they know FP8.
        places: of all layers that may become FP8, by name.
    """
    on_gpu, host = {}, {}
    for name, (*sizes, compiled) in places.items():
        on_gpu[name] = Share(times.milliseconds("bf16", *sizes), times.milliseconds(variant, *sizes), False)
        host[name] = times.host_milliseconds("bf16", compiled), times.host_milliseconds(variant, compiled)
    of_gpu = sum(share.fp8 if share.gains else share.bf16 for share in on_gpu.values())
    of_host = sum(host[name][share.gains] for name, share in on_gpu.items())
    if of_host <= of_gpu:
        return on_gpu
    return {
        name: Share(max(share.bf16, host[name][0]), max(share.fp8, host[name][1]), share.fp8 < host[name][1])
        for name, share in on_gpu.items()
    }
