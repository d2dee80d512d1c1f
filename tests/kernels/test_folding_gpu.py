"""Folded casts on a GPU, as Inductor launches them, against the same graphs without folding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_fp8
from lightning_fp8 import LayerSelection, convert_model, ops
from lightning_fp8.casts import Cast, Granularity
from lightning_fp8.formats import E4M3, E5M2
from lightning_fp8.kernels import folded_source
from lightning_fp8.kernels.reference import dequantize_operand
from lightning_fp8.statistics import SCALE
from lightning_fp8.tuning.decoder import Block, DecoderShape
from tests.kernels.agreement import UNSET
from tests.kernels.folded_cases import CASES, inputs_of

pytestmark = pytest.mark.gpu
STRAIGHT, TRANSPOSED = Cast(E4M3, "tensorwise"), Cast(E5M2, "tensorwise", margin=1.0)
#: Values whose code may be the next one: products and sums are contracted, and exponentials taken, otherwise.
SHARE = 2e-3
#: Cases with several pieces: of one width, computed from the same memory, and others.
SIDE_BY_SIDE = ("swiglu gradient", "quotient and reciprocal", "matrices side by side")
SHAPE = DecoderShape(256, 512, 1, 2, 256, 4, 2, 1024)


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Files of the kernels that a test writes. Graphs from the disk would write none."""
    files: list[str] = []
    load = folded_source.load

    def note(text: str):  # type: ignore[no-untyped-def]
        module = load(text)
        files.append(str(module.__file__))
        print("folded kernel:", files[-1])  # Shown where a test fails.
        return module

    monkeypatch.setattr(folded_source, "load", note)
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True), torch._dynamo.config.patch(error_on_recompile=True):
        yield files


def assert_nearly_the_same_codes(got: Tensor, want: Tensor, what: str) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, what

    def steps(codes: Tensor) -> Tensor:
        bits = codes.view(torch.uint8).int()
        return torch.where(bits >= 128, 128 - bits, bits)

    apart = (steps(got) - steps(want)).abs()
    share = (apart > 0).float().mean().item()
    assert apart.max() <= 1 and share <= SHARE, (
        f"{what}: {share:.2%} of the codes differ, by up to {int(apart.max())} steps; "
        f"{got.float()[apart > 0][:4]} for {want.float()[apart > 0][:4]} at {apart.nonzero()[:4].tolist()}"
    )


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_codes_are_those_of_casts_that_read_values(dtype: torch.dtype, stored: bool, sources: list[str]) -> None:
    """All cases in one graph, which is compiled once with and once without folding: scales from slots, or foreseen."""
    straight, transposed = (replace(cast, power_of_two=not stored) for cast in (STRAIGHT, TRANSPOSED))
    jobs = [(name, straight, transposed) for name in CASES]
    jobs += [("swiglu gradient", straight, None), ("rms norm", None, transposed)]
    inputs = [inputs_of(name, dtype, "cuda") for name, _, _ in jobs]

    def run(slots: list[Tensor], inputs: list[list[Tensor]]) -> list[tuple[Tensor, ...]]:
        work = zip(jobs, slots, inputs, strict=True)
        return [ops.cast(CASES[name][0](*values), *pair, slot, stored) for (name, *pair), slot, values in work]

    outcomes = []
    for compiler in (torch.compile, lightning_fp8.compile):
        torch._dynamo.reset()
        compiled = compiler(run, fullgraph=True, dynamic=False)
        found = []
        for scales in (UNSET, (-1.0, 20.0, 3.0, -1.0), UNSET):
            slots = [torch.tensor(scales, device="cuda") for _ in jobs]
            if not stored and scales is not UNSET:  # The amaxes found before foretell the scales.
                slots = [torch.tensor(UNSET[:3], device="cuda") for _ in jobs]
                slots = [torch.cat([s, slot[:1]]) for s, (_, slot, _) in zip(slots, found, strict=True)]
            found += [(scales, slot, out) for slot, out in zip(slots, compiled(slots, inputs), strict=True)]
        outcomes.append(found)
    assert len(sources) == len(jobs) * (1 if stored else 2)
    for (name, *_), (scales, want_slot, want), (_, slot, got) in zip(jobs * 3, *outcomes, strict=True):
        what = f"{name} {dtype} {scales}"
        torch.testing.assert_close(slot, want_slot, rtol=2.0**-7, atol=0, msg=lambda m, what=what: f"{what}: {m}")
        if not torch.equal(slot, want_slot) and (scales is UNSET or not stored):
            continue  # An amax that is the next 16-bit value moves its scale, and with it all codes.
        for part, g, w in zip(("codes", "decode", "codes_t", "decode_t"), got, want, strict=True):
            if g.dtype.itemsize == 1 and g.numel():
                assert_nearly_the_same_codes(g, w, f"{what} {part}")
            else:
                assert torch.equal(g, w), f"{what} {part}"


