"""A decoder-only transformer on bytes, and its training."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric

VOCABULARY = 256


class Block(nn.Module):
    """Attention, then a feed-forward network, each normed before and added to what came in ([batch, time, width])."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
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
        # scores and softmax stay in high precision: only the projections around them become FP8
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class BitsPerByte(Metric):
    """Mean of a loss in nats per byte, in bits: what a perfect coder would need to store the text with this model."""

    nats: Tensor
    batches: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nats", default=torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("batches", default=torch.zeros(()), dist_reduce_fx="sum")

    def update(self, loss: Tensor, weight: int = 1) -> None:
        """Add a batch's mean loss (nats per byte, scalar) that counts `weight` times."""
        self.nats += loss * weight
        self.batches += weight

    def compute(self) -> Tensor:
        """Bits per byte so far (scalar)."""
        return self.nats / self.batches / math.log(2)


class GPT(pl.LightningModule):
    """A small decoder-only transformer that predicts the next byte.

    Args:
        width: Size of the residual stream; a multiple of 16, so that every projection can run in FP8.
        layers: Number of blocks.
        heads: Attention heads per block.
        length: Longest context in bytes.
        tied: Whether the head shares its weight with the embedding.
        lr: Highest learning rate, after the warmup.
        warmup: Steps in which the learning rate rises; it then falls to a tenth along a cosine.
        weight_decay: AdamW's, on matrices only.
        fused: Whether to use PyTorch's fused AdamW. Lightning's own mixed precision refuses to clip its gradients.
    """

    def __init__(
        self,
        width: int = 192,
        layers: int = 4,
        heads: int = 6,
        length: int = 256,
        tied: bool = True,
        lr: float = 2e-3,
        warmup: int = 40,
        weight_decay: float = 0.1,
        fused: bool = True,
    ) -> None:
        super().__init__()
        if width % 16 or width % heads:
            raise ValueError(f"width must be a multiple of 16 and of heads={heads}, got {width}")
        self.save_hyperparameters()
        self.lr, self.warmup, self.weight_decay, self.fused = lr, warmup, weight_decay, fused
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)
        blocks = [Block(width, heads) for _ in range(layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(_init)
        for block in blocks:  # the residual stream grows by 2 * layers additions: GPT-2's scaling keeps it at 1
            for linear in (block.out, block.down):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * layers))
        if tied:
            self.head.weight = self.embedding.weight
        self.train_bits = BitsPerByte()
        self.val_bits = BitsPerByte()

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the next byte ([batch, time, 256]) for each position of `text` ([batch, time], integers)."""
        x = self.embedding(text) + self.position.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def _loss(self, windows: Tensor) -> Tensor:
        windows = windows.long()
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.train_bits.update(loss.detach())
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/bits_per_byte", self.train_bits, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self._loss(batch)
        self.val_bits.update(loss, len(batch))
        self.log("val/loss", loss, batch_size=len(batch), sync_dist=True)
        self.log("val/bits_per_byte", self.val_bits, prog_bar=True)

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        others = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=self.fused)
        steps = self.trainer.estimated_stepping_batches

        def factor(step: int) -> float:
            if step < self.warmup:
                return (step + 1) / self.warmup
            progress = min(1.0, (step - self.warmup) / max(1, steps - self.warmup))
            return 0.55 + 0.45 * math.cos(math.pi * progress)

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _init(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
