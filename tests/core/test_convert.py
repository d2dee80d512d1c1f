"""Conversion in place and back, of every linear layer that people really have."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lightning_fp8
from lightning_fp8 import LayerSelection, convert_model, revert_model
from lightning_fp8.linear import Float8Linear
from lightning_fp8.model import conversions
from lightning_fp8.recipes import RECIPE_NAMES
from lightning_fp8.statistics import SCALE

EVERY = LayerSelection(head=True)


def mlp(width: int = 128) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width, bias=False))


def every(model: nn.Module, recipe: Any = "delayed") -> nn.Module:
    return convert_model(model, recipe, layers=EVERY)


def train(model: nn.Module, steps: int = 2, width: int = 128) -> Tensor:
    for step in range(steps):
        x = torch.randn(16, width, generator=torch.Generator().manual_seed(step))
        y = model(x)
        y.square().mean().backward()
        lightning_fp8.step(model)
    return y.detach()


def scales(model: nn.Module) -> Tensor:
    return conversions(model)[0].runtime.table.data[..., SCALE]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that conversion must leave alone."""
    return {
        "modules": [(name, id(m), m.training) for name, m in model.named_modules()],
        "parameters": [(name, id(p), p.dtype, p.requires_grad) for name, p in model.named_parameters()],
        "buffers": [(name, id(b)) for name, b in model.named_buffers()],
        "state": [(key, value.dtype, tuple(value.shape)) for key, value in model.state_dict().items()],
    }


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_nothing_but_the_class_changes_and_back_again(name: str) -> None:
    model = mlp()
    before, classes = snapshot(model), [type(m) for m in model.modules()]
    attributes = [set(vars(m)) for m in model.modules()]
    values = {key: value.clone() for key, value in model.state_dict().items()}
    x = torch.randn(16, 128)
    expected = model(x)
    assert every(model, name) is model
    assert snapshot(model) == before
    assert [type(m) for m in model.modules()] == [nn.Sequential, Float8Linear, nn.GELU, Float8Linear]
    assert all(isinstance(model[i], nn.Linear) for i in (0, 2))
    model(x).sum().backward()
    assert not torch.equal(model(x), expected)
    assert snapshot(model) == before and all(torch.equal(v, values[k]) for k, v in model.state_dict().items())
    assert revert_model(model) is model
    assert snapshot(model) == before
    assert [type(m) for m in model.modules()] == classes and [set(vars(m)) for m in model.modules()] == attributes
    assert all(not m._forward_pre_hooks for m in model.modules())
    assert torch.equal(model(x), expected)


TRACERS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "jit.script": lambda model, x: torch.jit.script(model)(x),
    "jit.trace": lambda model, x: torch.jit.trace(model, x)(x),
    "fx.symbolic_trace": lambda model, x: torch.fx.symbolic_trace(model)(x),
    "func (grad": lambda model, x: torch.vmap(model)(x[None])[0],
}


@pytest.mark.parametrize("name", TRACERS)
def test_what_has_no_fp8_products_is_refused_with_the_remedy(name: str) -> None:
    model, x = every(mlp()), torch.randn(16, 128)
    with pytest.raises((RuntimeError, TypeError), match=rf"torch\.{re.escape(name)}.*FP8 layer '0'.*revert_model"):
        TRACERS[name](model, x)
    revert_model(model)
    torch.testing.assert_close(TRACERS[name](model, x), model(x))


def test_layers_in_high_precision_can_be_traced() -> None:
    """Outside of autocast a mixed-precision run's layers are plain ones."""
    model, x = mlp(), torch.randn(16, 128)
    convert_model(model, layers=EVERY, autocast_only=True)
    assert torch.equal(torch.jit.trace(model.eval(), x)(x), model(x))
    gradient = torch.func.grad(lambda x: model(x).sum())(x)
    assert gradient.shape == x.shape


def test_weights_move_freely_between_fp8_and_high_precision(tmp_path: Path) -> None:
    plain, fp8 = mlp(), every(mlp())
    train(fp8)
    with torch.no_grad():
        for p in fp8.parameters():
            p.add_(0.1)
    torch.save(fp8.state_dict(), tmp_path / "fp8.pt")
    assert plain.load_state_dict(torch.load(tmp_path / "fp8.pt", weights_only=True)).missing_keys == []
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), fp8.parameters(), strict=True))
    fp8.load_state_dict(mlp().state_dict(), strict=True)


def test_an_optimizer_keeps_its_parameters() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parameters = list(model.parameters())
    every(model)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    before = [p.detach().clone() for p in parameters]
    train(model, 1)
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    revert_model(model)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def test_training_flag_frozen_parameters_and_dtype_stay() -> None:
    model = mlp().bfloat16()
    model[0].requires_grad_(False)
    model[2].eval()
    before = snapshot(model)
    every(model)
    assert snapshot(model) == before and not model[2].training and model[0].training
    model(torch.randn(4, 128, dtype=torch.bfloat16)).float().sum().backward()
    assert model[0].weight.grad is None and model[2].weight.grad.dtype == torch.bfloat16  # type: ignore[union-attr]


