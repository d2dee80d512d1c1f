"""Lightning's own callbacks and tools around an FP8 model, and compiled modules."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from trainer_models import Net, StatefulLoader, assert_same, differs, fit, fp8_state, loader, make_trainer

from lightning_fp8.linear import Float8Linear


class States(pl.Callback):
    """The FP8 state and the weights after each step."""

    def __init__(self) -> None:
        self.fp8: list[Any] = []
        self.weights: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.fp8.append(fp8_state(trainer))
        self.weights.append(module.body[0].weight.detach().clone())


# --- averaging -------------------------------------------------------------------------------------------------------


def test_ema_averages_weights_and_never_scales() -> None:
    plain, averaged = States(), States()
    fit(Net(), callbacks=[plain], max_epochs=2)
    model = Net()
    ema = EMAWeightAveraging(decay=0.5)
    trainer = make_trainer(callbacks=[averaged, ema], max_epochs=2)
    torch.manual_seed(7)
    trainer.fit(model, loader(), loader(seed=9))
    # The averages are swapped in for each validation, and out again.
    assert_same(plain.fp8[:6], averaged.fp8[:6])
    assert_same(plain.weights[:6], averaged.weights[:6])
    expected = Net().body[0].weight.detach()
    for index, weight in enumerate(averaged.weights):
        expected = weight if index == 0 else 0.5 * expected + 0.5 * weight
    torch.testing.assert_close(model.body[0].weight.detach(), expected)
    assert type(model.body[0]) is Float8Linear


def test_ema_resumes_bit_for_bit(tmp_path: Path) -> None:
    def once(folder: Path, resume: Any = None) -> Any:
        model = Net()
        saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
        trainer = make_trainer(
            callbacks=[EMAWeightAveraging(decay=0.5), saver], max_epochs=2, enable_checkpointing=True
        )
        torch.manual_seed(7 if resume is None else 99)
        trainer.fit(model, StatefulLoader(), ckpt_path=resume)
        return trainer, model

    trainer, model = once(tmp_path)
    resumed, again = once(tmp_path / "b", tmp_path / "step=8.ckpt")
    assert_same(model.losses[8:], again.losses)
    assert_same(dict(model.state_dict()), dict(again.state_dict()))
    assert_same(fp8_state(trainer), fp8_state(resumed))


def test_ema_on_a_model_that_is_converted_already() -> None:
    model = Net()
    fit(model)
    trainer = make_trainer(callbacks=[EMAWeightAveraging(decay=0.5)], max_epochs=1)
    trainer.fit(model, loader(), loader(seed=9))
    (conversion,) = trainer.precision_plugin.conversions
    assert model.body[0].fp8.scaling is conversion.runtime.scaling


def test_stochastic_weight_averaging() -> None:
    model = Net("sgd")
    trainer = fit(model, callbacks=[StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=2)], max_epochs=4)
    assert torch.stack(model.losses).isfinite().all()
    assert all(p.isfinite().all() for p in model.parameters())
    assert type(model.body[0]) is Float8Linear
    assert fp8_state(trainer)["runtime"]["history"].isfinite().all()


def test_a_deep_copy_has_scales_of_its_own() -> None:
    model = Net()
    trainer = fit(model, max_steps=3)
    before = fp8_state(trainer)
    twin = copy.deepcopy(model)
    assert type(twin.body[0]) is Float8Linear
    assert twin.body[0].fp8.scaling is not model.body[0].fp8.scaling
    assert twin.body[0].fp8.scaling is twin.body[3].fp8.scaling
    twin_trainer = fit(twin, max_steps=3)
    assert_same(before, fp8_state(trainer))
    assert differs(before, fp8_state(twin_trainer))


# --- learning rate ---------------------------------------------------------------------------------------------------


def test_learning_rate_finder_leaves_no_trace() -> None:
    model, plain = Net("sgd", dropout=0.0), Net("sgd", dropout=0.0)
    trainer = make_trainer(max_epochs=1)
    found = Tuner(trainer).lr_find(model, loader(), min_lr=1e-6, max_lr=1e-1, num_training=8, update_attr=False)
    assert found is not None and len(found.results["loss"]) >= 5
    model.losses.clear()
    trainer.fit(model, loader())
    first = fit(plain)
    assert_same(plain.losses, model.losses)
    assert_same(fp8_state(first), fp8_state(trainer))


def test_learning_rate_finder_as_a_callback(tmp_path: Path) -> None:
    model = Net("sgd", lr=1e-2)
    finder = LearningRateFinder(min_lr=1e-6, max_lr=1e-1, num_training_steps=8, update_attr=False)
    trainer = fit(model, callbacks=[finder], enable_checkpointing=True, default_root_dir=tmp_path)
    assert finder.optimal_lr is not None
    assert (fp8_state(trainer)["runtime"]["position"] == 5 % 3).all()


def test_batch_size_finder() -> None:
    class Sized(Net):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(loader().dataset, batch_size=self.batch_size)

        val_dataloader = train_dataloader

    model = Sized()
    trainer = make_trainer(max_epochs=1)
    found = Tuner(trainer).scale_batch_size(model, steps_per_trial=1, max_trials=2)
    assert found is not None and found > 2
    model.losses.clear()
    trainer.fit(model)
    assert len(model.losses) == 24 // found and torch.stack(model.losses).isfinite().all()


# --- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compiled_lightning_module(fresh_compiler: Any) -> None:
    eager, compiled = Net(dropout=0.0), Net(dropout=0.0)
    first = fit(eager, max_steps=4)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    trainer = make_trainer(max_steps=4)
    torch.manual_seed(7)
    trainer.fit(torch.compile(compiled, backend=backend), loader())
    assert graphs, "nothing was compiled"
    targets = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert any("lightning_fp8" in target or "autograd_function" in target for target in targets), targets
    torch.testing.assert_close(torch.stack(eager.losses), torch.stack(compiled.losses), rtol=1e-2, atol=1e-3)
    assert_same(fp8_state(first)["runtime"]["position"], fp8_state(trainer)["runtime"]["position"])
    assert not any("_orig_mod" in key for key in compiled.state_dict())


def test_compiled_submodule_compiles_once_and_resumes_uncompiled(fresh_compiler: Any, tmp_path: Path) -> None:
    compilations = []

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        compilations.append(1)
        return aot_eager(graph, inputs)

    class Compiled(Net):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.body = torch.compile(self.body, backend=backend, fullgraph=True)

    model = Compiled(dropout=0.0)
    trainer = make_trainer(max_epochs=1)
    torch.manual_seed(7)
    trainer.fit(model, loader())
    assert len(compilations) == 1, "scales that move, or a step more, must not recompile"
    assert trainer.precision_plugin.conversions[0].converted == ["body.0", "body.3"]
    eager = Net(dropout=0.0)
    fit(eager)
    torch.testing.assert_close(torch.stack(eager.losses), torch.stack(model.losses), rtol=1e-2, atol=1e-3)

    trainer.save_checkpoint(tmp_path / "compiled.ckpt")
    checkpoint = torch.load(tmp_path / "compiled.ckpt", weights_only=True)
    checkpoint["state_dict"] = {k.replace("_orig_mod.", ""): v for k, v in checkpoint["state_dict"].items()}
    torch.save(checkpoint, tmp_path / "eager.ckpt")
    resumed = make_trainer(max_epochs=2, max_steps=7)
    resumed.fit(plain := Net(dropout=0.0), loader(), ckpt_path=tmp_path / "eager.ckpt")
    assert len(plain.losses) == 1
    assert (fp8_state(resumed)["runtime"]["position"] == 6 % 3).all()


def test_layers_compiled_in_place(fresh_compiler: Any) -> None:
    class InPlace(Net):
        def configure_model(self) -> None:
            self.body.compile(backend="aot_eager")

    model = InPlace(dropout=0.0)
    fit(model, max_steps=3)
    assert type(model.body[0]) is Float8Linear and isinstance(model.body, nn.Sequential)
    assert torch.stack(model.losses).isfinite().all()
