"""FP8Throughput: what it counts, when it reads, and what it logs."""

from __future__ import annotations

import copy
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_fp8 import AmaxMonitor, FP8Precision, LayerSelection, convert_model
from lightning_fp8.backends import Support
from lightning_fp8.callbacks.throughput import FP8Throughput, _converted_layers
from lightning_fp8.model import conversions
from lightning_fp8.tuning.flops import StepFlops
from lightning_fp8.tuning.peaks import peak_of

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTH, WIDTH = 16, 32


class Net(pl.LightningModule):
    """Token numbers through an embedding, a linear layer, attention, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.head = nn.Linear(2 * WIDTH, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.up(self.embedding(tokens)).unflatten(-1, (2, WIDTH)).transpose(1, 2)
        x = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return self.head(x.transpose(1, 2).flatten(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch).flatten(0, 1), batch.flatten())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)


class Memory(DummyLogger):
    """Keeps what was logged under throughput/."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if "throughput/steps_per_second" in metrics:
            self.rows.append((step or 0, dict(metrics)))


def fit(callback: FP8Throughput, steps: int = 7, **settings: Any) -> Memory:
    memory = Memory()
    data = settings.pop("data", None) or DataLoader(torch.randint(64, (64, LENGTH)), batch_size=4)
    model = settings.pop("model", None) or Net()
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "plugins": [FP8Precision()],
        "logger": memory,
        "max_steps": steps,
        "callbacks": [callback],
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    pl.Trainer(**(defaults | settings)).fit(model, data, settings.pop("val", None))
    return memory


def linear_flops(tokens: int, products: int = 3) -> tuple[int, int]:
    """Of the layers up and head."""
    return products * 2 * tokens * WIDTH * 2 * WIDTH, 3 * 2 * tokens * 2 * WIDTH * 64


def attention_flops(batch: int) -> int:
    """Both products, over the full square."""
    return 3 * 2 * (2 * batch * 2 * LENGTH * LENGTH * WIDTH)


def test_readings_come_a_batch_late_but_at_their_own_step_and_leave_out_the_first() -> None:
    memory = fit(FP8Throughput(every_n_steps=2))
    # Batches 0 | 1 2 | 3 4 | 5 6, filed under the last of each, as Lightning counts them.
    assert [step for step, _ in memory.rows] == [2, 4, 6]


def test_rates_agree_with_each_other_and_with_the_price() -> None:
    callback = FP8Throughput(every_n_steps=2, price_per_device_hour=3.0)
    row = fit(callback).rows[-1][1]
    rate = row["throughput/tokens_per_second"]
    assert rate == pytest.approx(row["throughput/steps_per_second"] * 4 * LENGTH)
    assert row["throughput/cost_per_billion_tokens"] == pytest.approx(1e9 / rate / 3600 * 3.0)
    flops = sum(linear_flops(4 * LENGTH)) + attention_flops(4)
    assert row["throughput/tflops_per_device"] == pytest.approx(flops * row["throughput/steps_per_second"] / 1e12)
    assert "throughput/mfu" not in row and callback.metrics == row


def test_mfu_puts_fp8_and_high_precision_each_against_its_peak() -> None:
    callback = FP8Throughput(every_n_steps=2, peak=(1.0, 2.0), flops=lambda batch: (8e12, 6e12))
    row = fit(callback).rows[-1][1]
    # 8 TFLOP at 2 TFLOP/s and 6 at 1 take 10 s at least.
    assert row["throughput/mfu"] == pytest.approx(10 * row["throughput/steps_per_second"])


def test_accumulated_batches_count_as_one_step() -> None:
    row = fit(FP8Throughput(every_n_steps=1), steps=4, accumulate_grad_batches=2).rows[-1][1]
    assert row["throughput/tokens_per_second"] == pytest.approx(2 * 4 * LENGTH * row["throughput/steps_per_second"])