def test_hooks_are_kept_and_called() -> None:
    model, calls = mlp(), []
    handles = [
        model[0].register_forward_hook(lambda m, a, y: calls.append("forward")),
        model[0].register_forward_pre_hook(lambda m, a: calls.append("pre")),
        model[2].register_full_backward_hook(lambda m, gi, go: calls.append("backward")),
        model[0].register_state_dict_post_hook(lambda *a: calls.append("state")),
        model[0].weight.register_hook(lambda g: calls.append("grad")),
    ]
    every(model)
    train(model, 1)
    model.state_dict()
    assert sorted(calls) == ["backward", "forward", "grad", "pre", "state"]
    revert_model(model)
    calls.clear()
    model(torch.randn(2, 128)).sum().backward()
    assert sorted(calls) == ["backward", "forward", "grad", "pre"]
    for handle in handles:
        handle.remove()
    assert not model[0]._forward_pre_hooks and not model[0]._forward_hooks


# --- kinds of layers -------------------------------------------------------------------------------------------------


def test_the_root_itself() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 32)
    assert convert_model(model) is model and isinstance(model, Float8Linear)
    assert conversions(model)[0].converted == [""]
    assert "(root)" in conversions(model)[0].summary()
    train(model, 1, 64)
    assert type(revert_model(model)) is nn.Linear


def test_tied_to_an_embedding() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, 64)
            self.fc = nn.Linear(64, 64)
            self.head = nn.Linear(64, 32, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.fc(self.embed(tokens)))

    for head in (False, True):
        model = convert_model(Tied(), layers=LayerSelection(head=head))
        assert isinstance(model.head, Float8Linear) is head
        assert model.head.weight is model.embed.weight
        model(torch.arange(32)).sum().backward()
        assert model.embed.weight.grad.isfinite().all()  # type: ignore[union-attr, operator]
        assert len(list(model.parameters())) == 3


def test_shared_between_two_parents() -> None:
    layer = nn.Linear(64, 64)
    model = nn.Sequential(nn.Sequential(layer), nn.Sequential(layer), nn.Linear(64, 16))
    convert_model(model)
    assert model[0][0] is model[1][0] is layer and isinstance(layer, Float8Linear)  # type: ignore[index]
    assert conversions(model)[0].converted == ["0.0"]
    train(model, 2, 64)
    revert_model(model)
    assert type(layer) is nn.Linear


def test_two_layers_with_one_weight() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 16))
    model[1].weight = model[0].weight
    convert_model(model)
    assert conversions(model)[0].converted == ["0", "1"] and model[1].weight is model[0].weight
    train(model, 1, 64)


