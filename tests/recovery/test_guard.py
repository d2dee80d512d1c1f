"""The core without Lightning: plain loops."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_fp8 import convert_model, step
from lightning_fp8.loss_scaling import LossScaler
from lightning_fp8.recovery.guard import StepGuard
from lightning_fp8.recovery.spikes import Thresholds
from lightning_fp8.telemetry import Telemetry

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adam-fused": lambda p: torch.optim.Adam(p, 1e-2, fused=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, fused=True),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, 1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2),
    "muon-like-adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
}


def make_model(fp8: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 16))
    return convert_model(model, "delayed") if fp8 else model


def train(model: nn.Module, optimizer, batches, guard: StepGuard | None) -> list:
    outcomes = []
    for number, batch in enumerate(batches):
        if guard is not None:
            guard.begin()
            guard.observe_batch(batch)
        loss = model(batch).square().mean()
        if guard is not None:
            guard.observe(loss)
        loss.backward()
        if guard is not None:
            guard.decide(optimizer, number=number)
        optimizer.step()
        optimizer.zero_grad()
        if model.__dict__.get("_lightning_fp8"):
            step(model)
        if guard is not None:
            outcomes += guard.outcomes(everything=False)
    return outcomes + guard.outcomes() if guard is not None else []


def make_batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 16, generator=generator) for _ in range(count)]


def everything(model: nn.Module, optimizer) -> dict:
    fp8 = model.__dict__.get("_lightning_fp8")
    return copy.deepcopy([model.state_dict(), optimizer.state_dict(), fp8.runtime.live_state() if fp8 else None])


def equal(one, other) -> bool:
    leaves, spec = torch.utils._pytree.tree_flatten(one)
    others, other_spec = torch.utils._pytree.tree_flatten(other)
    same = (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(leaves, others, strict=True))
    return spec == other_spec and all(same)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad_at", [0, 4])
def test_a_bad_step_leaves_no_trace(name, fp8, bad_at):
    """With the bad batch guarded away, everything is what it would be had the batch never been there."""
    good = make_batches(8)
    bad = [*good[:bad_at], torch.full((16, 16), math.nan), *good[bad_at:]]
    results = []
    for batches, guarded in ((good, False), (bad, True)):
        model = make_model(fp8)
        optimizer = OPTIMIZERS[name](model.parameters())
        guard = StepGuard(model, [optimizer]) if guarded else None
        outcomes = train(model, optimizer, batches, guard)
        results.append(everything(model, optimizer))
        if guard is not None:
            assert guard.fast == name.endswith("fused")
            assert [o.context["number"] for o in outcomes if o.finding is not None] == [bad_at]
            assert [o.context["number"] for o in outcomes] == list(range(9))
    assert equal(*results)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", ["adamw", "adamw-fused"])
def test_a_clean_run_is_not_touched(name, fp8):
    results = []
    for guarded in (False, True):
        model = make_model(fp8)
        optimizer = OPTIMIZERS[name](model.parameters())
        train(model, optimizer, make_batches(40), StepGuard(model, [optimizer]) if guarded else None)
        results.append(everything(model, optimizer))
    assert equal(*results)


def unfreeze(model: nn.Module, optimizer) -> None:
    """The first layers join the optimizer, as BackboneFinetuning has them do."""
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})


def frozen(name: str):
    model = make_model(False)
    model[0].requires_grad_(False)
    return model, OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("bad_at", [4, 6])
@pytest.mark.parametrize("name", ["adamw", "adamw-fused", "sgd-fused"])
def test_parameters_that_join_later_are_judged(name, bad_at):
    """A gradient that is bad in them alone leaves no trace, in their first step (4) or later."""
    results = []
    for guarded in (False, True):
        model, optimizer = frozen(name)
        guard = StepGuard(model, [optimizer]) if guarded else None
        outcomes = train(model, optimizer, make_batches(4), guard)
        unfreeze(model, optimizer)
        batches = make_batches(4)
        for batch in [*batches[: bad_at - 4], None, *batches[bad_at - 4 :]]:
            if batch is None and guard is not None:
                handle = model[0].weight.register_hook(lambda gradient: gradient * math.nan)
                outcomes += train(model, optimizer, batches[:1], guard)
                handle.remove()
            elif batch is not None:
                outcomes += train(model, optimizer, [batch], guard)
        results.append([p.detach().clone() for p in model.parameters()])
        results[-1] += [value for state in optimizer.state.values() for value in state.values()]
        if guard is not None:
            bad = [outcome.finding is not None for outcome in outcomes]
            assert bad == [number == bad_at for number in range(9)] and guard.fast == ("fused" in name)
            culprit = outcomes[bad_at].finding.culprits[-1]
            assert (culprit.where, culprit.role) == ("0.weight", "gradient")
    assert equal(*results)


def test_statistics_begin_anew_with_new_parameters():
    """A norm over more gradients is no spike."""
    model, optimizer = frozen("adamw")
    guard = StepGuard(model, [optimizer], Thresholds(warmup=2, window=8))
    train(model, optimizer, make_batches(4), guard)
    unfreeze(model, optimizer)
    handle = model[0].weight.register_hook(lambda gradient: gradient * 1e4)
    outcomes = train(model, optimizer, make_batches(4), guard)
    assert [outcome.finding for outcome in outcomes] == [None] * 4 and guard.judges[0].statistics.count == 4
    handle.remove()
    model[0].weight.register_hook(lambda gradient: gradient * 1e9)
    (outcome,) = train(model, optimizer, make_batches(1), guard)
    assert outcome.finding.culprits[0].what == "spike"


def test_a_verdict_from_before_parameters_joined_is_still_understood():
    model, optimizer = frozen("adamw-fused")
    guard = StepGuard(model, [optimizer])
    train(model, optimizer, make_batches(2), guard)
    for when in ("before", "after"):
        guard.begin()
        loss = model(make_batches(1)[0]).square().mean() * math.nan
        guard.observe(loss)
        loss.backward()
        guard.decide(optimizer, when=when)
        optimizer.step()
        optimizer.zero_grad()
        if when == "before":
            twin = StepGuard(model, [optimizer])
            unfreeze(model, optimizer)
            twin.load_state_dict(guard.state_dict())
    outcomes = guard.outcomes()
    assert [outcome.context["when"] for outcome in outcomes] == ["before", "after"]
    assert all(outcome.finding.culprits[0].where == "loss" for outcome in outcomes)
    assert twin.outcomes()[0] == outcomes[0]


def test_weights_that_joined_later_can_be_bad_too():
    model, optimizer = frozen("adamw")
    guard = StepGuard(model, [optimizer])
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    assert guard.bad_weights() == []
    unfreeze(model, optimizer)
    assert [culprit.where for culprit in guard.bad_weights()] == ["0.weight"]


@pytest.mark.parametrize("name", ["adamw", "adamw-fused"])
def test_another_optimizer_takes_the_place_of_one(name):
    model = make_model(False)
    first = OPTIMIZERS[name](model.parameters())
    guard = StepGuard(model, [first], Thresholds(warmup=2))
    batches = make_batches(8)
    batches[6][0, 0] = math.nan
    train(model, first, batches[:4], guard)
    second = OPTIMIZERS["sgd-fused"](model.parameters())
    with pytest.raises(ValueError, match=r"none of the optimizers that are guarded.*watch"):
        guard.decide(second)
    guard.watch([second])
    assert guard.fast == (name == "adamw-fused" or guard._mode == "auto") and not hasattr(first, "found_inf")
    outcomes = train(model, second, batches[4:], guard)
    assert [outcome.finding is None for outcome in outcomes] == [True, True, False, True]
    assert guard.judges[0].statistics.count == 3 and all(p.isfinite().all() for p in model.parameters())
    judge = guard.judges[0]
    guard.watch([second])
    assert guard.judges == [judge], "the statistics of one that stays go on"


def test_fast_ends_where_a_group_joins_that_is_not_fused():
    for mode in ("auto", "fast"):
        model, optimizer = frozen("adamw-fused")
        guard = StepGuard(model, [optimizer], mode=mode)
        train(model, optimizer, make_batches(2), guard)
        assert guard.fast
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters()), "fused": False})
        if mode == "fast":
            with pytest.raises(ValueError, match="fused=True to AdamW"):
                train(model, optimizer, make_batches(1), guard)
        else:
            bad = [torch.full((16, 16), math.nan)]
            outcomes = train(model, optimizer, [*make_batches(1), *bad], guard)
            assert [outcome.finding is not None for outcome in outcomes] == [False, True] and not guard.fast
            assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_the_first_operand_of_fp8_is_named():
    model = make_model(True)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    guard = StepGuard(model, [optimizer])
    model[1].register_forward_hook(lambda module, args, output: output * math.nan)
    outcomes = train(model, optimizer, make_batches(1), guard)
    first = outcomes[0].finding.culprits[0]
    assert (first.what, first.where, first.role, first.ranks) == ("nonfinite", "3", "input", (0,))


def test_where_forward_went_wrong_outside_fp8_no_layer_is_blamed():
    model = make_model(True)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    model[4].register_forward_hook(lambda module, args, output: output * math.nan)
    finding = train(model, optimizer, make_batches(1), StepGuard(model, [optimizer]))[0].finding
    assert finding.layers == () and finding.culprits[0].where == "loss"


BATCHES = {
    "coo": torch.Tensor.to_sparse,
    # Two values at the same place.
    "uncoalesced": lambda x: torch.sparse_coo_tensor([[0, 0], [1, 1]], x[0, :2], (3, 3)),
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "bsc": lambda x: x.to_sparse_bsc((2, 2)),
    "nested": lambda x: torch.nested.nested_tensor([x, x[:3], x[:0]]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x[:3]], layout=torch.jagged),
    "e4m3": lambda x: x.to(torch.float8_e4m3fn),
    "e5m2": lambda x: x.to(torch.float8_e5m2),
    "e8m0": lambda x: x.abs().to(torch.float8_e8m0fnu),
    "empty": lambda x: x[:0].to_sparse(),
}


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("value", [1.0, math.nan, -math.inf])
def test_a_batch_of_any_layout_and_type_is_told_where_it_was_bad(kind, value):
    model = make_model(False)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    guard = StepGuard(model, [optimizer])
    (batch,) = make_batches(1)
    batch[0, 0] = value
    given = BATCHES[kind](batch)
    guard.begin()
    guard.observe_batch({"x": given})
    guard.observe(model(batch).square().mean())
    guard.decide(optimizer)
    (outcome,) = guard.outcomes()
    # E4M3 and E8M0 have no Inf: torch 2.11 casts it to NaN, 2.13 to the largest number of E4M3.
    saturates = kind == "e4m3" and given.float().isfinite().all()
    if math.isfinite(value):
        assert outcome.finding is None
    elif kind == "empty" or saturates:
        assert outcome.finding.culprits[0].where == "loss"
    else:
        first = outcome.finding.culprits[0]
        assert first.where == "batch" and math.isnan(first.value) == (math.isnan(value) or kind in ("e4m3", "e8m0"))


def test_an_amax_jump_is_rejected_and_named():
    model = make_model(True)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    guard = StepGuard(model, [optimizer], Thresholds(spike=None))
    batches = make_batches(4)
    outcomes = train(model, optimizer, [*batches, batches[0] * 1e4, *batches], guard)
    bad = [outcome for outcome in outcomes if outcome.finding is not None]
    assert [outcome.context["number"] for outcome in bad] == [4]
    first = bad[0].finding.culprits[0]
    assert (first.what, first.where, first.role) == ("amax_jump", "0", "input")


def test_names_of_nested_conversions_are_the_models_own():
    inner = convert_model(nn.Sequential(nn.Linear(16, 16)), "delayed")
    outer = nn.ModuleDict({"a": inner, "b": convert_model(nn.Linear(16, 16), "delayed")})
    guard = StepGuard(outer, [torch.optim.SGD(outer.parameters(), 1e-2)])
    assert guard.fp8.names == ["a.0", "b"]
    guard.fp8.set_enabled(["b"], False)
    assert outer["b"].fp8.enabled is False and inner[0].fp8.enabled is True


def test_names_in_compiled_modules_are_those_that_patterns_match():
    inner = convert_model(nn.Sequential(nn.Linear(16, 16)), "delayed")
    outer = nn.ModuleDict({"a": torch.compile(inner)})
    guard = StepGuard(outer, [torch.optim.SGD(outer.parameters(), 1e-2)])
    assert guard.fp8.names == Telemetry(outer).names == ["a.0"]
    guard.fp8.set_enabled(["a.0"], False)
    assert inner[0].fp8.enabled is False


def test_reject_gives_nan_on_every_path():
    model = make_model(False)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    guard = StepGuard(model, [optimizer])
    before = everything(model, optimizer)
    guard.begin()
    loss = guard.reject(model(make_batches(1)[0]).square().mean())
    guard.observe(loss)
    loss.backward()
    assert all(parameter.grad.isnan().any() for parameter in model.parameters())
    assert guard.decide(optimizer) is False
    optimizer.step()
    assert equal(before, everything(model, optimizer))
    assert guard.outcomes()[0].finding.deliberate


def test_several_optimizers_have_their_own_statistics_and_verdicts():
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(m.parameters(), 1e-2) for m in (one, two)]
    guard = StepGuard(nn.ModuleList([one, two]), optimizers)
    before = two.weight.clone()
    guard.begin()
    for module, optimizer, factor in ((one, optimizers[0], 1.0), (two, optimizers[1], math.inf)):
        loss = module(torch.ones(2, 4)).sum() * factor
        guard.observe(loss)
        loss.backward()
        guard.decide(optimizer, which=len(guard._pending))
        optimizer.step()
    findings = [outcome.finding for outcome in guard.outcomes()]
    assert findings[0] is None and findings[1] is not None and torch.equal(before, two.weight)
    assert [judge.statistics.count.item() for judge in guard.judges] == [1, 0]
    assert findings[1].culprits[-1].where in ("1.weight", "1.bias")


@pytest.mark.parametrize("fused", [False, True])
def test_what_several_optimizers_did_becomes_known_and_counts_as_one_step(fused):
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(m.parameters(), 1e-2, momentum=0.9, fused=fused) for m in (one, two)]
    guard = StepGuard(nn.ModuleList([one, two]), optimizers)
    known, before = [], 0
    for number, factors in enumerate([(1.0, 1.0), (1.0, math.nan), (math.nan, 1.0), (math.nan, math.nan)]):
        guard.begin()
        for module, optimizer, factor in zip((one, two), optimizers, factors, strict=True):
            loss = module(torch.ones(2, 4)).sum() * factor
            guard.observe(loss)
            loss.backward()
            guard.decide(optimizer, number=number)
            optimizer.step()
            optimizer.zero_grad()
        twin = StepGuard(nn.ModuleList([one, two]), optimizers)
        twin.load_state_dict(copy.deepcopy(guard.state_dict()))
        assert guard.rejected_in_a_row(before) == twin.rejected_in_a_row(before) == number
        outcomes = guard.outcomes(everything=False)
        known.append([outcome.context["number"] for outcome in outcomes])
        before += any(outcome.finding is not None for outcome in outcomes)
    assert known == ([[0, 0], [], [1, 1], [2, 2]] if fused else [[0, 0], [1, 1], [2, 2], [3, 3]])
    guard.forget()
    assert [outcome.finding is not None for outcome in guard.outcomes()] == [True] * (2 * fused)


def test_state_resumes_with_what_was_not_collected():
    model = make_model(False)
    optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
    guard = StepGuard(model, [optimizer])
    train(model, optimizer, make_batches(3), guard)
    guard.begin()
    loss = model(make_batches(1)[0]).square().mean() * math.nan
    guard.observe(loss)
    loss.backward()
    assert guard.decide(optimizer, number=3) is None
    twin = StepGuard(model, [optimizer])
    twin.load_state_dict(copy.deepcopy(guard.state_dict()))
    assert guard.rejected_in_a_row() == twin.rejected_in_a_row() == 1
    mine, theirs = guard.outcomes(), twin.outcomes()
    assert mine == theirs and theirs[0].finding is not None
    guard.close()
    assert not hasattr(optimizer, "found_inf")


def test_bad_weights_are_named():
    model = make_model(False)
    guard = StepGuard(model, [torch.optim.SGD(model.parameters(), 1e-2)])
    assert guard.bad_weights() == []
    with torch.no_grad():
        model[3].weight[0, 0] = 1e30
    # A finite weight whose square is not is told as what it is.
    (culprit,) = guard.bad_weights()
    assert (culprit.where, culprit.role, culprit.ranks) == ("3.weight", "weight", (0,))
    assert culprit.value == pytest.approx(1e30)
    with torch.no_grad():
        model[3].weight[0, 1] = math.nan
    assert math.isnan(guard.bad_weights()[0].value)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_frozen_weights_of_few_bits_are_no_obstacle(dtype):
    model = nn.Linear(16, 16)
    model.codes = nn.Parameter(torch.ones(8, 8).to(dtype), requires_grad=False)
    guard = StepGuard(model, [torch.optim.AdamW(model.parameters())])
    assert guard.bad_weights() == []
    nn.init.constant_(model.bias, math.nan)
    assert [culprit.where for culprit in guard.bad_weights()] == ["bias"]
    if dtype.is_floating_point:
        model.codes.data = torch.full((8, 8), math.nan).to(dtype)
        assert [culprit.where for culprit in guard.bad_weights()] == ["bias", "codes"]


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("known", [False, True])
def test_weights_that_the_first_forward_makes_are_not_bad(known):
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(4), *([nn.Linear(4, 4)] if known else []))
    guard = StepGuard(model, [torch.optim.SGD(model.parameters(), 1e-2)])
    assert guard.bad_weights() == []
    if known:
        nn.init.constant_(model[2].bias, math.inf)
        assert [culprit.where for culprit in guard.bad_weights()] == ["2.bias"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_parameters_of_other_dtypes_are_judged_too(dtype):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.filter = nn.Linear(16, 16), nn.Parameter(torch.ones(16, dtype=dtype))

        def forward(self, x):
            return (self.linear(x) * self.filter).abs().float()

    torch.manual_seed(0)
    model = Mixed()
    guard = StepGuard(model, [optimizer := torch.optim.AdamW(model.parameters(), 1e-2)])
    batches = make_batches(4)
    batches[2][0, 0] = math.nan
    outcomes = train(model, optimizer, batches, guard)
    assert [outcome.finding is None for outcome in outcomes] == [True, True, False, True]
    assert guard.bad_weights() == []
    with torch.no_grad():
        model.filter[0] = math.nan
    assert [culprit.where for culprit in guard.bad_weights()] == ["filter"]


def test_fast_is_refused_where_it_cannot_be():
    model = make_model(False)
    with pytest.raises(ValueError, match="fused=True to SGD"):
        StepGuard(model, [torch.optim.SGD(model.parameters(), 1e-2)], mode="fast")
    fused = torch.optim.SGD(model.parameters(), 1e-2, fused=True)
    with pytest.raises(ValueError, match="loss scale"):
        StepGuard(model, [fused], mode="fast", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="mode"):
        StepGuard(model, [fused], mode="quick")
    assert StepGuard(model, [fused]).fast and not StepGuard(model, [fused], mode="exact").fast


@pytest.mark.parametrize("fused", [False, True])
def test_under_a_grad_scaler(fused):
    """A spike is skipped though the scaler sees nothing wrong; an overflow is told from a fault."""
    model = make_model(False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    guard = StepGuard(model, [optimizer], Thresholds(warmup=2, window=8), scaler=scaler)
    findings = []
    for factor in (1.0, 1.0, 1.0, 1e3, 1.0):
        weights = copy.deepcopy(model.state_dict())
        guard.begin()
        loss = scaler.scale(model(make_batches(1)[0]).square().mean() * factor)
        guard.observe(loss)
        loss.backward()
        if not fused:
            scaler.unscale_(optimizer)
        guard.decide(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        findings += [outcome.finding for outcome in guard.outcomes()]
        assert equal(weights, copy.deepcopy(model.state_dict())) == (factor > 1)
    assert [finding is not None for finding in findings] == [False, False, False, True, False]
    assert findings[3].culprits[0].where == "loss" and not findings[3].overflow and scaler.get_scale() == 8.0
    assert findings[3].loss < 5e3, "the loss is told unscaled"


def test_observing_a_loss_does_not_move_its_factor():
    model = make_model(False)
    optimizer, scaler = OPTIMIZERS["adamw"](model.parameters()), LossScaler("dynamic")
    guard = StepGuard(model, [optimizer], scaler=scaler)
    scaler.scale(model(make_batches(1)[0]).sum() * math.inf).backward()
    scaler.step(optimizer)  # An overflow: the next loss will get half the factor.
    guard.begin()
    for expected in (65536.0, 32768.0):
        guard.observe(torch.tensor(expected))
        losses = [float(loss / factor) for loss, factor in guard._losses]
        scaler.scale(torch.ones(()))
    assert losses == [1.0, 1.0]


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_with_fabric_as_documented(fused):
    fabric = Fabric(accelerator="cpu", devices=1)
    raw = make_model(False)
    model, optimizer = fabric.setup(raw, torch.optim.AdamW(raw.parameters(), 1e-2, fused=fused))
    guard = StepGuard(raw, [optimizer.optimizer])
    for number, batch in enumerate([*make_batches(3), torch.full((16, 16), math.nan)]):
        before = everything(raw, optimizer.optimizer)
        guard.begin()
        loss = model(batch).square().mean()
        guard.observe(loss)
        fabric.backward(loss)
        guard.decide(optimizer.optimizer, number=number)
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
    assert equal(before, everything(raw, optimizer.optimizer)), "the last step was skipped"


@pytest.mark.parametrize("name", ["adamw", "adamw-fused"])
def test_a_monitor_can_reject_a_step_without_the_host(name):
    model = make_model(False)
    optimizer = OPTIMIZERS[name](model.parameters())
    guard = StepGuard(model, [optimizer])
    train(model, optimizer, make_batches(2), guard)
    before = everything(model, optimizer)
    for flag in (True, False):
        guard.begin()
        loss = model(make_batches(1)[0]).square().mean()
        guard.observe(loss)
        loss.backward()
        guard.reject_where(torch.tensor(False))
        guard.reject_where(torch.tensor(flag))
        guard.decide(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        assert equal(before, everything(model, optimizer)) == flag
    first, second = guard.outcomes()
    assert first.finding.culprits[0].what == "health" and not first.finding.deliberate and second.finding is None
