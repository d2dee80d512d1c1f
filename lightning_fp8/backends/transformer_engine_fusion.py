"""Modules that Transformer Engine runs as one: norm and linear layer, or norm and a whole MLP.

The user names modules that run one after the other, with nothing between them::

    TransformerEngineBackend(fuse=[("block.ln_1", "block.attention.qkv"),
                                   ("block.ln_2", "block.mlp.0", "block.mlp.1", "block.mlp.2")])

All keep their objects, parameters and names. The last linear layer of a group does the work of all; those before it
hand their input on. In evaluation, in the first step and while a layer runs in high precision, the last one computes
the group module by module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_fp8.backends.transformer_engine import TransformerEngineLinear
from lightning_fp8.backends.transformer_engine_library import Engine, load
from lightning_fp8.kernels.reference import pad_rows
from lightning_fp8.linear import Float8Linear, with_leading_sizes
from lightning_fp8.selection import clean_name, linear_layers


class Group(NamedTuple):
    """Modules that run as one.

    Attributes:
        modules: in the order in which they run; the last is a linear layer.
    """

    modules: tuple[nn.Module, ...]

    @property
    def linears(self) -> list[nn.Linear]:
        """The linear layers among them."""
        return [module for module in self.modules if isinstance(module, nn.Linear)]


class _HandsOn(nn.Module):
    """A module whose work a later one does."""

    def forward(self, input: Tensor) -> Tensor:
        return input

    def compute(self, input: Tensor) -> Tensor:
        """What the module does by itself."""
        return super().forward(input)


class FusedLayerNorm(_HandsOn, nn.LayerNorm):
    """An ``nn.LayerNorm`` that a later linear layer computes."""


class FusedRMSNorm(_HandsOn, nn.RMSNorm):
    """An ``nn.RMSNorm`` that a later linear layer computes."""


class FusedGELU(_HandsOn, nn.GELU):
    """An ``nn.GELU`` that a later linear layer computes."""


class FusedReLU(_HandsOn, nn.ReLU):
    """An ``nn.ReLU`` that a later linear layer computes."""


class FusedSiLU(_HandsOn, nn.SiLU):
    """An ``nn.SiLU`` that a later linear layer computes."""


class FusedFirstLinear(_HandsOn, TransformerEngineLinear):
    """The first linear layer of an MLP that its second one computes."""

    sees_operands = False


class FusedLinear(TransformerEngineLinear):
    """The last layer of a group, which computes them all."""

    sees_operands = False

    def forward(self, input: Tensor) -> Tensor:
        """The whole group: ``[..., in_features of the norm]`` to ``[..., out_features]``."""
        if self._runs_as_one(input):
            return self._run_as_one(input)
        for module in self.fp8.fusion.modules[:-1]:
            input = module.compute(input)
        return super().forward(input)

    def _runs_as_one(self, input: Tensor) -> bool:
        fp8 = self.fp8
        states = [layer.fp8 for layer in fp8.fusion.linears]
        if not self.training or not all(state.enabled and not state.cold for state in states):
            return False
        # Whatever else comes in is the business of the modules themselves: they say what is wrong with it.
        fits = input.is_floating_point() and not input.is_nested and not input.is_meta and input.numel() > 0
        fits = fits and input.shape[-1] == fp8.fusion.linears[0].in_features
        return fits and (not fp8.autocast_only or torch.is_autocast_enabled(input.device.type))

    @torch.compiler.disable
    def _run_as_one(self, input: Tensor) -> Tensor:
        fp8, linears = self.fp8, self.fp8.fusion.linears
        if fp8.fused_engine is None:
            fp8.fused_engine = Engine(*_fused_engine(fp8.fusion), [layer.fp8 for layer in linears])
        first = [layer.fp8.first_microbatch(layer.weight) for layer in linears]
        rows = input.reshape(-1, input.shape[-1])
        y = fp8.fused_engine(
            pad_rows(rows, fp8.scaling.recipe.size_multiple),
            training=True,
            library_amax=True,
            first_microbatch=None if None in first else any(first),
        )
        return with_leading_sizes(y.narrow(0, 0, rows.shape[0]), input)


_FUSED: dict[type[nn.Module], type[nn.Module]] = {
    nn.LayerNorm: FusedLayerNorm,
    nn.RMSNorm: FusedRMSNorm,
    nn.GELU: FusedGELU,
    nn.ReLU: FusedReLU,
    nn.SiLU: FusedSiLU,
}
_ACTIVATIONS: dict[type[nn.Module], str] = {nn.GELU: "gelu", nn.ReLU: "relu", nn.SiLU: "silu"}
_ORIGINAL = {fused: original for original, fused in _FUSED.items()}


def resolve(model: nn.Module, names: list[str], fuse: Sequence[Sequence[str]]) -> list[Group]:
    """The modules that ``fuse`` names, checked.

    Args:
        model: holds them.
        names: the layers that run in FP8.
        fuse: groups of qualified names.

    Raises:
        ValueError: a group is not one that Transformer Engine runs as one.
    """
    modules = {clean_name(name): module for name, module in model.named_modules(remove_duplicate=False)}
    layers = linear_layers(model)
    converted = {id(layers[name]) for name in names}
    groups = []
    for group in fuse:
        for name in group:
            if name not in modules:
                raise ValueError(f"fuse names {name!r}, which the model does not have.")
        chosen = Group(tuple(modules[name] for name in group))
        against = _why_not(chosen, converted)
        if against is not None:
            raise ValueError(f"fuse cannot run {' + '.join(group)} as one: {against}.")
        groups.append(chosen)
    used = [id(module) for group in groups for module in group.modules]
    if len(used) != len(set(used)):
        raise ValueError("fuse names a module in two groups.")
    return groups


def fuse(groups: list[Group]) -> None:
    """Let the last layer of each group do the work of all; the layers are converted already."""
    for group in groups:
        last: Any = group.modules[-1]
        last.__class__ = FusedLinear
        last.fp8.fusion = group
        for module in group.modules[:-1]:
            module.__class__ = FusedFirstLinear if isinstance(module, Float8Linear) else _FUSED[type(module)]


def unfuse(model: nn.Module) -> None:
    """Undo :func:`fuse` on the modules that are no linear layers."""
    for module in model.modules():
        if type(module) in _ORIGINAL:
            module.__class__ = _ORIGINAL[type(module)]


def _why_not(group: Group, converted: set[int]) -> str | None:
    norm, *inner, last = group.modules
    linears: list[Any] = [*inner[:1], last]
    if type(norm) not in (nn.LayerNorm, nn.RMSNorm):
        return f"the first is a {type(norm).__name__}, not an nn.LayerNorm or nn.RMSNorm"
    if not all(id(linear) in converted for linear in linears):
        return "a linear layer of it does not run in FP8"
    if any(not isinstance(linear.weight, nn.Parameter) or nn.parameter.is_lazy(linear.weight) for linear in linears):
        return "a linear layer of it has no weight yet"
    if norm.normalized_shape != (linears[0].in_features,) or norm.weight is None:
        return "the norm needs a weight, and the linear layer's in_features as its shape"
    if isinstance(norm, nn.LayerNorm) and norm.bias is None:
        return "Transformer Engine's LayerNorm has a bias"
    if norm.eps is None:
        return "an nn.RMSNorm without eps takes one from the dtype: give it a number"
    if not inner:
        return None
    first, activation = linears[0], inner[1]
    if type(activation) not in _ACTIVATIONS:
        return f"{type(activation).__name__} is none of nn.GELU, nn.ReLU, nn.SiLU"
    if isinstance(activation, nn.GELU) and activation.approximate != "tanh":
        return "Transformer Engine's GELU is the tanh approximation: use nn.GELU(approximate='tanh')"
    if (first.out_features, first.in_features) != (last.in_features, last.out_features):
        return "the MLP must come back to the size that it began with"
    if (first.bias is None) != (last.bias is None):
        return "either both linear layers have a bias, or none"
    return None


def _fused_engine(group: Group) -> tuple[Any, dict[str, tuple[nn.Module, str]]]:
    """Transformer Engine's module for ``group``, and where it finds its parameters."""
    norm: Any = group.modules[0]
    last: Any = group.modules[-1]
    bias = last.bias is not None
    options = {
        "eps": norm.eps,
        "bias": bias,
        "normalization": "LayerNorm" if isinstance(norm, nn.LayerNorm) else "RMSNorm",
        "device": "meta",
    }
    parameters = {"layer_norm_weight": (norm, "weight")}
    if isinstance(norm, nn.LayerNorm):
        parameters["layer_norm_bias"] = (norm, "bias")
    prefixes = [""] if len(group.linears) == 1 else ["fc1_", "fc2_"]
    for prefix, linear in zip(prefixes, group.linears, strict=True):
        parameters |= {f"{prefix}{name}": (linear, name) for name in ("weight", "bias")[: 1 + bias]}
    library = load()
    if len(group.linears) == 1:
        return library.LayerNormLinear(last.in_features, last.out_features, **options), parameters
    activation = _ACTIVATIONS[_ORIGINAL[type(group.modules[2])]]
    return library.LayerNormMLP(last.out_features, last.in_features, activation=activation, **options), parameters
