"""What FP8 would gain for a model, from measured times of linear layers; neither a GPU nor the weights are needed."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fp8.linear import input_of
from lightning_fp8.recipes import Recipe
from lightning_fp8.selection import LayerSelection, linear_layers
from lightning_fp8.text_table import text_table
from lightning_fp8.tuning.choice import Source, keep_gaining
from lightning_fp8.tuning.flops import forward_flops
from lightning_fp8.tuning.peaks import Peak
from lightning_fp8.tuning.shares import Place, shares_of_step

# The rest of a step, as it was on one H200 in a stack of eight Llama-3-8B blocks (2 x 8192 tokens, compiled, bf16,
# fused AdamW): 366 ms, of which 262 for products, 66 attention, 25 pointwise and reductions, 11 the optimizer.
#: Share of the bf16 peak that attention reaches, forward and backward, a causal mask counted as half.
_ATTENTION_EFFICIENCY = 0.5
#: FLOPs of attention forward and backward over those forward (flash attention computes the scores again).
_ATTENTION_BACKWARD = 3.5
#: Share of the bf16 peak that products reach, forward and backward.
_PRODUCT_EFFICIENCY = 0.66
#: FLOPs of a product forward and backward over those forward.
_PRODUCT_BACKWARD = 3.0
#: How often the inputs and outputs of the linear layers go through memory between the products.
_PASSES = 5
#: Share of the memory's peak bandwidth that pointwise kernels reach.
_COPY_EFFICIENCY = 0.85
#: What an AdamW step moves for a parameter, in its size: it and both moments read and written, the gradient read.
_OPTIMIZER_PASSES = 7
#: Share of the memory's peak bandwidth that the fused optimizer reaches.
_OPTIMIZER_EFFICIENCY = 0.55


#: A forward's only argument, or as Lightning takes ``example_input_array`` a sequence of all, or a dict by keyword.
Inputs = Tensor | tuple[Any, ...] | list[Any] | dict[str, Any]


@dataclass(frozen=True)
class LayerAdvice:
    """One linear layer.

    Attributes:
        name: qualified name.
        in_features: of the layer.
        out_features: of the layer.
        tokens: rows of its input.
        bf16_ms: forward and backward in bf16, on the GPU, or what the host needs to issue them, where the GPU waits for
            it.
        fp8_ms: the same in FP8; ``None`` where it cannot run in FP8.
        fp8: whether it should.
        reason: why, or why not.
    """

    name: str
    in_features: int
    out_features: int
    tokens: int
    bf16_ms: float
    fp8_ms: float | None
    fp8: bool
    reason: str


@dataclass(frozen=True)
class Advice:
    """What FP8 would gain for a model.

    Attributes:
        gpu: for which GPU.
        recipe: under which recipe.
        origin: where the times come from.
        layers: every linear layer.
        rest_ms: an estimate of the rest of a bf16 step, by kind.
        notes: what the estimate leaves out.
    """

    gpu: str
    recipe: str
    origin: str
    layers: list[LayerAdvice]
    rest_ms: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def bf16_ms(self) -> float:
        """A step in bf16."""
        return sum(layer.bf16_ms for layer in self.layers) + sum(self.rest_ms.values())

    @property
    def fp8_ms(self) -> float:
        """A step in which the layers that should run in FP8 do."""
        return self.bf16_ms - sum(la.bf16_ms - la.fp8_ms for la in self.layers if la.fp8 and la.fp8_ms is not None)

    @property
    def speedup(self) -> float:
        """Of the step; 1 for a model without linear layers."""
        return self.bf16_ms / self.fp8_ms if self.fp8_ms else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "bf16_ms": self.bf16_ms, "fp8_ms": self.fp8_ms, "speedup": self.speedup}

    def text(self) -> str:
        """For people to read."""
        rows = [("layer", "sizes", "tokens", "bf16 ms", "FP8 ms", "runs in", "why")]
        for la in self.layers:
            fp8 = "-" if la.fp8_ms is None else f"{la.fp8_ms:.3f}"
            sizes = f"{la.in_features} -> {la.out_features}"
            where = "FP8" if la.fp8 else "bf16"
            rows.append((la.name or "(root)", sizes, str(la.tokens), f"{la.bf16_ms:.3f}", fp8, where, la.reason))
        gains = sum(la.fp8 for la in self.layers)
        rest = "".join(f", {kind} {ms:.2f}" for kind, ms in self.rest_ms.items())
        linear = sum(la.bf16_ms for la in self.layers)
        return "\n".join(
            [
                f"{self.recipe} on {self.gpu}: {gains} of {len(self.layers)} linear layers gain, by {self.origin}.",
                *text_table(rows),
                f"A bf16 step, estimated: {self.bf16_ms:.2f} ms (linear layers {linear:.2f}{rest}).",
                f"With FP8: {self.fp8_ms:.2f} ms, x{self.speedup:.2f}.",
                *self.notes,
            ]
        )


def advise(
    model: nn.Module,
    recipe: Recipe,
    source: Source,
    gpu: str,
    peak: Peak | None,
    tokens: int,
    inputs: Inputs | None = None,
    step_ms: float | None = None,
    compiled: bool = True,
) -> Advice:
    """Look at a model, on the meta device or anywhere.

    Args:
        model: its linear layers are looked at; nothing is changed.
        recipe: how they would run.
        source: measured times.
        gpu: whose times these are.
        peak: its peaks, for the rest of a step; ``None``: the linear layers only.
        tokens: rows of the layers' inputs, where ``inputs`` does not tell.
        inputs: on the model's device: the forward is run with it, to see each layer's rows, the attention and other
            products.
        step_ms: a whole step in bf16, if somebody has measured it: the rest of the step is what the layers leave of it.
        compiled: whether the layers will run in compiled code.
    """
    layers = linear_layers(model)
    seen = observe(model, inputs) if inputs is not None else Observation({}, 0.0, 0.0)
    rows = {name: seen.rows.get(name, 0) if inputs is not None else tokens for name in layers}
    advice = []
    candidates = LayerSelection().decide(model, recipe)
    possible = {decision.name for decision in candidates if decision.converted}
    places = {
        name: Place(rows[name], layer.in_features, layer.out_features, compiled)
        for name, layer in layers.items()
        if name in possible and rows[name]
    }
    shares = shares_of_step(source.times, source.variant, places)
    for decision in keep_gaining(candidates, shares):
        layer, count, share = layers[decision.name], rows[decision.name], shares.get(decision.name)
        sizes = count, layer.in_features, layer.out_features
        alone = source.times.milliseconds("bf16", *sizes) if count and not share else 0.0
        advice.append(
            LayerAdvice(
                decision.name,
                layer.in_features,
                layer.out_features,
                count,
                share.bf16 if share else alone,
                share.fp8 if share else None,
                decision.converted and share is not None,
                decision.reason if count or not decision.converted else "did not run",
            )
        )
    rest, notes = _rest(model, advice, peak, seen, step_ms)
    if inputs is None and step_ms is None:
        notes.append(
            f"Every layer was given {tokens} tokens; attention and products outside of linear layers, as those of "
            "nn.MultiheadAttention, are left out: an input shape tells better, and a measured bf16 step best."
        )
    return Advice(gpu, recipe.label, source.origin, advice, rest, notes)


@dataclass(frozen=True)
class Observation:
    """What one forward showed.

    Attributes:
        rows: of each linear layer's input, all its calls together.
        attention_flops: of scaled dot-product attention forward, a causal mask counted as half.
        product_flops: of all other products outside of linear layers forward, such as those within
            ``nn.MultiheadAttention``, its attention too, and convolutions.
    """

    rows: dict[str, int]
    attention_flops: float
    product_flops: float


def observe(model: nn.Module, inputs: Inputs) -> Observation:
    """Run the forward once, without gradients; compiled modules run eagerly.

    Args:
        model: as it is.
        inputs: its only argument, or all in a sequence or a dict.
    """
    rows: dict[str, int] = {}
    products = _Products()
    attention = _Attention(products)
    watched = _watched(model, rows, products)
    with torch.compiler.set_stance("force_eager"), watched, torch.no_grad(), attention, products:
        _call(model, inputs)
    return Observation(rows, attention.flops, products.flops)


def _call(model: nn.Module, inputs: Inputs) -> None:
    if isinstance(inputs, dict):
        model(**inputs)
    elif isinstance(inputs, tuple | list):
        model(*inputs)
    else:
        model(inputs)


@contextmanager
def _watched(model: nn.Module, rows: dict[str, int], products: _Products) -> Generator[None]:
    """Every linear layer adds its rows, and none of its products."""
    before: list[float] = []

    def enter(name: str) -> Any:
        def count(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = input_of(args, kwargs)
            rows[name] = rows.get(name, 0) + x.numel() // x.shape[-1]
            before.append(products.flops)

        return count

    def leave(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        products.flops = before.pop()

    handles = []
    for name, layer in linear_layers(model).items():
        handles.append(layer.register_forward_pre_hook(enter(name), with_kwargs=True))
        handles.append(layer.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Products(TorchDispatchMode):
    """Counts the FLOPs of products and convolutions."""

    # Without it flex attention would be an error. What is in such an operator goes on unseen.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(func, OpOverload):
            self.flops += forward_flops(func, args, kwargs, result)
        return result


class _Attention(TorchFunctionMode):
    """Counts the FLOPs of scaled dot-product attention, which are then none of ``products``.

    What ``nn.MultiheadAttention`` calls is hidden from it: torch leaves the mode for the whole of such a function.
    """

    def __init__(self, products: _Products) -> None:
        super().__init__()
        self.flops = 0.0
        self._products = products

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = self._products.flops
        result = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._products.flops = before
            named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
            named |= kwargs
            query, key, value = named["query"], named["key"], named["value"]
            products = 2 * query.numel() * key.shape[-2] + 2 * query[..., 0].numel() * key.shape[-2] * value.shape[-1]
            self.flops += products / (2 if named.get("is_causal") else 1)
        return result


def _rest(
    model: nn.Module, layers: list[LayerAdvice], peak: Peak | None, seen: Observation, step_ms: float | None
) -> tuple[dict[str, float], list[str]]:
    """Milliseconds of what is no linear layer, by kind, and notes."""
    linear = sum(layer.bf16_ms for layer in layers)
    if step_ms is not None:
        if step_ms < linear:
            return {}, [f"The measured step of {step_ms:g} ms is shorter than its linear layers alone: not used."]
        return {"all else, as measured": step_ms - linear}, []
    if peak is None:
        return {}, ["The peaks of this GPU are not known: the linear layers alone are compared."]
    traffic = 2 * _PASSES * sum(layer.tokens * (layer.in_features + layer.out_features) for layer in layers)
    state = _OPTIMIZER_PASSES * sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    attention = seen.attention_flops * _ATTENTION_BACKWARD
    products = seen.product_flops * _PRODUCT_BACKWARD
    return {
        "attention": attention / (_ATTENTION_EFFICIENCY * peak.bf16 * 1e12) * 1e3,
        "other products": products / (_PRODUCT_EFFICIENCY * peak.bf16 * 1e12) * 1e3,
        "pointwise": traffic / (_COPY_EFFICIENCY * peak.bandwidth * 1e12) * 1e3,
        "optimizer": state / (_OPTIMIZER_EFFICIENCY * peak.bandwidth * 1e12) * 1e3,
    }, []
