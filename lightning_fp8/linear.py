"""``Float8Linear``: an ``nn.Linear`` whose three GEMMs run in FP8."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fp8.amaxes import watched_linear
from lightning_fp8.ops import GemmLibrary, LinearCasts, scaled_linear
from lightning_fp8.recipes import ROLES
from lightning_fp8.scaling import ScalingState

#: Updates of a weight without a step that nobody means. Weights that are loaded or averaged in between are fewer.
MOST_UPDATES = 20


class Float8State:
    """What a :class:`Float8Linear` needs beside its parameters. Never a parameter, never a buffer.

    Module-wide operations must not reach it: a buffer would be overwritten by DDP's broadcast, rounded by
    ``.bfloat16()``, emptied by ``to_empty`` and averaged by EMA.

    Args:
        scaling: the scale state of all layers converted together.
        index: this layer's row in its table.
        autocast_only: run in FP8 under autocast only (mixed precision): where autocast is switched off, the user asked
            for full precision.
        gemm, recompute_weight_cast: as in :class:`~lightning_fp8.ops.LinearCasts`.

    Attributes:
        enabled: whether the layer runs in FP8; recovery switches a failing layer to high precision for a while.
        slots: the statistics of input, weight and grad_output, fp32 ``[4]`` each.
        gathered_weight: where the weight arrives as FP8 codes, a slot with the scale they were cast with: casting
            with it again restores the codes. The weight's amax is taken from its shards then, not here.
    """

    def __init__(
        self,
        scaling: ScalingState,
        index: int,
        autocast_only: bool = False,
        gemm: GemmLibrary = "torch",
        recompute_weight_cast: bool = False,
    ) -> None:
        self.scaling = scaling
        self.index = index
        self.autocast_only = autocast_only
        self.enabled = True
        recipe = scaling.recipe
        self.gathered_weight: Tensor | None = None
        # The weight's version at the last forward, the steps until then, and updates of the weight without a step.
        self._seen = (-1, 0, 0)
        stored = recipe.source != "data"
        self.training_casts = LinearCasts.of(recipe, stored, gemm, recompute_weight_cast)
        # Evaluation scales each tensor from its own data and records nothing.
        self.evaluation_casts = LinearCasts.of(recipe, False, gemm, recompute_weight_cast)
        self.link()

    @property
    def layer_class(self) -> type[Float8Linear]:
        """The class that the layer becomes."""
        return Float8Linear

    @property
    def name(self) -> str:
        """The layer's name in the table."""
        return self.scaling.table.names[self.index]

    def shard_weight(self, gathered: Tensor | None = None) -> None:
        """The whole weight exists during forward and backward only: keep no copy of it in between.

        Args:
            gathered: see :attr:`gathered_weight`.
        """
        self.gathered_weight = gathered
        self.evaluation_casts = replace(self.evaluation_casts, recompute_weight_cast=True)
        self.training_casts = replace(
            self.training_casts, recompute_weight_cast=True, weight_scale_known=gathered is not None
        )

    @torch.inference_mode(False)
    def follow(self, weight: Tensor) -> None:
        """Move to where ``weight`` is; within an evaluation too, whose tensors training could not change."""
        if not weight.is_meta:
            self.scaling.to(weight.device)
            self.link()

    def look_for_steps(self, weight: Tensor) -> None:
        """Warn, once for all layers, where weights are updated again and again and nobody says that a step is over."""
        if self.scaling.history is None or weight.is_inference():
            return
        version, steps, updates = self._seen
        if weight._version != version:
            updates = updates + 1 if steps == self.scaling.steps and version >= 0 else 0
            self._seen = (weight._version, self.scaling.steps, updates)
            if updates == MOST_UPDATES and not self.scaling.warned:
                self.scaling.warned = True
                warnings.warn(
                    f"The weight of {self.name!r} was updated {updates} times, and the scales of FP8 layers have not "
                    "moved: call lightning_fp8.step(model) after each optimizer step. (Fabric does so itself, and the "
                    "Trainer as a training_step begins: call it between several optimizer steps in one.)",
                    stacklevel=4,
                )

    def link(self) -> None:
        """Take the slots anew, after the table moved."""
        of_input, of_weight, of_grad_output = (self.scaling.table.slot(self.index, role) for role in ROLES)
        self.slots = (of_input, of_weight, of_grad_output)

    def __getstate__(self) -> dict[str, Any]:
        # Slots are views over the table's memory: a copy must view its own table's.
        return {key: value for key, value in self.__dict__.items() if key != "slots"}

    @torch.inference_mode(False)
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.link()