def test_validation_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("lightning_fp8.callbacks.throughput.time.perf_counter", lambda: now[0])

    class Slow(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            now[0] += 1.0
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            now[0] += 100.0

    memory = Memory()
    data = DataLoader(torch.randint(64, (64, LENGTH)), batch_size=4)
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=9, val_check_interval=3, limit_val_batches=1, logger=memory,
        callbacks=[FP8Throughput(every_n_steps=4)], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Slow(), data, data)
    assert [row["throughput/steps_per_second"] for _, row in memory.rows] == [1.0, 1.0]


def test_samples_and_a_count_of_ones_own() -> None:
    counted = fit(FP8Throughput(every_n_steps=2, unit="samples")).rows[-1][1]
    assert counted["throughput/samples_per_second"] == pytest.approx(4 * counted["throughput/steps_per_second"])
    own = fit(FP8Throughput(every_n_steps=2, unit="tokens", count=lambda batch: 5)).rows[-1][1]
    assert own["throughput/tokens_per_second"] == pytest.approx(5 * own["throughput/steps_per_second"])


@dataclass
class Record:
    tokens: Tensor


class Sealed:
    """What moves itself to a device."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def to(self, *args: Any, **kwargs: Any) -> Sealed:
        return self


class Packed(Net):
    """Takes what holds the tokens."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["tokens"] if isinstance(batch, UserDict) else batch.tokens, batch_idx)


@pytest.mark.parametrize("pack", [Record, lambda tokens: UserDict(tokens=tokens)])
def test_tensors_of_a_batch_are_found_wherever_lightning_finds_them(pack: Any) -> None:
    data = DataLoader(torch.randint(64, (64, LENGTH)), 4, collate_fn=lambda rows: pack(torch.stack(rows)))
    row = fit(FP8Throughput(every_n_steps=2), data=data, model=Packed()).rows[-1][1]
    assert row["throughput/tokens_per_second"] == pytest.approx(4 * LENGTH * row["throughput/steps_per_second"])


@pytest.mark.filterwarnings("default")
def test_a_batch_that_nobody_can_look_into_is_no_zero() -> None:
    data = DataLoader(torch.randint(64, (64, LENGTH)), 4, collate_fn=lambda rows: Sealed(torch.stack(rows)))
    with pytest.warns(UserWarning, match="no samples in a batch of type Sealed.*count=") as warned:
        row = fit(FP8Throughput(every_n_steps=2, price_per_device_hour=1.0), data=data, model=Packed()).rows[-1][1]
    assert sum("no samples" in str(warning.message) for warning in warned) == 1
    assert list(row) == ["throughput/steps_per_second"]


def test_any_logger_takes_it(tmp_path: Path) -> None:
    fit(FP8Throughput(every_n_steps=2), logger=CSVLogger(tmp_path))
    text = next(tmp_path.rglob("metrics.csv")).read_text()
    assert "throughput/tokens_per_second" in text.splitlines()[0]


def test_counting_changes_no_number_of_the_training() -> None:
    def trained(callback: FP8Throughput) -> Tensor:
        pl.seed_everything(0)
        model = Net()
        fit(callback, model=model)
        return model.up.weight.detach()

    assert torch.equal(trained(FP8Throughput()), trained(FP8Throughput(flops=lambda batch: 1.0)))


def test_a_second_fit_counts_anew_only_where_the_model_is_another() -> None:
    class Wide(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2 * WIDTH, 64 * 5)

    callback, model = FP8Throughput(), Net()
    data = DataLoader(torch.randint(64, (8, LENGTH)), batch_size=4)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, callbacks=[callback], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, data)
    first = callback._counted
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, data)
    assert callback._counted is first
    trainer.fit_loop.max_epochs = 3
    trainer.fit(Wide(), data)
    assert callback._counted is not None and first is not None and callback._counted[0].high > first[0].high


def test_the_unit_is_found_anew_in_another_run() -> None:
    class OfNumbers(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch.long(), batch_idx)

    callback = FP8Throughput(every_n_steps=2)
    assert "throughput/tokens_per_second" in fit(callback).rows[-1][1]
    data = DataLoader(torch.zeros(64, LENGTH), batch_size=4)
    row = fit(callback, model=OfNumbers(), data=data).rows[-1][1]
    assert row["throughput/samples_per_second"] == pytest.approx(4 * row["throughput/steps_per_second"])


