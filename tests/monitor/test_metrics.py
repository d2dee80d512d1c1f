"""The metrics against sums written out; over two ranks in ``test_monitor_ranks.py``."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightning_fp8.casts import Cast
from lightning_fp8.metrics import SQNR, Amax, SaturationRate, UnderflowRate


def data(seed: int = 0) -> torch.Tensor:
    return torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-6, 3, 64)[:, None]


def by_hand(batches: list[torch.Tensor], scale: float | None = None) -> dict[str, float]:
    lost = clamped = count = signal = noise = 0.0
    for x in batches:
        used = scale or (448 / x.abs().max()).item()
        scaled = x.double() * used
        result = (x * used).clamp(-448, 448).to(torch.float8_e4m3fn).double() / used
        lost += ((x != 0) & (result == 0)).sum().item()
        clamped += (scaled.abs() > 448.001).sum().item()
        count += x.numel()
        signal += x.double().square().sum().item()
        noise += (x - result).square().sum().item()
    return {
        "underflow": 100 * lost / count,
        "saturation": 100 * clamped / count,
        "sqnr": 10 * math.log10(signal / noise),
    }


@pytest.mark.parametrize("scale", [None, 3.0])
def test_rates_and_sqnr(scale: float | None) -> None:
    batches = [data(0), data(1) * 0.1]
    expected = by_hand(batches, scale)
    for metric, name in ((UnderflowRate(), "underflow"), (SaturationRate(), "saturation"), (SQNR(), "sqnr")):
        for batch in batches:
            metric.update(batch, scale)
        assert metric.compute().item() == pytest.approx(expected[name], rel=1e-4), name
        metric.reset()
        metric.update(torch.ones(4, 16))
        assert metric.compute().item() == {"underflow": 0.0, "saturation": 0.0, "sqnr": math.inf}[name]


def test_finer_scales_lose_less() -> None:
    values = []
    for words in ("e4m3/tensorwise", "e4m3/rowwise", "e4m3/1x32"):
        metric = UnderflowRate(words)
        metric.update(data())
        values.append(metric.compute().item())
    assert values[0] > 10 > values[1] >= values[2]


def test_a_cast_object_does_as_well_as_its_words() -> None:
    cast = Cast.parse("e5m2/rowwise/pow2")
    assert cast is not None
    first, second = SQNR(cast), SQNR("e5m2/rowwise/pow2")
    for metric in (first, second):
        metric.update(data().view(2, 32, 128).bfloat16())
    assert first.compute() == second.compute()


def test_a_scalar_is_a_tensor_too() -> None:
    rate = SaturationRate()
    rate.update(torch.tensor(500.0), scale=1.0)
    rate.update(torch.tensor(400.0), scale=1.0)
    assert rate.compute() == 50


@pytest.mark.parametrize("words", ["e4m3/tensorwise", "e4m3/rowwise", "e4m3/1x128", "e4m3/128x128", "e4m3/1x32"])
@pytest.mark.parametrize("shape", [(0, 128), (2, 0, 128), (4, 0)])
def test_an_empty_tensor_changes_nothing(words: str, shape: tuple[int, ...]) -> None:
    for metric in (SQNR(words), UnderflowRate(words), SaturationRate(words)):
        metric.update(data())
        before = metric.compute()
        metric.update(torch.zeros(shape))
        metric._computed = None
        assert metric.compute() == before


def test_a_cast_is_no_number() -> None:
    with pytest.raises(TypeError, match=r"A cast is a Cast or its words, .* got 3"):
        SQNR(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_amax_propagates_what_is_not_finite(bad: float) -> None:
    metric = Amax()
    metric.update(torch.tensor([-3.0, 2.0]))
    assert metric.compute() == 3
    metric.update(torch.tensor([bad, 1.0]))
    metric.update(torch.tensor([5.0]))
    assert not metric.compute().isfinite()


@pytest.mark.parametrize(
    ("make", "act", "named"),
    [
        (lambda: UnderflowRate("e3m4/rowwise"), None, "e3m4"),
        (lambda: UnderflowRate("e4m3/diagonal"), None, "diagonal"),
        (lambda: UnderflowRate("e4m3"), None, "a cast is written as e4m3/rowwise"),
        (lambda: UnderflowRate("e4m3/rowwise/pow3"), None, "Unknown option 'pow3'"),
        (lambda: UnderflowRate(""), None, "Give a cast"),
        (lambda: UnderflowRate("e4m3/1x128"), lambda m: m.update(torch.ones(2, 100)), "multiple"),
        (lambda: UnderflowRate("e4m3/rowwise"), lambda m: m.update(torch.ones(2, 16), 1.0), "give none"),
    ],
)
def test_mistakes_are_refused(make: Any, act: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        act(make()) if act else make()
