"""What each of two ranks checks. One spawn runs them all; ``test_ddp.py`` shows their outcomes one by one."""

from __future__ import annotations

import logging
import os
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainer_models import (
    Net,
    StatefulLoader,
    assert_same,
    dataset,
    differs,
    fp8_state,
    loader,
    make_trainer,
    plugin,
)

from lightning_fp8 import DelayedScaling, FP8Communication, SkipBatchException, SkipBatchRecovery
from lightning_fp8.fabric import FP8Precision as FabricFP8Precision
from lightning_fp8.statistics import AMAX, LAST_AMAX, SCALE

WORLD = 2


def rank() -> int:
    return dist.get_rank()


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * WORLD
    dist.all_gather_object(values, value)
    return values


def assert_ranks_agree(value: Any, what: str) -> None:
    first, *others = gathered(value)
    for other in others:
        assert_same(first, other, what)


def trainer_of(precision: Any = None, find_unused: bool = False, **kwargs: Any) -> Any:
    strategy = DDPStrategy(process_group_backend="gloo", find_unused_parameters=find_unused)
    return make_trainer(precision, devices=WORLD, strategy=strategy, **kwargs)


def fit(
    model: Any,
    precision: Any = None,
    *,
    data: Any = None,
    find_unused: bool = False,
    ckpt_path: Path | None = None,
    **kwargs: Any,
) -> Any:
    trainer = trainer_of(precision, find_unused, **kwargs)
    torch.manual_seed(7 + rank())
    trainer.fit(model, data if data is not None else loader(48), ckpt_path=ckpt_path)
    return trainer


@contextmanager
def counted_reductions() -> Iterator[list[int]]:
    """The sizes of all tensors that Python code gives to ``all_reduce`` (DDP reduces gradients in C++)."""
    sizes: list[int] = []
    original = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.numel() > 1:  # Lightning's own decisions are single numbers.
            sizes.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield sizes
    finally:
        dist.all_reduce = original


# --- checks ----------------------------------------------------------------------------------------------------------


def check_ranks_are_equal_after_every_step(folder: Path) -> None:
    class Compare(pl.Callback):
        steps = 0

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            assert_ranks_agree(dict(module.state_dict()), "weights")
            assert_ranks_agree(trainer.optimizers[0].state_dict(), "optimizer")
            self.steps += 1

    class CompareScales(pl.Callback):
        def on_before_zero_grad(self, trainer: Any, *args: Any) -> None:
            # Between forward and backward of a step that has moved the scales.
            if trainer.global_step > 0 and "history" in fp8_state(trainer)["runtime"]:
                state = fp8_state(trainer)["runtime"]
                assert_ranks_agree(state["table"]["data"][..., SCALE].contiguous(), "scales")
                assert_ranks_agree(state["history"], "history")

    for recipe in ("delayed", "tensorwise", "rowwise"):
        compare = Compare()
        model = Net()
        fit(model, plugin(None if recipe == "delayed" else recipe), callbacks=[compare, CompareScales()])
        assert compare.steps == 6
        one, other = gathered(model.losses)
        assert differs(one, other), "the ranks saw the same data"


