"""FP8 without this package: torchao and Transformer Engine as their own users have them, for `model.py`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_fp8.tuning.bench import Preparation
from lightning_fp8.tuning.decoder import Decoder


def torchao(recipe: str, model: Decoder) -> Callable[[], AbstractContextManager[Any]]:
    """The module swap of torchao; meant to be compiled."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "head")
    return nullcontext


def transformer_engine(recipe: str, model: Decoder) -> Callable[[], AbstractContextManager[Any]]:
    """``te.Linear`` in place of every linear layer but the head; runs eagerly."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    hybrid = recipes.Format.HYBRID
    chosen = {
        "delayed": partial(recipes.DelayedScaling, fp8_format=hybrid, amax_history_len=1024, amax_compute_algo="max"),
        "current": partial(recipes.Float8CurrentScaling, fp8_format=hybrid),
        "block": recipes.Float8BlockScaling,
    }[recipe]()
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                other = te.Linear(
                    layer.in_features, layer.out_features, bias=False, params_dtype=torch.bfloat16, device="cuda"
                )
                with torch.no_grad():
                    other.weight.copy_(layer.weight)
                setattr(block, name, other)
    return partial(te.autocast, enabled=True, recipe=chosen)


PEERS: dict[str, Preparation] = {
    "peer-torchao-tensorwise": partial(torchao, "tensorwise"),
    "peer-torchao-rowwise": partial(torchao, "rowwise"),
    "peer-te-delayed": partial(transformer_engine, "delayed"),
    "peer-te-current": partial(transformer_engine, "current"),
    "peer-te-block": partial(transformer_engine, "block"),
}