def test_the_first_batch_runs_uncompiled_and_the_second_compiled() -> None:
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(stage[0])
        return graph.forward

    stage = [0]

    class Compiled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.twice = torch.compile(lambda x: x * 2, backend=backend)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            stage[0] = batch_idx
            return self.twice(super().training_step(batch, batch_idx))

    fit(FP8Throughput(), steps=4, model=Compiled(), plugins=None)
    assert graphs == [1]


@pytest.mark.parametrize("automatic", [True, False])
def test_a_first_batch_that_is_left_out_is_not_the_one_that_is_counted(automatic: bool) -> None:
    class LeavesOut(Net):
        automatic_optimization = automatic

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:  # type: ignore[override]
            if batch_idx == 0:
                return None
            loss = super().training_step(batch, batch_idx)
            if not automatic:
                self.manual_backward(loss)
                self.optimizers().step()  # type: ignore[union-attr]
            return loss

    callback, whole = FP8Throughput(), FP8Throughput()
    fit(callback, model=LeavesOut(), steps=3)
    fit(whole, steps=1)
    assert callback._counted == whole._counted


def left_on() -> tuple[int, bool]:
    """Dispatch modes, and whether compiled code runs eagerly."""
    return torch._C._len_torch_dispatch_stack(), torch._dynamo.eval_frame._stance.stance == "force_eager"


def test_a_failing_first_batch_leaves_nothing_behind() -> None:
    class Failing(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            raise RuntimeError("no")

    callback = FP8Throughput()
    with pytest.raises(RuntimeError, match="no"):
        fit(callback, model=Failing())
    assert callback._counting is None and left_on() == (0, False)


@pytest.mark.parametrize("leaves", [1, 2, 4])
def test_epochs_that_are_left_as_they_begin_leave_nothing_behind(leaves: int) -> None:
    """Neither in the epochs after them, nor after the fit."""
    seen = []

    class Leaving(Net):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
            return -1 if self.current_epoch < leaves else None

        def on_train_epoch_end(self) -> None:
            seen.append(left_on())

    callback, whole = FP8Throughput(), FP8Throughput()
    fit(callback, model=Leaving(), steps=-1, max_epochs=4)
    assert seen == [(0, False)] * 4 and left_on() == (0, False)
    fit(whole, steps=1)
    assert callback._counted == (whole._counted if leaves < 4 else None)


@pytest.mark.parametrize("first", ["throughput", "monitor"])
def test_beside_extra_statistics_compiled_code_runs_again_after_the_batch(first: str) -> None:
    seen = []

    class Watching(Net):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            seen.append(left_on()[1])

    callback, monitor = FP8Throughput(), AmaxMonitor(1, statistics_every_n_steps=4)
    callbacks = [callback, monitor] if first == "throughput" else [monitor, callback]
    fit(callback, model=Watching(), steps=6, callbacks=callbacks)
    assert seen == [True, False, False, False, True, False] and left_on() == (0, False)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be at least 1 or None, got 0"),
        ({"every_n_steps": 2.5}, "every_n_steps must be a whole number"),
        ({"every_n_steps": float("nan")}, "every_n_steps must be a whole number"),
        ({"every_n_steps": float("inf")}, "every_n_steps must be a whole number"),
        ({"price_per_device_hour": -1.0}, "price_per_device_hour"),
        ({"price_per_device_hour": float("nan")}, "price_per_device_hour must be positive and finite, got nan"),
        ({"price_per_device_hour": float("inf")}, "price_per_device_hour must be positive and finite, got inf"),
        ({"flops": -1}, "flops must be a function of a batch or None, got -1"),
        ({"count": 5, "unit": "tokens"}, "count must be a function of a batch or None, got 5"),
        ({"peak": (1.0, 0.0)}, "peak"),
        ({"peak": (1.0, float("nan"))}, "peak must be two positive and finite numbers"),
        ({"peak": {}}, r"peak must be two numbers in TFLOP/s, \(bf16, fp8\), or None, got \{\}"),
        ({"peak": {"bf16": 1}}, r"peak must be two numbers .* got \{'bf16': 1\}"),
        ({"peak": (1.0,)}, "peak must be two numbers"),
        ({"peak": 5}, "peak must be two numbers"),
        ({"peak": ("1", 2.0)}, "peak of bf16 must be a number, got '1'"),
        ({"unit": "bytes"}, "unit"),
        ({"count": len}, "unit"),
    ],
)
def test_wrong_values(settings: dict[str, Any], word: str) -> None:
    with pytest.raises((ValueError, TypeError), match=word):
        FP8Throughput(**settings)