class Float8Linear(nn.Linear):
    """A linear layer that multiplies in FP8; made from an ``nn.Linear`` in place by :func:`~.model.convert_model`.

    Parameters, state_dict, hooks, ``isinstance(layer, nn.Linear)`` and the dtypes of input and output are those of the
    ``nn.Linear`` it was.

    Attributes:
        fp8: recipe, scales and statistics.
        sees_operands: whether a call gets the layer's input and gives its output, as hooks take it to.
    """

    fp8: Float8State
    sees_operands: ClassVar[bool] = True

    def forward(self, input: Tensor) -> Tensor:
        """``input @ weight^T + bias``.

        Args:
            input: ``[..., in_features]``.

        Returns:
            ``[..., out_features]``, in autocast's dtype where autocast is on, else in the input's.

        Raises:
            TypeError: ``torch.fx`` traces symbolically.
            RuntimeError: ``torch.jit.trace``, or a transform of ``torch.func``, would go through an FP8 product.
        """
        fp8 = self.fp8
        if isinstance(input, torch.fx.Proxy):
            raise TypeError(_no_products("torch.fx.symbolic_trace", fp8.name))
        device_type = input.device.type
        weight, bias = self.local_parameters()
        in_features = weight.shape[1]
        fits = input.is_floating_point() and (input.is_nested or input.shape[-1:] == (in_features,))
        if device_type == "meta" or not fits:
            # Only shapes are wanted, or the input is a mistake: torch's own error says which, and nothing is recorded.
            return F.linear(input, weight, bias)
        autocast = torch.is_autocast_enabled(device_type)
        if not fp8.enabled or (fp8.autocast_only and not autocast):
            return self.multiply_uncast(input, weight, bias)
        if not torch.compiler.is_compiling():
            _refuse_transforms(fp8.name)
            if self.training:
                fp8.look_for_steps(weight)
        if input.is_nested:
            return _map_rows(self.forward, input)
        out_dtype = torch.get_autocast_dtype(device_type) if autocast else input.dtype
        return with_leading_sizes(self.multiply(input.reshape(-1, in_features), out_dtype), input)

    def multiply(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        """``x @ weight^T + bias`` in FP8: the part that each backend does with a library of its own.

        Args:
            x: ``[tokens, in_features]``, any number of tokens.
            out_dtype: dtype of the result.

        Returns:
            ``[tokens, out_features]``.
        """
        fp8 = self.fp8
        casts, slots = (fp8.training_casts, fp8.slots) if self.training else (fp8.evaluation_casts, None)
        if slots is not None and fp8.gathered_weight is not None:
            slots = (slots[0], fp8.gathered_weight, slots[2])
        weight, bias = self.local_parameters()
        y = scaled_linear(x, weight, casts, slots, out_dtype)
        return y if bias is None else y + bias.to(out_dtype)

    def multiply_uncast(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``input @ weight^T + bias`` in high precision, watched in training.

        Args:
            input: ``[..., in_features]``.
            weight: ``[out_features, in_features]``, of the input's dtype or under autocast.
            bias: ``[out_features]``, the same.
        """
        # Whoever watches the layers must not go blind where one leaves FP8.
        return watched_linear(input, weight, bias, self.fp8.slots) if self.training else F.linear(input, weight, bias)

    def local_parameters(self) -> tuple[Tensor, Tensor | None]:
        """The weight and bias that this rank multiplies with; a tensor-parallel layer holds a part of each.

        Raises:
            RuntimeError: the weight is a DTensor, which FP8 GEMMs do not take.
        """
        if isinstance(self.weight, DTensor):
            raise RuntimeError(
                f"The weight of the FP8 layer {self.fp8.name!r} is a DTensor in forward. Sharded by fully_shard: call "
                "the sharded module itself, so that its hooks gather the weight. Tensor-parallel: use the styles of "
                "lightning_fp8.comm.tensor_parallel, after conversion; lightning_fp8.shard(module, mesh) or "
                "self.trainer.precision_plugin.shard(self, mesh) does all of it in the right order."
            )
        return self.weight, self.bias

    def __prepare_scriptable__(self) -> Float8Linear:
        """What ``torch.jit.script`` asks of each module first: TorchScript has no FP8.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(_no_products("torch.jit.script", self.fp8.name))

    def _apply(self, fn: Any, recurse: bool = True) -> Float8Linear:
        super()._apply(fn, recurse)
        self.fp8.follow(self.weight)
        return self


def _refuse_transforms(name: str) -> None:
    """Before they fail somewhere within.

    Raises:
        RuntimeError: TorchScript is traced, or a transform of ``torch.func`` is active.
    """
    if torch.jit.is_tracing():
        raise RuntimeError(_no_products("torch.jit.trace (a logger's log_graph=True, too)", name))
    # What torch.autograd.Function asks, too, and torch.func has no public word for (torch 2.11, 2.13).
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"The transforms of torch.func (grad, vmap, jvp, jacrev) do not go through the FP8 layer {name!r}: exclude "
            "it in LayerSelection, or call lightning_fp8.revert_model(model) first."
        )


def _no_products(tracer: str, name: str) -> str:
    return (
        f"{tracer} does not take the FP8 layer {name!r}: call lightning_fp8.revert_model(model) first, or use "
        "torch.export, which takes FP8 layers (those of a mixed-precision run under autocast)."
    )


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The input of a linear layer, from the arguments that a hook gets: it may be called by keyword."""
    return args[0] if args else kwargs["input"]


def with_leading_sizes(y: Tensor, input: Tensor) -> Tensor:
    """``[rows, features]``, which nobody else has, as ``[..., features]`` with the leading sizes of a layer's input.

    For autograd it is no view, as the outputs of ``torch.matmul`` are none: where FSDP2 shards the layer itself, its
    hooks hang on the output, and would not survive that a view is changed in place.
    """
    return torch.ops.aten._unsafe_view.default(y, (*input.shape[:-1], y.shape[-1]))


def _map_rows(function: Callable[[Tensor], Tensor], x: Any) -> Tensor:
    """Apply ``function`` to all rows of a nested tensor at once.

    ``nn.TransformerEncoder`` makes nested tensors of padded batches in evaluation.
    """
    if x.layout == torch.jagged:
        return torch.nested.nested_tensor_from_jagged(function(x.values()), x.offsets(), x.lengths())
    parts = x.unbind()
    rows = function(torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]))
    results = rows.split([part.shape[:-1].numel() for part in parts])
    return torch.nested.as_nested_tensor([y.view(*p.shape[:-1], -1) for y, p in zip(results, parts, strict=True)])
