"""Transformer Engine's FP8 modules behind layers that stay what they are.

A converted layer keeps its module object, its parameters and their names. The ``te.Linear`` that multiplies for it is
no submodule: it is made on the meta device, borrows the layer's parameters for each call, and so adds nothing to the
model's state_dict (no ``_extra_state``) and draws no random numbers.

Under delayed and static scaling Transformer Engine casts with scales that this package keeps: its quantizers read them
from device memory, and its own global buffers of amaxes, which move scales at each end of an autocast region, know
nothing of these layers. So scales move once per optimizer step, after one reduction over the ranks, and a rejected step
leaves no trace.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fp8.amaxes import record_amax, record_gradient
from lightning_fp8.backends.base import Backend, Runtime, Support
from lightning_fp8.backends.transformer_engine_library import AttentionContext, Engine, linear_engine, load
from lightning_fp8.checks import check_flag, first_line
from lightning_fp8.formats import tells_scale
from lightning_fp8.kernels.capability import Hardware
from lightning_fp8.kernels.reference import amax_of, pad_rows
from lightning_fp8.linear import Float8Linear, Float8State
from lightning_fp8.recipes import (
    ROLES,
    BlockwiseScaling,
    DelayedScaling,
    MXFP8Scaling,
    Recipe,
    StaticScaling,
    TensorwiseScaling,
)
from lightning_fp8.scaling import ScalingState
from lightning_fp8.statistics import SCALE, SCALE_TRANSPOSED

AmaxSource = Literal["measured", "library"]


class TransformerEngineBackend(Backend):
    """Transformer Engine multiplies.

    Args:
        fp8_dpa: attention in FP8 too, for the ``te.DotProductAttention`` modules of the model; delayed scaling only.
            Measured on an H200 (head size 128, forward and backward): 9.26 ms against 7.51 ms in bf16, with 5.6%
            relative error. Off by default.
        cache_weights: cast weights once for all micro-batches between two optimizer steps (Transformer Engine's
            ``is_first_microbatch``), at the price of keeping the FP8 weights in memory. Weights that are changed in
            place otherwise are noticed and cast anew, but not those of FSDP, and not changes through ``.data``.
        amax: ``"measured"`` takes the amaxes of delayed scaling in a pass of their own, which sees NaN and costs a
            read of each operand; ``"library"`` takes those of Transformer Engine's casts, free, which see Inf but not
            NaN. Recipes that scale from the data are always measured.
        fuse: modules that Transformer Engine runs as one, by their qualified names: ``(norm, linear)`` or ``(norm,
            linear, activation, linear)``; see :mod:`lightning_fp8.backends.transformer_engine_fusion`.

    Raises:
        ValueError: an option is unknown.
    """

    name = "transformer_engine"

    def __init__(
        self,
        fp8_dpa: bool = False,
        cache_weights: bool = False,
        amax: AmaxSource = "measured",
        fuse: Sequence[Sequence[str]] = (),
    ) -> None:
        if amax not in get_args(AmaxSource):
            raise ValueError(f"amax must be one of {', '.join(map(repr, get_args(AmaxSource)))}, got {amax!r}.")
        if any(isinstance(group, str) or len(group) not in (2, 4) for group in fuse):
            raise ValueError(
                f"fuse holds (norm, linear) or (norm, linear, activation, linear), each a qualified name; got {fuse!r}."
            )
        check_flag(fp8_dpa=fp8_dpa, cache_weights=cache_weights)
        self.fp8_dpa = fp8_dpa
        self.cache_weights = cache_weights
        self.amax = amax
        self.fuse = tuple(tuple(group) for group in fuse)

    def support_on(self, recipe: Recipe, hardware: Hardware) -> Support:
        against = self.why_not_recipe(recipe) or _why_not_hardware(recipe, hardware)
        return Support("refused", against) if against else Support("native", "FP8 tensor cores, by Transformer Engine")

    def why_not_installed(self, recipe: Recipe) -> str | None:
        remedy = "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.9', built for your torch and CUDA."
        if importlib.util.find_spec("transformer_engine") is None:
            return f"Transformer Engine is not installed: {remedy}"
        try:
            library = load()
        except (ImportError, OSError, RuntimeError, AssertionError, AttributeError) as error:
            return f"Transformer Engine does not load ({first_line(error)}): {remedy}"
        if not hasattr(library, "autocast"):
            return f"This Transformer Engine is too old, it has no te.autocast: {remedy}"
        available = {BlockwiseScaling: library.is_fp8_block_scaling_available, MXFP8Scaling: library.is_mxfp8_available}
        runs, reason = available.get(type(recipe), library.is_fp8_available)(return_reason=True)
        return None if runs else f"Transformer Engine says: {reason} Use backend='native'."

    def why_not_recipe(self, recipe: Recipe) -> str | None:
        """Why Transformer Engine cannot cast as ``recipe`` and the options say, with the remedy."""
        if not isinstance(recipe, (DelayedScaling, StaticScaling, TensorwiseScaling, BlockwiseScaling, MXFP8Scaling)):
            return (
                "Transformer Engine has no such recipe: use delayed, static, tensorwise, tensorwise_pow2, blockwise or "
                "mxfp8, or backend='native'."
            )
        formats = {role: {use.format.name for use in recipe.casts[role].uses} for role in ROLES}
        if formats["input"] != {"e4m3"} or formats["weight"] != {"e4m3"} or len(formats["grad_output"]) != 1:
            return (
                "Transformer Engine casts inputs and weights to E4M3, and gradients to one format for both GEMMs: use "
                "format='hybrid' or 'e4m3', or backend='native'."
            )
        if isinstance(recipe, TensorwiseScaling) and recipe.margin:
            return "Transformer Engine's current scaling knows no margin: use margin=0 or backend='native'."
        if isinstance(recipe, BlockwiseScaling) and recipe.tiled_inputs:
            return (
                "Transformer Engine casts inputs in blocks of one size for both GEMMs: use tiled_inputs=False (recipe "
                "'blockwise') or backend='native'."
            )
        if self.fp8_dpa and not isinstance(recipe, DelayedScaling):
            return "fp8_dpa=True goes with delayed scaling only: use recipe='delayed' or fp8_dpa=False."
        if recipe.source == "data" and (self.fuse or self.amax == "library"):
            option = "fuse" if self.fuse else "amax='library'"
            return (
                f"{option} goes with delayed or static scaling only, for with other recipes Transformer Engine keeps "
                "no amaxes: use recipe='delayed', or leave the option out."
            )
        return None

    def make_state(self, scaling: ScalingState, index: int, layer: nn.Linear, autocast_only: bool) -> Float8State:
        return TransformerEngineState(scaling, index, autocast_only, self)

    def convert(self, model: nn.Module, names: list[str], recipe: Recipe, autocast_only: bool) -> Runtime:
        # Imported here, for fusions are made of this module's layers.
        from lightning_fp8.backends.transformer_engine_fusion import fuse, resolve

        groups = resolve(model, names, self.fuse)
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
        if self.fp8_dpa:
            _check_attention(model)
            forward_context = AttentionContext(recipe)
        common = super().convert(model, names, recipe, autocast_only)
        fuse(groups)
        return TransformerEngineRuntime(common.scaling, common.states, forward_context)

    def revert(self, model: nn.Module) -> None:
        from lightning_fp8.backends.transformer_engine_fusion import unfuse

        unfuse(model)
        super().revert(model)


class TransformerEngineRuntime(Runtime):
    """Layers at work whose casts read copies of the scales."""

    states: Sequence[TransformerEngineState]

    def step(self, group: dist.ProcessGroup | None = None) -> None:
        super().step(group)
        self._refresh()
        # A forward after the optimizer step may have kept a cast: its scale is old, and the new window lacks its amax.
        self.weights_changed()
        for state in self.states:
            state.cold = state.cold and not state.ran

    def weights_changed(self) -> None:
        super().weights_changed()
        for state in self.states:
            state.cast_weight = None

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        missing = super().load_state_dict(state)
        self._refresh()
        # Read from the checkpoint's copy on the CPU: no wait for the device.
        known = (state["table"]["data"][..., SCALE] > 0).all(-1)
        warm = {name for name, scaled in zip(state["table"]["names"], known.tolist(), strict=True) if scaled}
        for layer in self.states:
            layer.cold = layer.name not in warm
        return missing

    def _refresh(self) -> None:
        """Give the casts the scales of the table; what has none yet casts with 1 until it takes one from the data."""
        scale = self.table.data[..., SCALE]
        rows = list(torch.where(scale > 0, scale, 1.0).unbind())
        if rows:
            torch._foreach_copy_([state.training_scales for state in self.states], rows)


class TransformerEngineState(Float8State):
    """What a :class:`TransformerEngineLinear` needs beside its parameters.

    Args:
        scaling: the scale state of all layers converted together.
        index: this layer's row in its table.
        autocast_only: run in FP8 under autocast only.
        backend: the options.

    Attributes:
        cold: scales are not known yet, and are taken from the data.
        ran: a training step has run in FP8.
        cast_weight: which weight the cached FP8 copy is of, while it is valid.
        training_scales, evaluation_scales: what the casts of input, weight and grad_output read, fp32 ``[3]``.
        fusion: the modules that run as one with this layer at their end.
    """

    def __init__(
        self, scaling: ScalingState, index: int, autocast_only: bool, backend: TransformerEngineBackend
    ) -> None:
        self.backend = backend
        self.cold = True
        self.ran = False
        self.fusion: Any = None
        super().__init__(scaling, index, autocast_only)

    @property
    def layer_class(self) -> type[Float8Linear]:
        return TransformerEngineLinear

    @property
    def stored(self) -> bool:
        """Whether scales are known before the data."""
        return self.training_casts.stored

    def link(self) -> None:
        super().link()
        device = self.scaling.table.device
        self.training_scales = torch.ones(len(ROLES), dtype=torch.float32, device=device)
        self.evaluation_scales = torch.ones(len(ROLES), dtype=torch.float32, device=device)
        self.cold = True
        self.cast_weight: tuple[int, int, int] | None = None
        self.engine: Engine | None = None
        self.fused_engine: Engine | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The library's modules hold process-wide handles; a copy makes its own.
        made_anew = ("engine", "fused_engine", "training_scales", "evaluation_scales", "cast_weight")
        return {key: value for key, value in super().__getstate__().items() if key not in made_anew}

    def take_scale(self, x: Tensor, role: int, training: bool) -> None:
        """Let the next cast of ``x`` have a scale from its data, kept in the table if it had none.

        Args:
            x: the operand.
            role: its place in :data:`ROLES`.
            training: whether the table keeps the scale and prefers the one it has.
        """
        cast = self.scaling.recipe.casts[ROLES[role]].uses[0]
        amax = amax_of(x.detach())
        scale = cast.scale(amax)
        if training:
            slot = self.slots[role].data
            scale = torch.where(slot[SCALE] > 0, slot[SCALE], scale)
            telling = tells_scale(amax)
            for column in (SCALE, SCALE_TRANSPOSED):
                slot[column].copy_(torch.where(telling, scale, slot[column]))
        (self.training_scales if training else self.evaluation_scales)[role].copy_(scale)

    def first_microbatch(self, weight: Tensor) -> bool | None:
        """What Transformer Engine's ``is_first_microbatch`` is to be: ``None`` keeps no FP8 weight."""
        if not (self.backend.cache_weights and torch.is_grad_enabled() and isinstance(weight, nn.Parameter)):
            return None
        identity = (id(weight), weight._version, weight.data_ptr())
        # Fused optimizers leave the version alone: weights_changed() tells of those.
        first, self.cast_weight = identity != self.cast_weight, identity
        return first


