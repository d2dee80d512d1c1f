"""Operands that backward casts itself, on a GPU, as Inductor launches them, against those that forward casts."""

from __future__ import annotations

import gc
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_fp8
from lightning_fp8 import LayerSelection, convert_model
from lightning_fp8.kernels import triton_cast
from lightning_fp8.model import conversions
from lightning_fp8.tuning.decoder import Block, DecoderShape
from tests.kernels.agreement import FORESEEN, UNSET, casts, check_later, every_16_bit_value, mixed_values
from tests.kernels.test_folding_gpu import losses, make_blocks, sources  # noqa: F401  # A fixture, used by itself.

pytestmark = pytest.mark.gpu
Recompute = Literal["none", "cheap", "all"]
SETTINGS: tuple[Recompute, ...] = ("cheap", "all")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("setting", ["plain", "hybrid", "e5m2"])
def test_a_cast_made_in_two_gives_the_bits_of_one(setting: str, dtype: torch.dtype) -> None:
    matrices = [
        mixed_values(512, 384, dtype),
        mixed_values(200, 208, dtype)[:, :176],
        torch.zeros(64, 128, dtype=dtype),
    ]
    if dtype is not torch.float32:
        matrices.append(every_16_bit_value(dtype))
    for x in matrices:
        for slot in (UNSET, (9.0, 3.0, 5.0, -1.0), (1e6, 0.0, 5.0, -1.0), (1.0, 3.0, 0.0, -1.0)):
            check_later(x.cuda(), *casts(setting, "tensorwise", "tensorwise"), slot)  # type: ignore[arg-type]
        for slot in FORESEEN:
            pair = casts("foreseen", "tensorwise", "tensorwise")
            check_later(x.cuda(), *pair, slot, triton_cast.cast_foreseen)  # type: ignore[arg-type]


class Gated(nn.Module):
    """A norm and a gated layer: what their casts are made from is kept for their gradients."""

    def __init__(self, width: int = 512, ffn: int = 1024) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate_up = nn.Linear(width, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def gradients(recompute: Recompute, recipe: str) -> list[Tensor]:
    """Outputs, gradients and statistics of a first step and a second, each of two microbatches."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(Gated(), nn.Linear(512, 512)).to(torch.bfloat16)
    convert_model(model, recipe, layers=LayerSelection())
    torch._dynamo.reset()
    compiled = lightning_fp8.compile(model[0], fullgraph=True, dynamic=False, recompute=recompute)
    generator = torch.Generator("cuda").manual_seed(1)
    found: list[Tensor] = []
    for step in range(2):
        inputs = [
            torch.randn(4, 256, 512, device="cuda", generator=generator, dtype=torch.bfloat16).requires_grad_()
            for _ in range(2)
        ]
        outputs = [compiled(x * (step + 1)) for x in inputs]
        for y in outputs:
            y.float().square().mean().backward()
        found += [t.detach().clone() for t in (*outputs, *(x.grad for x in inputs))]  # type: ignore[union-attr]
        found += [p.grad.clone() for p in model[0].parameters() if p.grad is not None]
        model.zero_grad()
        lightning_fp8.step(model)
        found.append(conversions(model)[0].runtime.table.data.clone())
    return found


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise_pow2"])
def test_gradients_have_the_bits_of_those_from_kept_operands(recipe: str) -> None:
    """The first step's scales are unset; two forwards run before the first backward."""
    want = gradients("none", recipe)
    for setting in SETTINGS:
        for index, (g, w) in enumerate(zip(gradients(setting, recipe), want, strict=True)):
            apart = (g.float() - w.float()).abs().max()
            assert torch.equal(g, w), f"{setting}: tensor {index} of {len(want)}, up to {apart} apart"


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_blocks_train_as_without_recomputing(mode: str | None) -> None:
    found = {}
    for setting in ("none", *SETTINGS):
        options = lightning_fp8.compile_options(mode, recompute=setting)
        found[setting], _ = losses(lambda block, o=options: block.compile(fullgraph=True, dynamic=False, options=o))
    print("losses", found)
    assert found["cheap"] == found["all"], "what is cast when, and from what, is no arithmetic"
    for setting in SETTINGS:
        # A sum before a norm is kept, so that forward too reads it as it was rounded.
        assert found[setting][0] == pytest.approx(found["none"][0], rel=1e-4)
        torch.testing.assert_close(found[setting], found["none"], rtol=5e-3, atol=0)


class Checkpointed(nn.Module):
    """A block whose forward runs again in backward."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.block = Block(shape)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)  # type: ignore[return-value]


@pytest.mark.parametrize("setting", ["none", "all"])
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise_pow2", "rowwise", "blockwise_tiled"])
def test_checkpointed_blocks_train_as_others(recipe: str, setting: Recompute) -> None:
    """The first of both steps has scales that are unset; forward runs twice with the same."""

    options = lightning_fp8.compile_options(recompute=setting)
    (want, plain), (got, model) = (
        losses(lambda block: block.compile(fullgraph=True, dynamic=False, options=options), model=make_blocks(*how))
        for how in ((recipe,), (recipe, Checkpointed))
    )
    print("losses", want, got)
    torch.testing.assert_close(got, want, rtol=5e-3, atol=0)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        far = (p - q).float().norm() / q.float().norm()
        assert far < 2e-2, f"{name}: {far:.4f}"


def memory(recompute: Recompute, shape: DecoderShape) -> tuple[int, int]:
    """Bytes kept from forward to backward, and the peak of both."""
    torch._dynamo.reset()
    with torch.device("cuda"):
        model = nn.Sequential(Block(shape), nn.Linear(16, 16)).to(torch.bfloat16)
    convert_model(model, "delayed", layers=LayerSelection())
    compiled = lightning_fp8.compile(model[0], fullgraph=True, dynamic=False, recompute=recompute)
    x = torch.randn(shape.batch, shape.length, shape.width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        compiled(x).sum().backward()
    torch.cuda.synchronize()
    gc.collect()  # What earlier tests have left must not be freed in between.
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = compiled(x)
    kept = torch.cuda.memory_allocated() - before
    y.sum().backward()
    torch.cuda.synchronize()
    return kept, torch.cuda.max_memory_allocated() - before


def test_less_memory_is_kept() -> None:
    shape = DecoderShape(512, 1024, 1, 4, 2048, 4, 4, 1024)
    kept, peak = zip(*(memory(setting, shape) for setting in ("none", *SETTINGS)), strict=True)
    print("kept", kept, "peak", peak)
    weights = sum(p.numel() for p in Block(shape).parameters() if p.dim() == 2)
    cheap = weights + 3 * shape.tokens * shape.width
    assert kept[0] - kept[1] >= 0.95 * cheap
    assert kept[1] - kept[2] >= 0.95 * shape.tokens * shape.ffn
    assert peak[2] < peak[0]