def check_one_reduction_a_step_takes_the_largest_amax(folder: Path) -> None:
    class Note(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.amaxes = [*getattr(self, "amaxes", []), batch[0].abs().max()]
            return super().training_step(batch, batch_idx)

    model = Note(dropout=0.0)
    with counted_reductions() as sizes:
        trainer = fit(model, plugin(DelayedScaling(amax_history_len=8)))
    assert sizes == [2 * 3] * 5, sizes
    one, other = (torch.stack(amaxes) for amaxes in gathered(model.amaxes))
    assert differs(one, other)
    # The last step's amaxes wait for the next one.
    assert torch.equal(fp8_state(trainer)["runtime"]["history"][0, 0, :5], torch.maximum(one, other)[:5])
    with counted_reductions() as sizes:
        fit(Net(), plugin(DelayedScaling(reduce_amax=False)))
        fit(Net(), plugin("rowwise"))
    assert sizes == []


def check_accumulation_and_clipping(folder: Path) -> None:
    for algorithm in ("norm", "value"):
        model = Net("adamw")
        with counted_reductions() as sizes:
            fit(model, accumulate_grad_batches=2, gradient_clip_val=0.1, gradient_clip_algorithm=algorithm)
        assert len(sizes) == 2, sizes  # Three optimizer steps: the last one's amaxes wait for a step to come.
        assert_ranks_agree(dict(model.state_dict()), "weights")


class Branches(Net):
    """Uses one layer on rank 0 only, one on rank 1 only, one in the first two steps only, one never."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        torch.manual_seed(3)
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.end = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.branches[rank()](self.body(x))
        if self.global_step < 2:
            x = self.branches[2](x)
        return self.end(x) + self.head(x)


def check_unused_parameters(folder: Path) -> None:
    model = Branches()
    trainer = fit(model, plugin(DelayedScaling(amax_history_len=8)), find_unused=True)
    assert_ranks_agree(dict(model.state_dict()), "weights")
    state = fp8_state(trainer)["runtime"]
    names = state["table"]["names"]
    rows = [names.index(f"branches.{i}") for i in range(4)]
    assert state["position"][rows, 0].tolist() == [5, 5, 2, 0]
    assert (state["table"]["data"][rows[3]][:, SCALE] == 0).all()
    assert_ranks_agree([state["history"], state["position"]], "history")
    assert_ranks_agree(state["table"]["data"][..., SCALE].contiguous(), "scales")


def check_a_bad_value_on_one_rank_reaches_no_history(folder: Path) -> None:
    class Poison(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            if batch_idx == 1 and rank() == 1:
                x = torch.full_like(x, float("inf") if self.infinite else float("nan"))
            return super().training_step((x, y), batch_idx)

    for infinite in (True, False):
        model = Poison(dropout=0.0)
        model.infinite = infinite
        with torch.no_grad():
            model.body[0].weight.requires_grad_(True)
        trainer = fit(model, plugin(DelayedScaling(amax_history_len=8)), max_steps=4)
        state = fp8_state(trainer)["runtime"]
        assert state["history"].isfinite().all()
        assert state["position"][0, 0] == 2, "three steps were entered, one of them bad"
        assert not state["table"]["data"][0, 0, LAST_AMAX].isnan()
        assert_ranks_agree([state["history"], state["position"]], "history")


def check_buffer_broadcast_leaves_the_scales_alone(folder: Path) -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__(dropout=0.0)
            self.batch_norm = nn.BatchNorm1d(16)
            self.amaxes: list[tuple[Tensor, Tensor]] = []

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.batch_norm(x * (1 + rank())))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            row = self.trainer.precision_plugin.conversions[0].runtime.table.data[0, 0]
            self.amaxes.append(row[AMAX].clone())
            return loss

    model = Normed()
    fit(model)
    one, other = gathered(model.amaxes)
    assert differs(one, other), "a rank's own amaxes were overwritten"


def check_overflow_on_one_rank_skips_on_both(folder: Path) -> None:
    class Overflow(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.before = [p.detach().clone() for p in self.parameters()]
            return loss * (float("inf") if batch_idx == 1 and rank() == 1 else 1.0)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            moved = differs(self.before, [p.detach() for p in self.parameters()])
            assert moved == (batch_idx != 1), batch_idx

    model = Overflow()
    trainer = fit(model, plugin(loss_scale="dynamic"), max_steps=4)
    assert_ranks_agree(dict(model.state_dict()), "weights")
    assert_ranks_agree(trainer.precision_plugin.settings.loss_scaler.state_dict(), "loss scale")
    assert trainer.precision_plugin.settings.loss_scaler.state_dict()["scale"] == 65536.0 / 2


def check_a_batch_left_out_on_one_rank_does_not_move_the_loss_scale(folder: Path) -> None:
    class LeavesOut(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            loss = super().training_step(batch, batch_idx)
            if rank() == 0 or batch_idx > 2:
                return loss
            if batch_idx == 2:
                raise SkipBatchException("bad data")
            return recovery.reject(loss) if batch_idx == 1 else None

    recovery = SkipBatchRecovery(log=None)
    trainer = fit(LeavesOut("sgd"), plugin(loss_scale="dynamic"), callbacks=[recovery], max_steps=6)
    state = trainer.precision_plugin.settings.loss_scaler.state_dict()
    assert recovery.events.counts["rejected"] == 3
    assert state["scale"] == 65536.0 and state["_growth_tracker"] == 3


def check_batches_are_left_out_in_finders(folder: Path) -> None:
    class LeavesOut(Net):
        way = ""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            loss = super().training_step(batch, batch_idx)
            if rank() == 0 or batch_idx != 2:
                return loss
            if self.way == "exception":
                raise SkipBatchException("bad data")
            return recovery.reject(loss) if self.way == "reject" else None

    for way in ("none", "exception", "reject"):
        recovery, model = SkipBatchRecovery(log=None), LeavesOut()
        model.way = way
        trainer = trainer_of(callbacks=[recovery], default_root_dir=folder, enable_checkpointing=True)
        finder = Tuner(trainer).lr_find(model, loader(48), num_training=5)
        assert torch.tensor(finder.results["loss"]).isfinite().all() and not recovery.events.recent
        trainer.fit(model, loader(48))
        assert recovery.events.counts["rejected"] == 1


class RankLoader(StatefulLoader):
    """Each rank's own data."""

    def __init__(self) -> None:
        super().__init__()
        self.data = dataset(24, seed=10 + rank())


def check_resume_is_bit_identical(folder: Path) -> None:
    """At an epoch's end and in mid-epoch; with smoothing, whose scales remember their own past."""
    runs: list[tuple[Any, tuple[int, ...]]] = [
        (DelayedScaling(amax_history_len=3), (4, 6)),
        (DelayedScaling(amax_history_len=3, smoothing=0.5), (1, 8)),
        (DelayedScaling(amax_history_len=3, reduce_amax=False), (5,)),
        ("rowwise", (7,)),
    ]
    for number, (recipe, steps) in enumerate(runs):
        name = f"run-{number}"

        def once(path: Path, resume: Any = None, recipe: Any = recipe) -> Any:
            model = Net()
            saver = ModelCheckpoint(path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
            trainer = trainer_of(
                plugin(recipe),
                max_epochs=2,
                callbacks=[saver],
                enable_checkpointing=True,
                use_distributed_sampler=False,
            )
            torch.manual_seed((7 if resume is None else 99) + rank())
            trainer.fit(model, RankLoader(), ckpt_path=resume)
            return trainer, model

        whole, model = once(folder / name)
        for step in steps:
            resumed, again = once(folder / f"{name}-{step}", folder / name / f"step={step}.ckpt")
            assert len(again.losses) == 12 - step
            assert_same(model.losses[step:], again.losses, f"losses after {step}, {name}")
            assert_same(dict(model.state_dict()), dict(again.state_dict()), f"weights after {step}, {name}")
            if isinstance(recipe, DelayedScaling) and not recipe.reduce_amax:
                one, other = gathered(fp8_state(resumed)["runtime"]["history"])
                assert differs(one, other), "each rank has a history of its own"
            if recipe != "rowwise":  # There amaxes are for people to read, and rank 0's are kept.
                assert_same(fp8_state(whole), fp8_state(resumed), f"fp8 after {step}, {name}")


def check_resume_inside_an_accumulation_window_keeps_all_ranks_amaxes(folder: Path) -> None:
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                self.own = trainer.precision_plugin.conversions[0].runtime.table.amax.clone()
                trainer.save_checkpoint(folder / "window.ckpt")

    save = Save()
    trainer_kwargs = {"accumulate_grad_batches": 3, "max_epochs": 1, "use_distributed_sampler": False}
    trainer = trainer_of(callbacks=[save], **trainer_kwargs)
    torch.manual_seed(rank())
    trainer.fit(Net(), RankLoader())
    saved = torch.load(folder / "window.ckpt", weights_only=True)["lightning_fp8"]["conversions"][0]
    largest = torch.stack(gathered(save.own)).amax(0)
    assert_same(saved["runtime"]["table"]["data"][..., AMAX].contiguous(), largest, "amaxes of the window")


def check_one_rank_alone_saves_after_an_exception(folder: Path) -> None:
    """As ``OnExceptionCheckpoint`` asks for, on whichever rank raises: no other rank is waited for."""

    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 3:
                raise RuntimeError(f"rank {rank()} fails")
            return super().training_step(batch, batch_idx)

    class NoBarrier(DDPStrategy):
        """Lightning's own wait after a save is beside the point."""

        def barrier(self, name: str | None = None) -> None:
            if name != "Trainer.save_checkpoint":
                super().barrier(name)

    recovery = SkipBatchRecovery(log=None)
    communication = FP8Communication(min_numel=0, error_feedback=True)
    saver = [OnExceptionCheckpoint(folder)] if rank() == 0 else []
    trainer = make_trainer(
        devices=WORLD,
        strategy=NoBarrier(process_group_backend="gloo"),
        callbacks=[recovery, communication, *saver],
        enable_checkpointing=bool(saver),
    )
    with pytest.raises(RuntimeError, match=f"rank {rank()} fails"):
        trainer.fit(Fails(), loader(48))
    dist.barrier()
    checkpoint = torch.load(folder / "on_exception.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 3 and checkpoint["callbacks"]["FP8Communication"]["residuals"]
    model = Net()
    with pytest.warns(UserWarning, match="after an exception"):
        fit(model, max_epochs=2, max_steps=6, ckpt_path=folder / "on_exception.ckpt")
    assert len(model.losses) == 3


def check_another_number_of_ranks_is_warned_of(folder: Path) -> None:
    fit(Net(), max_steps=2).save_checkpoint(folder / "two.ckpt")
    checkpoint = torch.load(folder / "two.ckpt", weights_only=True)
    assert len(checkpoint["lightning_fp8"]["rng"]) == WORLD
    checkpoint["lightning_fp8"]["rng"] = checkpoint["lightning_fp8"]["rng"][:1]
    if rank() == 0:
        torch.save(checkpoint, folder / "one.ckpt")
    dist.barrier()
    model = Net()
    trainer = trainer_of(max_epochs=2, max_steps=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, loader(48), ckpt_path=folder / "one.ckpt")
    assert any("number of ranks changed" in str(w.message) for w in caught)
    assert len(model.losses) == 2


def check_validation_and_prediction(folder: Path) -> None:
    model = Net()
    trainer = trainer_of()
    with counted_reductions() as sizes:
        trainer.predict(model, loader(48))
    assert sizes == []
    assert trainer.precision_plugin.conversions[0].converted == ["body.0", "body.3"]


def trained_in_fabric(recipe: DelayedScaling) -> tuple[FabricFP8Precision, list[int], nn.Module]:
    """The precision, the reductions that it made, and the model, with which its conversions live."""
    precision = FabricFP8Precision(recipe)
    strategy = FabricDDPStrategy(process_group_backend="gloo")
    fabric = Fabric(accelerator="cpu", devices=WORLD, strategy=strategy, plugins=[precision])
    fabric.launch()
    net = Net(dropout=0.0)
    raw = nn.Sequential(net.body, net.head)
    model, optimizer = fabric.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    batches = fabric.setup_dataloaders(DataLoader(dataset(48), batch_size=4))
    with counted_reductions() as sizes:
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            assert_ranks_agree([p.detach() for p in raw.parameters()], "weights")
    return precision, sizes, raw


def check_fabric(folder: Path) -> None:
    precision, sizes, model = trained_in_fabric(DelayedScaling(amax_history_len=8))
    assert sizes == [2 * 3] * 5, sizes
    # Any rank's state stands for all of them.
    assert len(precision.conversions) == 1
    assert_ranks_agree(precision.state_dict(), "fp8")
    precision, sizes, model = trained_in_fabric(DelayedScaling(amax_history_len=8, reduce_amax=False))
    assert sizes == []
    everybodys, own = precision.state_dict(), precision.conversions[0].state_dict()
    assert_ranks_agree(everybodys["conversions_of_ranks"], "all ranks' states")
    again, _, other = trained_in_fabric(DelayedScaling(amax_history_len=8, reduce_amax=False))
    again.load_state_dict(gathered(everybodys)[0])
    assert_same(again.conversions[0].state_dict(), own, "resumed")
    assert model is not other


CHECKS = {name: function for name, function in list(globals().items()) if name.startswith("check_")}


def run_rank(rank: int, folder: str, port: int) -> None:
    """Run all checks; what each raised goes to a file of its own."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NODE_RANK="0", LOCAL_RANK=str(rank))
    os.environ["WORLD_SIZE"] = str(WORLD)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    for name, check in CHECKS.items():
        path = Path(folder) / name
        if rank == 0:
            path.mkdir()
        dist.barrier()
        outcome = "passed"
        try:
            check(path)
        except BaseException:
            outcome = traceback.format_exc()
        (Path(folder) / f"{name}-{rank}.txt").write_text(outcome)
        # One rank's failure may have left the other in a collective; whoever survives says so by timing out.
    dist.destroy_process_group()