@pytest.mark.parametrize(
    ("granularity", "other", "passes"),
    [("tensorwise", "tensorwise", 2), ("rowwise", "rowwise", 2), ("1x128", "1x128", 1), ("1x128", "128x128", 1)],
)
def test_all_passes_compute_where_scales_come_from_the_data(
    granularity: Granularity, other: Granularity, passes: int, sources: list[str]
) -> None:
    pair = Cast(E4M3, granularity), Cast(E5M2, other)
    # Blocks are only computed where matrices lie side by side.
    names = SIDE_BY_SIDE if granularity == "1x128" else tuple(CASES)
    inputs = [inputs_of(name, torch.bfloat16, "cuda") for name in names]

    def run(inputs: list[list[Tensor]]) -> list[tuple[Tensor, ...]]:
        return [ops.cast(CASES[name][0](*values), *pair) for name, values in zip(names, inputs, strict=True)]

    compiled = lightning_fp8.compile(run, fullgraph=True, dynamic=False)
    for name, values, got in zip(names, inputs, compiled(inputs), strict=True):
        want = ops.cast(CASES[name][0](*values), *pair)
        for operand, (codes, decode), (want_codes, want_decode) in (("", got[:2], want[:2]), ("_t", got[2:], want[2:])):
            what = f"{name}{operand}"
            # Values are rounded once, not after each operation, and an amax with them.
            torch.testing.assert_close(decode, want_decode, rtol=2e-2, atol=0, msg=lambda m, w=what: f"{w}: {m}")
            step = 0.25 if operand else 0.125
            values_of, values_of_want = dequantize_operand(codes, decode), dequantize_operand(want_codes, want_decode)
            smallest = 4e-3 * values_of_want.abs().amax().item()
            torch.testing.assert_close(values_of, values_of_want, rtol=step, atol=smallest, msg=lambda m, w=what: w + m)
    assert len(sources) == passes * len(names)


def make_blocks(recipe: str = "delayed", block: Callable[[DecoderShape], nn.Module] = Block) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(block(SHAPE), block(SHAPE), nn.Linear(SHAPE.width, SHAPE.width)).to(torch.bfloat16)
    convert_model(model, recipe, layers=LayerSelection())
    return model


def losses(
    compile: Callable[[nn.Module], None], steps: int = 6, model: nn.Module | None = None
) -> tuple[list[float], nn.Module]:
    torch._dynamo.reset()
    model = model or make_blocks()
    for block in list(model)[:2]:
        compile(block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator("cuda").manual_seed(1)
    size = (SHAPE.batch, SHAPE.length, SHAPE.width)
    # Its gradient is wanted, so that both blocks are alike.
    x = torch.randn(size, device="cuda", generator=generator).to(torch.bfloat16).requires_grad_()
    y = torch.randn(size, device="cuda", generator=generator).to(torch.bfloat16)
    found = []
    for _ in range(steps):
        torch.compiler.cudagraph_mark_step_begin()
        loss = F.mse_loss(model(x).float(), y.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None
        lightning_fp8.step(model)
        found.append(float(loss.detach()))
    return found, model


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_blocks_train_as_without_folding(mode: str | None, sources: list[str]) -> None:
    options = lightning_fp8.compile_options(mode)
    want, plain_model = losses(lambda block: block.compile(mode=mode, fullgraph=True, dynamic=False))
    assert not sources
    got, model = losses(lambda block: block.compile(fullgraph=True, dynamic=False, options=options))
    print("losses", want, got)
    # Two norms and an activation; the gradients of gate and up, and of query, key and value. Blocks share their graphs.
    assert len(sources) == 5
    torch.testing.assert_close(got, want, rtol=5e-3, atol=0)
    for (name, p), q in zip(model.named_parameters(), plain_model.parameters(), strict=True):
        far = (p - q).float().norm() / q.float().norm()
        assert far < 2e-2, f"{name}: {far:.4f}"
    tables = [next(m for m in side.modules() if hasattr(m, "fp8")).fp8.slots for side in (model, plain_model)]
    for slot, expected in zip(*tables, strict=True):
        torch.testing.assert_close(slot[SCALE], expected[SCALE], rtol=0.1, atol=0)


def test_graphs_from_the_disk_are_folded_too(tmp_path, monkeypatch: pytest.MonkeyPatch, sources: list[str]) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    options = lightning_fp8.compile_options()
    found = []
    with torch._inductor.config.patch(force_disable_caches=False, fx_graph_cache=True):
        for _ in range(2):
            torch._dynamo.utils.counters.clear()
            found.append(losses(lambda block: block.compile(fullgraph=True, options=options), 3)[0])
    assert found[0] == found[1]
    assert len(sources) == 5, "the second time the graphs were there"
    assert (
        sum(torch._dynamo.utils.counters["inductor"][key] for key in ("fxgraph_cache_hit",))
        or (torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
    )


def test_matrices_that_are_not_written_take_no_memory() -> None:
    rows, columns = 8192, 4096

    def run(slot: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return ops.cast(F.gelu(x), STRAIGHT, TRANSPOSED, slot, True)

    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    peaks = []
    for compiler in (torch.compile, lightning_fp8.compile):
        torch._dynamo.reset()
        compiled = compiler(run, fullgraph=True)
        slot = torch.tensor((0.0, 1.0, 1.0, 0.0), device="cuda")
        compiled(slot, x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = compiled(slot, x)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del out
    assert peaks[0] - peaks[1] >= 2 * rows * columns * 0.9, peaks
