"""How Transformer Engine is called: its modules with borrowed parameters, its recipes, its regions.

Written against Transformer Engine 2.20 (``transformer_engine/pytorch/module/base.py``).
"""

from __future__ import annotations

import copy
import importlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_fp8.recipes import DelayedScaling, MXFP8Scaling, Recipe, StaticScaling, TensorwiseScaling
from lightning_fp8.statistics import AMAX

if TYPE_CHECKING:
    from lightning_fp8.backends.transformer_engine import TransformerEngineState


def load() -> Any:
    """Transformer Engine's PyTorch package, imported where it is used."""
    return importlib.import_module("transformer_engine.pytorch")


class _Owned(torch.autograd.Function):
    """The identity; its output may be changed in place, as a layer's output may.

    Transformer Engine returns a view made inside of its own autograd function, which autograd lets nobody change.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.data  # No view of y to autograd; no backward of the library reads its own output.

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output


class Engine:
    """A module of Transformer Engine at work for one layer, or for several that it runs as one.

    Args:
        module: made on the meta device; its parameters are placeholders.
        parameters: names of its parameters, and where each call finds them.
        states: the states of the linear layers that it runs, in the order of their GEMMs.
    """

    def __init__(
        self,
        module: Any,
        parameters: dict[str, tuple[nn.Module, str]],
        states: list[TransformerEngineState],
    ) -> None:
        self.module = module
        self.parameters = parameters
        self.states = states
        first = states[0]
        self.recipe = library_recipe(first.scaling.recipe)
        self.library = load()
        manager = importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager
        # Being listed already keeps the module out of the global buffers of amaxes.
        module.fp8_meta[manager.get_buffer_info()] = []
        self.quantizers: dict[bool, dict[str, list[Any]]] = {}
        self.unread = torch.zeros(1, dtype=torch.float32, device=first.scaling.table.device)

    def __call__(self, x: Tensor, training: bool, library_amax: bool, first_microbatch: bool | None) -> Tensor:
        """Run the module.

        Args:
            x: ``[rows, in_features]``.
            training: whose scales the casts read.
            library_amax: the module's casts write their amaxes into the table.
            first_microbatch: Transformer Engine's ``is_first_microbatch``.
        """
        for name, (owner, attribute) in self.parameters.items():
            self.module._parameters[name] = getattr(owner, attribute)
        with self.library.autocast(enabled=True, recipe=self.recipe):
            if self.states[0].stored:
                self._bind(training, library_amax)
            return _Owned.apply(self.module(x, is_first_microbatch=first_microbatch))  # type: ignore[no-any-return]

    def _bind(self, training: bool, library_amax: bool) -> None:
        """Let the module's quantizers read the layers' scales, and write their amaxes where they belong.

        Quantizers come in threes forward (input, weight, output) and in twos backward (grad_output, grad_input).
        Training and evaluation have quantizers of their own: a backward may follow an evaluation.
        """
        if not self.quantizers:
            self.module.init_fp8_metadata(num_gemms=len(self.states))
            made = self.module.quantizers
            self.quantizers = {True: made, False: {key: [copy.copy(q) for q in made[key]] for key in made}}
        quantizers = self.module.quantizers = self.quantizers[training]
        for gemm, state in enumerate(self.states):
            forward, backward = quantizers["scaling_fwd"][3 * gemm :], quantizers["scaling_bwd"][2 * gemm :]
            scales = state.training_scales if training else state.evaluation_scales
            for role, quantizer in enumerate((forward[0], forward[1], backward[0])):
                quantizer.scale = scales[role]
                quantizer.amax = state.slots[role].data[AMAX : AMAX + 1] if library_amax else self.unread


class AttentionContext:
    """Makes ``te.autocast`` regions around forward and loss, in which the model's attention modules run in FP8.

    Their scales are Transformer Engine's own, moved at the end of each region.

    Args:
        recipe: delayed scaling, as for the linear layers.
    """

    def __init__(self, recipe: Recipe) -> None:
        settings = recipe.settings()
        kept = ("margin", "amax_history_len", "amax_compute_algo", "reduce_amax")
        self.recipe = library_recipe(recipe, fp8_dpa=True, **{name: settings[name] for name in kept})

    def __call__(self) -> AbstractContextManager[Any]:
        return load().autocast(enabled=True, recipe=self.recipe)


def linear_engine(layer: nn.Linear) -> tuple[Any, dict[str, tuple[nn.Module, str]]]:
    """A ``te.Linear`` for ``layer``, and where it finds its parameters."""
    bias = layer.bias is not None
    module = load().Linear(layer.in_features, layer.out_features, bias=bias, device="meta")
    return module, {name: (layer, name) for name in ("weight", "bias")[: 1 + bias]}


def library_recipe(recipe: Recipe, **delayed: Any) -> Any:
    """Transformer Engine's recipe for ours; ``delayed`` are settings of its delayed scaling."""
    library = importlib.import_module("transformer_engine.common.recipe")
    hybrid = recipe.casts["grad_output"].uses[0].format.name == "e5m2"
    formats = {"fp8_format": library.Format.HYBRID if hybrid else library.Format.E4M3}
    if isinstance(recipe, (DelayedScaling, StaticScaling)):
        # History and reduction are this package's: one entry is all that the casts write to.
        return library.DelayedScaling(**{"amax_history_len": 1, "reduce_amax": False, **formats, **delayed})
    if isinstance(recipe, MXFP8Scaling):
        return library.MXFP8BlockScaling(**formats)
    kind = library.Float8CurrentScaling if isinstance(recipe, TensorwiseScaling) else library.Float8BlockScaling
    made = kind(**formats)
    power_of_two = recipe.casts["input"].uses[0].power_of_two
    for operand in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(made, operand, library.QParams(power_2_scale=power_of_two, amax_epsilon=0.0))
    return made