class TransformerEngineLinear(Float8Linear):
    """A linear layer that multiplies in FP8 with Transformer Engine."""

    fp8: TransformerEngineState

    @torch.compiler.disable
    def multiply(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        fp8, weight, training, rows = self.fp8, self.weight, self.training, x.shape[0]
        if rows == 0:
            bias = None if self.bias is None else self.bias.to(out_dtype)
            return self.multiply_uncast(x.to(out_dtype), weight.to(out_dtype), bias)
        x = pad_rows(x, fp8.scaling.recipe.size_multiple)
        first = fp8.first_microbatch(weight) if training else None
        operands = ((0, x), (1, weight)) if first is not False else ((0, x),)
        measured = training and (not fp8.stored or fp8.cold or fp8.backend.amax == "measured")
        from_data = fp8.stored and (fp8.cold or not training)
        for role, operand in operands:
            if measured:
                record_amax(operand, fp8.slots[role])
            if from_data:
                fp8.take_scale(operand, role, training)
        if fp8.engine is None:
            fp8.engine = Engine(*linear_engine(self), [fp8])
        y = fp8.engine(x, training, library_amax=training and fp8.stored and not measured, first_microbatch=first)
        if training:
            fp8.ran = True
        if measured:
            y = record_gradient(y, fp8.slots[2])
        if from_data and y.requires_grad:
            # A hook on the output runs before Transformer Engine casts the gradient.
            y.register_hook(lambda gradient: fp8.take_scale(gradient, 2, training))
        return y.narrow(0, 0, rows)


def _why_not_hardware(recipe: Recipe, hardware: Hardware) -> str | None:
    """Transformer Engine's own conditions (``transformer_engine/pytorch/quantization.py``, 2.20), with the remedy."""
    remedy = "use backend='native', which emulates what the hardware lacks."
    if hardware.type != "cuda":
        return f"Transformer Engine needs a CUDA device: {remedy}"
    if hardware.capability < (8, 9):
        return f"Transformer Engine needs compute capability 8.9: {remedy}"
    if isinstance(recipe, BlockwiseScaling) and (hardware.capability < (9, 0) or hardware.cuda < (12, 9)):
        return f"Transformer Engine's block scaling needs compute capability 9.0 and CUDA 12.9: {remedy}"
    if isinstance(recipe, MXFP8Scaling) and not (10, 0) <= hardware.capability < (12, 0):
        return f"Transformer Engine's MXFP8 needs compute capability 10.x or 11.x: {remedy}"
    return None


def _check_attention(model: nn.Module) -> None:
    if not any(isinstance(module, load().DotProductAttention) for module in model.modules()):
        raise ValueError(
            "fp8_dpa=True runs te.DotProductAttention modules in FP8, and this model has none: build its attention "
            "with them, or use fp8_dpa=False."
        )
