"""Turn ``nn.Linear`` layers into :class:`~lightning_fp8.linear.Float8Linear` in place, and back.

Only the class of the module object changes. Names, hooks, ties, the training flag, dtypes, requires_grad, and every
reference that anybody holds to the module or its parameters stay what they were, the root module included.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_fp8.linear import Float8Linear, Float8State
from lightning_fp8.selection import linear_layers, why_not_weight


def to_float8(
    model: nn.Module, names: list[str], make_state: Callable[[int, nn.Linear], Float8State]
) -> list[Float8State]:
    """Convert the layers called ``names`` in place.

    Args:
        model: holds the layers.
        names: qualified names: the rows of the layers' table.
        make_state: makes a layer's state from its row and the layer; the state names the layer's new class.

    Returns:
        The states, in the order of ``names``.
    """
    layers = linear_layers(model)
    bypassed = _layers_of_encoders(model)
    # All states first: where one cannot be made, nothing has changed.
    states = [make_state(index, layers[name]) for index, name in enumerate(names)]
    for name, state in zip(names, states, strict=True):
        layer: Any = layers[name]
        layer.fp8 = state
        if is_lazy(layer.weight):
            layer.register_forward_pre_hook(_convert_when_materialized)
        else:
            layer.__class__ = state.layer_class
        if id(layer) in bypassed:
            layer.register_forward_pre_hook(_forbid_fast_path)
    return states


@contextmanager
def all_or_nothing(model: nn.Module) -> Generator[None, None, None]:
    """If the body raises, every module of ``model`` gets back its class, attributes and hooks."""
    saved = [(m, type(m), vars(m).copy(), m._forward_pre_hooks.copy()) for m in model.modules()]
    try:
        yield
    except BaseException:
        for module, cls, attributes, hooks in saved:
            module.__class__ = cls
            vars(module).clear()
            vars(module).update(attributes)
            module._forward_pre_hooks.clear()
            module._forward_pre_hooks.update(hooks)
        raise


def to_linear(model: nn.Module) -> None:
    """Undo :func:`to_float8` on every layer of ``model``."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and "fp8" in layer.__dict__:
            del layer.fp8
            hooks = layer._forward_pre_hooks
            for key in [k for k, hook in hooks.items() if hook in (_convert_when_materialized, _forbid_fast_path)]:
                del hooks[key]
            layer.__class__ = _linear_class(type(layer))


def _linear_class(cls: type) -> type:
    """``nn.Linear`` for the class of a converted layer, and for what torch has made of it since.

    Parametrization and ``fully_shard`` give a layer a class of their own making, derived from the one they find.
    """
    if not issubclass(cls, Float8Linear):
        return cls
    if not cls.__module__.startswith("torch."):
        return nn.Linear
    found = next(base for base in cls.__bases__ if issubclass(base, Float8Linear))
    own = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")}
    return type(cls.__name__.replace(found.__name__, "Linear"), tuple(map(_linear_class, cls.__bases__)), own)


def _convert_when_materialized(layer: nn.Module, args: Any) -> None:
    """Runs behind the hook with which a lazy layer takes its sizes from the first input.

    torch has looked up ``forward`` before it calls hooks, so this first call still runs in high precision.
    """
    if not isinstance(layer, nn.Linear) or is_lazy(layer.weight):
        return
    hooks = layer._forward_pre_hooks
    for key in [k for k, hook in hooks.items() if hook is _convert_when_materialized]:
        del hooks[key]
    state: Float8State = layer.__dict__["fp8"]
    against = why_not_weight(layer.weight, state.scaling.recipe)
    if against is None:
        layer.__class__ = state.layer_class
        state.follow(layer.weight)
    else:
        warnings.warn(f"The lazy layer {state.name!r} stays in high precision: {against}.", stacklevel=2)


def _forbid_fast_path(layer: nn.Module, args: Any) -> None:
    """Does nothing: a hook below it is what keeps ``nn.TransformerEncoderLayer`` off its evaluation fast path.

    That path multiplies with the feed-forward weights without calling the layers, so that a model would be trained in
    FP8 and evaluated in another precision.
    """


def _layers_of_encoders(model: nn.Module) -> set[int]:
    encoders = [m for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer)]
    return {id(layer) for encoder in encoders for layer in encoder.modules() if isinstance(layer, nn.Linear)}
