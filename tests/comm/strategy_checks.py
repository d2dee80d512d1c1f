"""What must hold of FP8Communication and the precision classes under Lightning's strategies. Run by
test_comm_strategies.py."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rank_checks import device, folder, same_on_all_ranks
from shard_models import VOCABULARY, Decoder
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_fp8 import (
    AmaxMonitor,
    EMAOfAcceptedSteps,
    FP8Communication,
    FP8FSDPPrecision,
    FP8Precision,
    FP8Report,
    LayerSelection,
)
from lightning_fp8.callbacks.recovery import SkipBatchException, SkipBatchRecovery
from lightning_fp8.comm.links import DEFAULT_MIN_NUMEL
from lightning_fp8.comm.tensor_parallel import ColwiseParallel, RowwiseParallel
from lightning_fp8.linear import Float8Linear
from tests.keeping import Keep

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(pl.LightningModule):
    """Trains a decoder; its own embedding and head are used by the steps themselves."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        torch.manual_seed(1)
        self.net = Decoder(**options)
        self.losses: list[Tensor] = []
        self.val_losses: list[Tensor] = []

    def loss(self, text: Tensor) -> Tensor:
        x = self.net.embedding(text)
        for block in self.net.blocks:
            x = block(x)
        return F.cross_entropy(self.net.head(x).float().flatten(0, 1), text.flatten().roll(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.val_losses.append(self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # On a GPU torch's default for one optimizer mixes no split parameters with whole ones.
        return torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=False)


class Sharded(Module):
    """Shards itself."""

    def __init__(self, shard: dict[str, Any], **options: Any) -> None:
        super().__init__(**options)
        self.shard = shard

    def configure_model(self) -> None:
        self.trainer.precision_plugin.shard(self, self.device_mesh, **self.shard)


class CPUFSDPStrategy(FSDPStrategy):
    """FSDP1 takes the current accelerator where nobody names a device."""

    def _setup_model(self, model: Any) -> Any:
        if self.root_device.type == "cpu":
            return torch.distributed.fsdp.FullyShardedDataParallel(
                model, mixed_precision=self.mixed_precision_config, device_id=torch.device("cpu"), **self.kwargs
            )
        return super()._setup_model(model)


def data(batches: int = 4) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(torch.randint(0, VOCABULARY, (2 * batches * dist.get_world_size(), 16), generator=generator), 2)


def trainer(strategy: Any, plugin: Any = None, **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "gpu" if device().type == "cuda" else "cpu",
        "devices": dist.get_world_size(),
        "strategy": strategy,
        "plugins": [plugin or FP8Precision(layers=LayerSelection())],
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
        **options,
    }
    return pl.Trainer(**settings)


def fit(model: Module, strategy: Any, *, ckpt_path: Any = None, **options: Any) -> pl.Trainer:
    run = trainer(strategy, **options)
    torch.manual_seed(7)
    run.fit(model, data(), ckpt_path=ckpt_path)
    return run


def ddp(**options: Any) -> DDPStrategy:
    return DDPStrategy(process_group_backend=dist.get_backend(), **options)


def model_parallel(tensor: int = 1) -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=dist.get_world_size() // tensor, tensor_parallel_size=tensor)


class SaveFirstEpoch(pl.Callback):
    """Saves a checkpoint as the first epoch ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def mean_losses(model: Module) -> list[float]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, torch.stack(model.losses).cpu())
    return torch.stack(everyone).mean(0).tolist()


def close(a: list[float], b: list[float], tolerance: float = 0.02) -> bool:
    return len(a) == len(b) > 1 and all(abs(x - y) <= tolerance * abs(y) for x, y in zip(a, b, strict=True))


def ddp_really_sends_fp8(rank: int, world: int) -> None:
    plain, fp8 = Module(), Module()
    fit(plain, ddp())
    # On CPU ranks it runs by default; between GPUs of one host only when forced.
    communication = FP8Communication(min_numel=None if device().type == "cpu" else 0)
    fit(fp8, ddp(), callbacks=[communication])
    assert close(mean_losses(fp8), mean_losses(plain)) and mean_losses(fp8) != mean_losses(plain)
    assert all(same_on_all_ranks(p) for p in fp8.parameters())
    traffic = communication.grad_traffic
    assert traffic.calls >= 4 and traffic.sent <= 0.56 * traffic.bf16
    summary = communication.summary()
    assert "all-reduce" in summary and "DDP gathers none" in summary and f"{traffic.sent:,} bytes sent" in summary


def a_link_too_fast_for_fp8_changes_nothing(rank: int, world: int) -> None:
    for make, strategy in ((Module, ddp), (lambda: Sharded({}), model_parallel)):
        plain, off = make(), make()
        fit(plain, strategy())
        communication = FP8Communication()
        # As on GPUs of one host.
        with mock.patch.dict(DEFAULT_MIN_NUMEL, cpu=DEFAULT_MIN_NUMEL["nvlink"], network=DEFAULT_MIN_NUMEL["nvlink"]):
            fit(off, strategy(), callbacks=[communication])
        assert "FP8 is off" in communication.summary() and "min_numel=0 forces it" in communication.summary()
        assert torch.equal(torch.stack(plain.losses), torch.stack(off.losses))
        assert communication.grad_traffic.calls == communication.param_traffic.calls == 0


def a_model_without_fp8_layers_trains(rank: int, world: int) -> None:
    model = Module()
    with pytest.warns(UserWarning, match="No layer of Module runs in FP8"):
        fit(model, ddp(), plugin=FP8Precision(layers=LayerSelection(exclude=["*"])))
    assert len(model.losses) == 4 and torch.stack(model.losses).isfinite().all()


def error_feedback_resumes(rank: int, world: int) -> None:
    path = folder() / f"feedback-{world}.ckpt"

    def options() -> dict[str, Any]:
        return {
            "callbacks": [FP8Communication(min_numel=0, error_feedback=True, stochastic=True), SaveFirstEpoch(path)]
        }

    whole, resumed = Module(), Module()
    run = fit(whole, ddp(), max_epochs=2, **options())
    again = fit(resumed, ddp(), max_epochs=2, ckpt_path=path, **options())
    assert run.global_step == again.global_step == 8
    saved = torch.load(path, weights_only=True)["callbacks"]["FP8Communication"]
    assert set(saved["residuals"]) == {name for name, _ in whole.named_parameters()}
    # DDP puts its buckets in another order after the first step of a process, so blocks hold other neighbours there.
    assert torch.equal(resumed.losses[0], whole.losses[4])
    assert close(mean_losses(resumed), mean_losses(whole)[4:], 2e-3), (mean_losses(resumed), mean_losses(whole)[4:])
    forgetful = Module()
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["callbacks"]["FP8Communication"]
    other = path.with_suffix(".bare")
    if rank == 0:
        torch.save(checkpoint, other)
    dist.barrier()
    fit(forgetful, ddp(), max_epochs=2, ckpt_path=other, **options())
    assert mean_losses(forgetful)[1:] != mean_losses(resumed)[1:]


def ddp_resumes_bit_for_bit_where_buckets_stay(rank: int, world: int) -> None:
    """DDP that looks for unused parameters keeps the buckets it began with."""
    path = folder() / f"buckets-{world}.ckpt"

    whole, resumed = Module(), Module()
    for model, start in ((whole, None), (resumed, path)):
        callbacks = [FP8Communication(min_numel=0, error_feedback=True, stochastic=True), SaveFirstEpoch(path)]
        fit(model, ddp(find_unused_parameters=True), max_epochs=2, callbacks=callbacks, ckpt_path=start)
    assert torch.equal(torch.stack(resumed.losses), torch.stack(whole.losses)[4:])
    for a, b in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b)


def skipped_steps_drop_residuals(rank: int, world: int) -> None:
    class Skip(pl.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer) -> None:
            if self.at == trainer.fit_loop.epoch_loop.batch_idx:
                module.zero_grad(set_to_none=True)

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
            residuals = communication._gradients.state_dict(module.named_parameters())["residuals"]
            self.sums.append(float(sum(r.abs().sum() for r in residuals.values())))

    skip = Skip()
    skip.at, skip.sums = 1, []
    communication = FP8Communication(min_numel=0, error_feedback=True)
    # The callback that looks comes last.
    fit(Module(), ddp(), callbacks=[communication, skip])
    assert [value > 0 for value in skip.sums] == [True, False, True, True]


def fsdp1_trains_in_fp8(rank: int, world: int) -> None:
    reference = Module()
    fit(reference, ddp())
    for communication in (None, FP8Communication(param="bf16", min_numel=0)):
        model = Module()
        strategy = CPUFSDPStrategy(auto_wrap_policy={type(model.net.blocks[0])})
        plugin = FP8FSDPPrecision(layers=LayerSelection())
        run = fit(model, strategy, plugin=plugin, callbacks=[communication] if communication else [])
        assert sum(isinstance(layer, Float8Linear) for layer in run.strategy.model.modules()) == 4
        assert close(mean_losses(model), mean_losses(reference))
        assert len(plugin.conversions[0].converted) == 4
        if communication is not None:
            assert 0 < communication.grad_traffic.sent <= 0.6 * communication.grad_traffic.bf16
            assert "bf16 (FSDP1 has no hook" in communication.summary()


def fsdp2_trains_and_resumes(rank: int, world: int) -> None:
    reference = Module()
    fit(reference, ddp(), max_epochs=2)
    runs = {}
    for name, shard in {"plain": {}, "param": {"param": "fp8"}, "both": {"param": "fp8", "grad": "fp8"}}.items():
        model = Sharded({"min_numel": 0, **shard})
        run = trainer(model_parallel(), max_epochs=1)
        torch.manual_seed(7)
        run.fit(model, data(), data(2))
        assert isinstance(model, FSDPModule)
        runs[name] = mean_losses(model)
        assert all(value.isfinite() for value in model.val_losses)
    assert runs["plain"] == runs["param"] != runs["both"]
    assert close(runs["plain"], mean_losses(reference)[:4]) and close(runs["both"], runs["plain"])

    communication = FP8Communication(min_numel=0)
    model = Sharded({})
    run = fit(model, model_parallel(), callbacks=[communication])
    assert mean_losses(model) == runs["both"]
    assert "reduce-scatter, e4m3" in communication.summary() and "4 layers in FP8" in communication.summary()
    path = folder() / f"fsdp2-{world}"
    run.save_checkpoint(path)
    full = Sharded({})
    fit(full, model_parallel(), callbacks=[FP8Communication(min_numel=0)], max_epochs=2)
    resumed = Sharded({})
    again = fit(resumed, model_parallel(), callbacks=[FP8Communication(min_numel=0)], max_epochs=2, ckpt_path=path)
    assert again.global_step == 8
    assert torch.equal(torch.stack(resumed.losses), torch.stack(full.losses)[4:])
    for a, b in zip(resumed.parameters(), full.parameters(), strict=True):
        assert isinstance(a, DTensor) and torch.equal(a.to_local(), b.to_local())


def stochastic_rounding_resumes(rank: int, world: int) -> None:
    def options() -> dict[str, Any]:
        return {"callbacks": [FP8Communication(min_numel=0, stochastic=True)], "max_epochs": 2}

    path = folder() / f"stochastic-{world}"
    fit(Sharded({}), model_parallel(), **{**options(), "max_epochs": 1}).save_checkpoint(path)
    whole, resumed = Sharded({}), Sharded({})
    fit(whole, model_parallel(), **options())
    fit(resumed, model_parallel(), ckpt_path=path, **options())
    assert torch.equal(torch.stack(resumed.losses), torch.stack(whole.losses)[4:])
    for a, b in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local())


class TwoStepsABatch(Sharded):
    """Its weights change within a training step, whose forward is one within another; FP8 layers beside the blocks."""

    automatic_optimization = False

    def __init__(self, shard: dict[str, Any]) -> None:
        super().__init__(shard)
        self.last = torch.nn.Linear(48, 48)

    def forward(self, text: Tensor) -> Tensor:
        x = self.net.embedding(text)
        for block in self.net.blocks:
            x = block(x)
        return self.net.head(self.last(x))

    def loss(self, text: Tensor) -> Tensor:
        return F.cross_entropy(self(text).float().flatten(0, 1), text.flatten().roll(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            self.losses.append(loss.detach().clone())


def scales_fit_weights_that_change_within_a_step(rank: int, world: int) -> None:
    for recipe in ("delayed", "tensorwise"):
        losses, tables = [], []
        for param in ("bf16", "fp8"):
            model = TwoStepsABatch({"param": param, "min_numel": 0})
            plugin = FP8Precision(recipe, layers=LayerSelection(head=True))
            run = trainer(model_parallel(), plugin, limit_train_batches=2, val_check_interval=1)
            run.fit(model, data(), data(1))
            losses.append(torch.stack(model.losses))
            tables.append(plugin.conversions[0].runtime.table.data)
        assert len(plugin.conversions[0].converted) == 5 and len(losses[0]) == 4
        assert torch.equal(*losses) and torch.equal(*tables), recipe


def sharded_models_save(rank: int, world: int) -> None:
    run = fit(Sharded({"param": "fp8", "min_numel": 0}), model_parallel())
    run.save_checkpoint(folder() / f"from-{world}")


def one_rank_loads_what_others_saved(rank: int, world: int) -> None:
    for saved_by in (1, 2):
        model = Sharded({"param": "fp8", "min_numel": 0})
        run = fit(model, model_parallel(), max_epochs=2, ckpt_path=folder() / f"from-{saved_by}")
        assert isinstance(model, FSDPModule) and isinstance(model.net.head.weight, DTensor)
        assert run.global_step == 8 and len(model.losses) == 4  # The data are as many on each rank.
        assert torch.stack(model.losses).isfinite().all()


def true_bf16_trains_sharded(rank: int, world: int) -> None:
    # New tensors are bf16 by default then; scales and statistics are not.
    losses = {}
    for param in ("bf16", "fp8"):
        plugin = FP8Precision(precision="bf16-true", layers=LayerSelection())
        model = Sharded({"param": param, "min_numel": 0, "activation_checkpointing": True})
        fit(model, model_parallel(), plugin=plugin, gradient_clip_val=0.5, accumulate_grad_batches=2)
        losses[param] = mean_losses(model)
        assert plugin.conversions[0].runtime.table.data.dtype == torch.float32
    assert losses["bf16"] == losses["fp8"]


def constant() -> FP8Precision:
    return FP8Precision(layers=LayerSelection(), loss_scale=8.0)


def fsdp2_with_tensor_parallel_trains(rank: int, world: int) -> None:
    plan = {"net.blocks.*.up": ColwiseParallel(), "net.blocks.*.down": RowwiseParallel()}
    model = Sharded({"tensor_parallel": plan}, hidden=192)
    communication = FP8Communication(min_numel=0)
    # Split parameters beside whole ones, as torch takes neither in clipping nor in unscaling.
    fit(
        model, model_parallel(2), plugin=constant(), callbacks=[communication] if world > 2 else [], gradient_clip_val=1
    )
    losses = torch.stack(model.losses)
    assert len(losses) == 8 and (losses < 10).all()
    pair = dist.new_group([0, 1]), dist.new_group([2, 3]) if world > 2 else None
    assert same_on_all_ranks(losses, pair[rank // 2])


def statistics_are_those_of_weights_as_layers_use_them(rank: int, world: int) -> None:
    """Where the layers themselves are sharded, one by one, and where each rank holds a part."""
    names = [f"net.{name}" for name in ("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head")]
    plan = {"net.blocks.*.up": ColwiseParallel(), "net.blocks.*.down": RowwiseParallel()}
    lines = {}
    for how, model, strategy in (
        ("whole", Module(hidden=64), ddp()),
        ("shards", Sharded({"blocks": names}, hidden=64), model_parallel()),
        ("parts", Sharded({"tensor_parallel": plan}, hidden=64), model_parallel(2)),
    ):
        with torch.no_grad():
            for name in names:
                model.get_submodule(name).weight[-1].mul_(4)  # Which the first rank does not hold.
        keep = Keep()
        monitor = AmaxMonitor(1, statistics_every_n_steps=1, what_if=["tensorwise"])
        fit(model, strategy, callbacks=[monitor], logger=keep, max_epochs=1, limit_train_batches=1)
        lines[how] = keep.lines.get(0, {})
    if rank == 0:  # It alone logs.
        for name in names:
            for statistic in ("weight/amax", "weight/tensorwise/mse"):
                key = f"fp8/{name}/{statistic}"
                # Gathered in bf16.
                assert lines["shards"][key] == pytest.approx(lines["whole"][key], rel=0.05), key
                assert lines["parts"][key] > 0


def recovery_surrounds_sharded_steps(rank: int, world: int) -> None:
    shard = {"param": "fp8", "grad": "fp8", "min_numel": 0}
    plain, watched = Sharded(shard), Sharded(shard)
    fit(plain, model_parallel())
    for fits in (1, 2):
        watched.losses.clear()
        fit(watched, model_parallel(), callbacks=[SkipBatchRecovery()])
        assert fits == 2 or mean_losses(watched) == mean_losses(plain)
        assert len(watched.losses) == 4 and torch.stack(watched.losses).isfinite().all()


def giving_up_where_others_wait_is_an_error(rank: int, world: int) -> None:
    class GivesUp(Sharded):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            raise SkipBatchException("bad data")

    class ByHand(Module):
        automatic_optimization = False
        training_step = GivesUp.training_step

    class Whole(Module):
        training_step = GivesUp.training_step

    for model, strategy, remedy in (
        (GivesUp({}), model_parallel(), r"return recovery\.reject\(loss\)"),
        (Whole(), ddp(static_graph=True), r"static_graph=True .*return recovery\.reject\(loss\)"),
        (ByHand(), ddp(), r"recovery\.reject\(loss\) to manual_backward"),
    ):
        with pytest.raises(RuntimeError, match=rf"gave up its batch on rank {rank}.*{remedy}"):
            fit(model, strategy, callbacks=[SkipBatchRecovery(log=None)])


def rank_zero_alone_may_name_its_files(rank: int, world: int) -> None:
    log, page = (Path(folder()) / name if rank == 0 else None for name in ("named.jsonl", "named.html"))
    fit(Module(), ddp(), callbacks=[SkipBatchRecovery(log=log), FP8Report(path=page)], default_root_dir=folder())
    assert rank or (log.exists() and page.exists())


def averages_of_shards_are_refused(rank: int, world: int) -> None:
    callbacks = [SkipBatchRecovery(log=None, mode="exact"), EMAOfAcceptedSteps()]
    with pytest.raises(MisconfigurationException, match="FSDP2 shards cannot be copied: use DDPStrategy"):
        fit(Sharded({}), model_parallel(), callbacks=callbacks)


def unconverted_shards_are_refused(rank: int, world: int) -> None:
    class ByHand(Module):
        def configure_model(self) -> None:
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    with pytest.raises(ValueError, match=r"already sharded.*precision_plugin\.shard"):
        fit(ByHand(), model_parallel())


def what_cannot_be_is_refused(rank: int, world: int) -> None:
    fsdp1 = CPUFSDPStrategy()
    cases = [
        (ddp(), {"grad": "bf16"}, None, "nothing is left"),
        (DDPStrategy(ddp_comm_hook=print), {}, None, "one communication hook"),
        (fsdp1, {}, FP8FSDPPrecision(), "no hook for its weight all-gather"),
        (model_parallel(), {"error_feedback": True}, None, "whole gradients on every rank"),
    ]
    for strategy, options, plugin, message in cases:
        with pytest.raises(ValueError, match=message):
            fit(Sharded({}), strategy, plugin=plugin, callbacks=[FP8Communication(**options)])
    for change, message in (
        (lambda net: net.head.double(), r"gradient of 'net\.head\.weight' cannot be sent.*float64"),
        (lambda net: setattr(net.embedding, "sparse", True), r"sparse gradients of 'net\.embedding'"),
    ):
        model = Module()
        change(model.net)
        with pytest.raises(ValueError, match=message):
            fit(model, ddp(), callbacks=[FP8Communication(min_numel=0)])
        assert not model.losses
    split = Sharded({"tensor_parallel": {"net.blocks.*.up": ColwiseParallel()}}, hidden=64)
    with pytest.raises(ValueError, match="GradScaler does not take tensor-parallel parameters beside others"):
        fit(split, model_parallel(2), plugin=FP8Precision(layers=LayerSelection(), precision="16-mixed"))
    with pytest.raises(ValueError, match="FP8FSDPPrecision runs under FSDPStrategy only"):
        fit(Module(), ddp(), plugin=FP8FSDPPrecision())
    with pytest.raises(TypeError, match="FP8FSDPPrecision"):
        trainer(CPUFSDPStrategy(), plugin=FP8Precision())


warnings.simplefilter("ignore")

CHECKS = [
    scales_fit_weights_that_change_within_a_step,
    sharded_models_save,
    ddp_really_sends_fp8,
    a_link_too_fast_for_fp8_changes_nothing,
    a_model_without_fp8_layers_trains,
    error_feedback_resumes,
    ddp_resumes_bit_for_bit_where_buckets_stay,
    skipped_steps_drop_residuals,
    fsdp1_trains_in_fp8,
    fsdp2_trains_and_resumes,
    stochastic_rounding_resumes,
    true_bf16_trains_sharded,
    fsdp2_with_tensor_parallel_trains,
    statistics_are_those_of_weights_as_layers_use_them,
    recovery_surrounds_sharded_steps,
    giving_up_where_others_wait_is_an_error,
    rank_zero_alone_may_name_its_files,
    averages_of_shards_are_refused,
    unconverted_shards_are_refused,
    what_cannot_be_is_refused,
]