# --- what StepFlops counts


def pretend_native(model: nn.Module) -> None:
    for conversion in conversions(model):
        conversion.support = Support("native", "for this test")


def test_fp8_flops_are_those_of_native_layers_and_the_rest_is_not_counted_twice() -> None:
    model = convert_model(Net())
    assert _converted_layers(model) == ([], [model.up])
    pretend_native(model)
    assert _converted_layers(model) == ([model.up], [])
    tokens = torch.randint(64, (4, LENGTH))
    with StepFlops(*_converted_layers(model)) as counter:
        loss = model.training_step(tokens, 0)
    loss.backward()
    up, head = linear_flops(4 * LENGTH)
    assert counter.flops == (up, head + attention_flops(4))


def test_layers_that_train_nothing_have_fewer_products() -> None:
    model = convert_model(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), layers=LayerSelection(head=True))
    pretend_native(model)
    model[0].requires_grad_(False)
    with StepFlops(*_converted_layers(model)) as counter:
        model(torch.randn(16, 32))
    one = 2 * 16 * 32 * 32
    assert counter.flops.fp8 == one * 1 + one * 2  # The second takes no gradient for its input.
    assert counter.flops.high == 0


class Products(pl.LightningModule):
    """Three layers of one size; the first takes no gradient for its input."""

    def __init__(self, frozen: tuple[str, ...] = (), reentrant: bool | None = None) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))
        self.reentrant = reentrant
        for name in frozen:
            getattr(self, name).requires_grad_(False)

    def body(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.c(self.body(x))
        return self.c(checkpoint(self.body, x, use_reentrant=self.reentrant))

    def training_step(self, x: Tensor) -> Tensor:
        return self(x).square().sum()


class Distilled(Products):
    def training_step(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self(x)
        return (self(x) - target).square().sum()


class Convolved(Products):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv1d(1, 32, 32, stride=32)  # Of the size of a linear layer.

    def training_step(self, x: Tensor) -> Tensor:
        return super().training_step(self.patches(x.view(1, 1, -1))[0].t())


class Batched(Products):
    """The weights multiply by bmm and by baddbmm."""

    def body(self, x: Tensor) -> Tensor:
        y = torch.bmm(x[None], self.a.weight[None])
        return torch.baddbmm(torch.zeros_like(y), F.relu(y), self.b.weight[None])[0]


@pytest.mark.parametrize("kind", ["native", "emulated", "high"])
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Products(), 8),
        (Products(frozen=("a", "b")), 4),  # Of these, forwards and one weight's gradient run.
        (Products(frozen=("b",)), 7),
        (Products(reentrant=False), 8),
        (Products(reentrant=True), 9),  # Whether the input takes a gradient is not seen.
        (Distilled(), 3 + 8),
        (Convolved(), 2 + 9),
        (Batched(), 8),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Products) else str(value),
)
def test_what_takes_no_gradient_counts_less_in_whatever_precision(model: Products, expected: int, kind: str) -> None:
    model = copy.deepcopy(model)
    if kind != "high":
        convert_model(model, layers=LayerSelection(head=True))
    if kind == "native":
        pretend_native(model)
    with StepFlops(*_converted_layers(model)) as counter:
        with torch.autocast("cpu", torch.bfloat16):
            # 15 rows: emulated products have 16, which are none of the model's.
            loss = model.training_step(torch.randn(15, 32).requires_grad_(model.reentrant is True))
        # It is counted already, and so is what checkpointing computes again.
        loss.backward()
    one = 2 * 15 * 32 * 32
    assert sum(counter.flops) == expected * one
    if kind != "native":
        assert counter.flops.fp8 == 0