class LoRA(nn.Module):
    """A wrapper of the usual kind: the layer it adapts is frozen and called inside."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


@pytest.mark.parametrize("rank", [8, 16])
def test_lora_adapters(rank: int) -> None:
    model = nn.Sequential(LoRA(nn.Linear(64, 128), rank), nn.ReLU(), LoRA(nn.Linear(128, 64), rank))
    every(model)
    converted = conversions(model)[0].converted
    assert ("0.base_layer" in converted) and ("0.lora_A" in converted) == (rank == 16)
    train(model, 3, 64)
    for name, p in model.named_parameters():
        assert (p.grad is None) == ("base_layer" in name)
        assert p.grad is None or p.grad.isfinite().all()


def test_lazy_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.LazyLinear(32), nn.LazyLinear(16))
    convert_model(model)
    x = torch.randn(8, 48)
    model(x)
    assert [type(model[i]) for i in (0, 2, 3)] == [Float8Linear, Float8Linear, nn.Linear]
    assert not model[0]._forward_pre_hooks
    train(model, 2, 48)
    assert scales(model).gt(0)[:, :2].all()
    revert_model(model)
    assert all(type(model[i]) is nn.Linear for i in (0, 2, 3))


def test_lazy_layers_of_unsuitable_sizes() -> None:
    model = nn.Sequential(nn.LazyLinear(64), nn.Linear(64, 64), nn.Linear(64, 16))
    convert_model(model)
    summary = conversions(model)[0].summary()
    assert "multiples of 16" in next(line for line in summary.splitlines() if line.startswith("0 "))
    with pytest.warns(UserWarning, match=r"'0'.*high precision.*30 -> 64 are not multiples of 16"):
        model(torch.randn(8, 30))
    assert type(model[0]) is nn.Linear and not model[0]._forward_pre_hooks
    train(model, 2, 30)
    revert_model(model)
    assert set(vars(model[0])) == set(vars(nn.Linear(2, 2)))


def test_lazy_layers_reverted_before_they_know_their_sizes() -> None:
    model = nn.Sequential(nn.LazyLinear(64), nn.LazyLinear(16))
    every(model)
    revert_model(model)
    model(torch.randn(8, 32))
    assert all(type(m) is nn.Linear and not m._forward_pre_hooks for m in model)


def test_lazy_layers_filled_from_a_checkpoint() -> None:
    model = nn.Sequential(nn.LazyLinear(64), nn.LazyLinear(32))
    every(model)
    model.load_state_dict(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)).state_dict())
    model(torch.randn(8, 32))
    assert all(type(m) is Float8Linear for m in model)


def test_left_alone() -> None:
    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    def pruned() -> nn.Linear:
        layer = nn.Linear(32, 32)
        prune.random_unstructured(layer, "weight", amount=0.3)
        return layer

    layers = {
        "own": Own(32, 32),
        "normed": parametrizations.weight_norm(nn.Linear(32, 32)),
        "pruned": pruned(),
        "attention": nn.MultiheadAttention(32, 2),
    }
    model = nn.ModuleDict({**layers, "fc": nn.Linear(32, 32), "head": nn.Linear(32, 32)})
    classes = {name: type(m) for name, m in model.named_modules() if name not in ("fc",)}
    convert_model(model)
    assert conversions(model)[0].converted == ["fc"]
    assert all(type(dict(model.named_modules())[name]) is cls for name, cls in classes.items())
    for name in ("own", "normed", "pruned"):
        model[name](torch.randn(4, 32)).sum().backward()
    revert_model(model)
    assert type(model["fc"]) is nn.Linear


def test_pruning_and_weight_norm_after_conversion() -> None:
    model = every(mlp())
    prune.l1_unstructured(model[0], "weight", amount=0.5)  # type: ignore[index]
    y = train(model, 1)
    assert y.isfinite().all() and model[0].weight_orig.grad is not None  # type: ignore[index, union-attr]


# --- where torch goes round the layers -------------------------------------------------------------------------------


def encoder(**settings: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True, **settings)
    return nn.TransformerEncoder(layer, 2)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layer_alone", [True, False])
def test_transformer_encoders_evaluate_in_fp8(layer_alone: bool, masked: bool) -> None:
    """torch's fast paths use the feed-forward weights without calling the layers."""
    stack = encoder()
    model: nn.Module = stack.layers[0] if layer_alone else stack
    x = torch.randn(4, 10, 64)
    mask = torch.zeros(4, 10, dtype=torch.bool)
    mask[1:, 7:] = True
    arguments = {"src_key_padding_mask": mask} if masked else {}
    every(model, "rowwise")  # Padding has no part in the scales of other rows.
    training = model(x, **arguments)
    model.eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Nested tensors are a prototype, says torch.
        evaluation = model(x, **arguments)
    real = ~mask if masked else torch.ones_like(mask)
    torch.testing.assert_close(evaluation[real], training[real], rtol=1e-4, atol=1e-4)
    revert_model(model)
    model.train()
    exact = model(x, **arguments)
    assert (training - exact)[real].abs().max() > 1e-3  # So the comparison above could have failed.
    assert all(not m._forward_pre_hooks for m in model.modules())


def test_multihead_attention_still_runs() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(64, 2, batch_first=True)
            self.fc = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.attention(x, x, x, need_weights=False)[0])

    model = every(Attention())
    assert conversions(model)[0].converted == ["fc"]
    model(torch.randn(2, 8, 64)).sum().backward()


# --- copies, casts and moves: scale state is never a parameter or a buffer -------------------------------------------


def test_scale_state_is_neither_parameter_nor_buffer() -> None:
    model = every(mlp())
    train(model)
    assert not list(model.buffers()) and len(list(model.parameters())) == 3


@pytest.mark.parametrize("move", ["bfloat16", "half", "double", "to", "share_memory"])
def test_scales_survive_casts_of_the_module(move: str) -> None:
    model = every(mlp())
    train(model)
    before = scales(model).clone()
    {
        "bfloat16": model.bfloat16,
        "half": model.half,
        "double": model.double,
        "to": lambda: model.to("cpu", torch.bfloat16),
        "share_memory": model.share_memory,
    }[move]()
    assert scales(model).dtype == torch.float32 and torch.equal(scales(model), before)
    if move in ("bfloat16", "half", "to"):
        model(torch.randn(4, 128, dtype=model[0].weight.dtype)).sum().backward()  # type: ignore[index, arg-type]
        model.float()
    if move == "double":
        model.float()
    assert torch.equal(scales(model), before)
    train(model, 1)


