"""The transformer block that the examples share, and its optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn


class Block(nn.Module):
    """Attention, then a feed-forward network, each normed before and added to what came in (``[batch, time, width]``).

    Args:
        width: size of the residual stream.
        heads: attention heads.
        causal: whether a position sees only those before it.

    Raises:
        ValueError: the projections could not run in FP8, or the heads do not share the width evenly.
    """

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        if width % 16 or width % heads:
            raise ValueError(f"width must be a multiple of 16 and of heads={heads}, got {width}")
        self.heads = heads
        self.causal = causal
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self._attend(self.qkv(self.attention_norm(x))))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    def _attend(self, qkv: Tensor) -> Tensor:
        # Scores and softmax stay in high precision: only the projections around them become FP8.
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)


def init_std(width: int) -> float:
    """Standard deviation of initial weights: "small init" (Nguyen and Salazar 2019, arXiv 1910.05895)."""
    return math.sqrt(2 / (5 * width))


def make_blocks(layers: int, width: int, heads: int, causal: bool) -> nn.ModuleList:
    """Blocks with small weights.

    The ``2 * layers`` projections back into the residual stream add up there: GPT-2's factor (Radford et al. 2019,
    section 2.3) keeps their sum as large as one.
    """
    std = init_std(width)
    blocks = nn.ModuleList()
    for _ in range(layers):
        block = Block(width, heads, causal)
        for linear in (block.qkv, block.up):
            nn.init.normal_(linear.weight, std=std)
        for linear in (block.out, block.down):
            nn.init.normal_(linear.weight, std=std / math.sqrt(2 * layers))
        blocks.append(block)
    return blocks


def warmup_cosine(step: int, warmup: int, steps: Callable[[], float]) -> float:
    """Factor on the learning rate: up to 1 in ``warmup`` steps, then along a cosine to 0.1 at ``steps()``."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warmup) / max(1.0, steps() - warmup)))


def configure_adamw(
    module: pl.LightningModule, lr: float, warmup: int, weight_decay: float, fused: bool
) -> OptimizerLRSchedulerConfig:
    """AdamW, with decay on matrices only, under a learning rate that warms up and falls along a cosine.

    Raises:
        ValueError: there is no warmup.
    """
    if warmup < 1:
        raise ValueError(f"warmup must be at least 1 step, got {warmup}")
    matrices = [parameter for parameter in module.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in module.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused)

    def factor(step: int) -> float:
        # The Trainer is asked for its steps after the warmup, not here and now: it would make the loader before it
        # has read the checkpoint, and then the loader's state is never restored (seen with lightning 2.6.6).
        return warmup_cosine(step, warmup, lambda: module.trainer.estimated_stepping_batches)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