def test_a_backward_that_is_differentiated_counts_as_a_forward() -> None:
    x, w = torch.randn(15, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)
    with StepFlops([]) as counter:
        (slope,) = torch.autograd.grad((x @ w).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
    # Two products, each with two of its backward.
    assert counter.flops.high == 2 * 3 * 2 * 15 * 32 * 32


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("through", ["the Trainer", "loss.backward"])
def test_steps_by_hand_count_as_lightning_takes_them(through: str, precision: str) -> None:
    """With two optimizers, each with a loss of its own."""

    class ByHand(Net):
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                loss = super().training_step(batch, batch_idx)
                self.manual_backward(loss) if through == "the Trainer" else loss.backward()
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(layer.parameters()) for layer in (self.up, self.head)]

    callback = FP8Throughput()
    fit(callback, steps=2, model=ByHand(), plugins=[FP8Precision()] if precision == "fp8" else None)
    assert callback._counted is not None
    up, head = linear_flops(4 * LENGTH)
    assert sum(callback._counted[0]) == 2 * (up + head + attention_flops(4))


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_inputs_count_by_their_rows(layout: torch.layout) -> None:
    model = convert_model(nn.Linear(32, 64), "tensorwise", layers=LayerSelection(head=True))
    x = torch.nested.nested_tensor([torch.ones(2, 32), torch.ones(3, 32)], layout=layout)
    with StepFlops(*_converted_layers(model)) as counter:
        model(x)
    assert counter.flops == (0, 2 * 2 * 5 * 32 * 64)


def test_products_inside_an_autograd_function_count_their_backward() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            return grad @ w.t(), x.t() @ grad

    with StepFlops([]) as counter:
        Product.apply(torch.randn(16, 32), torch.randn(32, 32).requires_grad_())
    assert counter.flops.high == 3 * 2 * 16 * 32 * 32


def test_local_products_of_dtensors_count_as_theirs(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = parallelize_module(Products(frozen=("b",)), mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})
        with StepFlops([]) as counter:
            model.training_step(torch.randn(16, 32))
    finally:
        dist.destroy_process_group()
    assert counter.flops.high == 7 * 2 * 16 * 32 * 32


def test_inputs_by_keyword_count_as_well() -> None:
    model = convert_model(nn.Linear(32, 64), layers=LayerSelection(head=True))
    with StepFlops([model]) as counter:
        model(input=torch.randn(16, 32))
    assert counter.flops.fp8 == 2 * 2 * 16 * 32 * 64


def test_peaks_are_dense_and_by_name() -> None:
    assert peak_of("NVIDIA H100 80GB HBM3") == peak_of("NVIDIA H100 80GB HBM3e")
    assert peak_of("NVIDIA H100 PCIe") != peak_of("NVIDIA H100 80GB HBM3")
    h200 = peak_of("NVIDIA H200")
    assert h200 is not None and h200.ideal_seconds(1979e12, 989.5e12) == pytest.approx(2.0)
    assert peak_of("NVIDIA B200") is not None and peak_of("Radeon") is None
    assert peak_of("NVIDIA L40S") != peak_of("NVIDIA L4")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_events_give_an_mfu_between_0_and_1() -> None:
    row = fit(FP8Throughput(every_n_steps=2), accelerator="gpu", devices=1).rows[-1][1]
    assert 0 < row.get("throughput/mfu", 0.5) < 1 and row["throughput/steps_per_second"] > 0


def test_flex_attention_goes_on_uncounted() -> None:
    """It is no plain operation, and has no formula; on the CPU it has no backward either."""
    from torch.nn.attention.flex_attention import flex_attention

    layer, x = nn.Linear(16, 16), torch.randn(1, 2, 16, 16)
    with torch.compiler.set_stance("force_eager"), torch.no_grad(), StepFlops([]) as counted:
        y = flex_attention(layer(x), x, x)
    assert y.isfinite().all() and sum(counted.flops) == 2 * x.numel() * 16
