"""A decoder-only transformer on bytes, and its training."""

from __future__ import annotations

import math

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torchmetrics import Metric

from examples.transformer import configure_adamw, init_std, make_blocks

VOCABULARY = 256


class BitsPerByte(Metric):
    """Mean of a loss in nats per byte, in bits: what a perfect coder would need to store the text with this model."""

    full_state_update = False
    nats: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nats", default=torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("weight", default=torch.zeros(()), dist_reduce_fx="sum")

    def update(self, loss: Tensor, weight: int = 1) -> None:
        """Add a batch's mean loss (nats per byte, scalar) that counts ``weight`` times."""
        self.nats += loss * weight
        self.weight += weight

    def compute(self) -> Tensor:
        """Bits per byte so far (scalar)."""
        return self.nats / self.weight / math.log(2)


class GPT(pl.LightningModule):
    """A small decoder-only transformer that predicts the next byte.

    Args:
        width: size of the residual stream; a multiple of 16, so that every projection can run in FP8.
        layers: number of blocks.
        heads: attention heads per block.
        length: longest context in bytes.
        tied: whether the head shares its weight with the embedding.
        lr: highest learning rate, after the warmup.
        warmup: steps in which the learning rate rises; it then falls to a tenth along a cosine.
        weight_decay: AdamW's, on matrices only.
        fused: whether to use PyTorch's fused AdamW. Lightning's own mixed precision refuses to clip its gradients.
    """

    def __init__(
        self,
        width: int = 128,
        layers: int = 4,
        heads: int = 2,
        length: int = 128,
        tied: bool = True,
        lr: float = 5e-3,
        warmup: int = 40,
        weight_decay: float = 0.1,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.warmup, self.weight_decay, self.fused = lr, warmup, weight_decay, fused
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)
        self.blocks = make_blocks(layers, width, heads, causal=True)
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for module in (self.embedding, self.position, self.head):
            nn.init.normal_(module.weight, std=init_std(width))
        if tied:
            self.head.weight = self.embedding.weight
        self.train_bits = BitsPerByte()
        self.val_bits = BitsPerByte()

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the next byte, ``[batch, time, 256]``, at each position of ``text``, integers ``[batch, time]``."""
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
        self.train_bits(loss.detach())
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/bits_per_byte", self.train_bits, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self._loss(batch)
        self.val_bits.update(loss, len(batch))
        self.log("val/loss", loss, batch_size=len(batch), sync_dist=True)
        self.log("val/bits_per_byte", self.val_bits, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        return configure_adamw(self, self.lr, self.warmup, self.weight_decay, self.fused)