def test_meta_device_and_to_empty() -> None:
    with torch.device("meta"):
        model = every(mlp())
    assert all(p.is_meta for p in model.parameters())
    assert conversions(model)[0].runtime.table.device.type == "cpu"
    before = conversions(model)[0].runtime.table.data.clone()
    model.to_empty(device="cpu")
    assert torch.equal(conversions(model)[0].runtime.table.data, before)
    model.load_state_dict(mlp().state_dict())
    reference = every(mlp())
    assert torch.equal(train(model), train(reference))
    assert torch.equal(scales(model), scales(reference))


def test_deepcopies_have_scales_of_their_own() -> None:
    model = every(mlp())
    train(model)
    twin = copy.deepcopy(model)
    assert conversions(twin)[0].runtime.states[0] is twin[0].fp8  # type: ignore[index]
    before = scales(model).clone()
    with torch.no_grad():
        twin[0].weight.mul_(100)  # type: ignore[index, operator]
    y = train(twin)
    assert torch.equal(scales(model), before) and not torch.equal(scales(twin), before)
    revert_model(twin)
    assert isinstance(model[0], Float8Linear) and y.isfinite().all()  # type: ignore[index]
    assert torch.equal(train(model, 1), train(every_with_scales(before), 1))


def every_with_scales(values: Tensor) -> nn.Module:
    model = every(mlp())
    train(model)
    assert torch.equal(scales(model), values)
    return model


def test_one_layer_can_be_copied_alone() -> None:
    model = every(mlp())
    layer = copy.deepcopy(model[0])  # type: ignore[index]
    layer(torch.randn(4, 128)).sum().backward()
    assert scales(model).eq(0).all()


def test_averaged_models() -> None:
    model = every(mlp())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    train(model)
    before = scales(average).clone()
    average.update_parameters(model)
    assert torch.equal(scales(average), before) and isinstance(average.module[0], Float8Linear)  # type: ignore[index]
    assert average.eval()(torch.randn(4, 128)).isfinite().all()


def test_pickle() -> None:
    model = every(mlp())
    train(model)
    twin = pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for copied in (twin, torch.load(buffer, weights_only=False)):
        assert torch.equal(scales(copied), scales(model))
        assert conversions(copied)[0].runtime.states[0] is copied[0].fp8
        x = torch.randn(4, 128)
        assert torch.equal(copied(x), model(x))


def in_another_process(model: nn.Module, x: Tensor, queue: Any) -> None:
    y = model(x)
    queue.put((y.detach().tolist(), scales(model).tolist()))


def test_workers_get_the_model() -> None:
    """The model reaches another process as multiprocessing sends it (forked here, pickled all the same)."""
    model = every(mlp())
    train(model)
    x = torch.randn(2, 128)
    context = multiprocessing.get_context("fork")
    models, queue = context.Queue(), context.Queue()
    models.put(pickle.dumps(model))

    def work() -> None:
        in_another_process(pickle.loads(models.get()), x, queue)

    worker = context.Process(target=work)
    worker.start()
    y, found = queue.get(timeout=60)
    worker.join()
    assert torch.equal(torch.tensor(y), model(x)) and torch.equal(torch.tensor(found), scales(model))


@pytest.mark.gpu
def test_scales_follow_the_module_to_the_gpu() -> None:
    model = every(mlp())
    train(model)
    before = scales(model).clone()
    model.cuda()
    assert scales(model).is_cuda and torch.equal(scales(model).cpu(), before)
    model(torch.randn(16, 128, device="cuda")).sum().backward()
    lightning_fp8.step(model)
    model.cpu()
    assert not scales(model).is_cuda
    train(model, 1)


@pytest.mark.gpu
def test_lazy_layers_on_the_gpu() -> None:
    model = nn.Sequential(nn.LazyLinear(64), nn.Linear(64, 64), nn.Linear(64, 16))
    convert_model(model)
    model.cuda()
    for _ in range(2):
        model(torch.randn(16, 32, device="cuda")).sum().backward()
        lightning_fp8.step(model)
    assert scales(model).is_cuda and scales(model)[0, :2].gt(0).all()


@pytest.mark.parametrize("then", ["revert", "convert"])
def test_a_layer_parametrized_after_conversion_comes_back_parametrized(then: str) -> None:
    model = every(mlp())
    parametrizations.weight_norm(model[0])
    train(model)
    if then == "revert":
        revert_model(model)
    else:
        every(model, "tensorwise")
        assert isinstance(model[2], Float8Linear)
    assert not isinstance(model[0], Float8Linear) and isinstance(model[0], nn.Linear)
    assert type(model[0]).__name__ == "ParametrizedLinear"
    x = torch.randn(4, 128)
    assert torch.equal(model[0](x), nn.functional.linear(x, model[0].weight, model[0].bias))
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is nn.Linear
