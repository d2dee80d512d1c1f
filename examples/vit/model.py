"""A vision transformer on small images, and its training."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from examples.transformer import configure_adamw, make_blocks

#: About the deviation of the embedded patches: much smaller positions go unseen in the first epochs.
POSITION_STD = 0.3


class ViT(pl.LightningModule):
    """A small vision transformer that classifies square grey images by the mean of its patches.

    Args:
        image: height and width of the images in pixels.
        patch: height and width of a patch.
        classes: number of classes.
        width: size of the residual stream; a multiple of 16, so that the blocks' projections can run in FP8.
        layers: number of blocks.
        heads: attention heads per block.
        lr: highest learning rate, after the warmup.
        warmup: steps in which the learning rate rises; it then falls to a tenth along a cosine.
        weight_decay: AdamW's, on matrices only.
        fused: whether to use PyTorch's fused AdamW. Lightning's own mixed precision refuses to clip its gradients.

    Raises:
        ValueError: the patches do not tile the image.
    """

    def __init__(
        self,
        image: int = 8,
        patch: int = 2,
        classes: int = 10,
        width: int = 64,
        layers: int = 3,
        heads: int = 4,
        lr: float = 2e-3,
        warmup: int = 40,
        weight_decay: float = 0.1,
        fused: bool = True,
    ) -> None:
        super().__init__()
        if image % patch:
            raise ValueError(f"patches of {patch} pixels do not tile an image of {image}")
        self.save_hyperparameters()
        self.lr, self.warmup, self.weight_decay, self.fused = lr, warmup, weight_decay, fused
        self.embedding = nn.Conv2d(1, width, kernel_size=patch, stride=patch)
        self.position = nn.Parameter(torch.randn((image // patch) ** 2, width) * POSITION_STD)
        self.blocks = make_blocks(layers, width, heads, causal=False)
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, classes)
        self.train_accuracy = MulticlassAccuracy(classes, average="micro")
        self.val_accuracy = MulticlassAccuracy(classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Logits (``[batch, classes]``) of images (``[batch, 1, image, image]``, values from 0 to 1)."""
        x = self.embedding(images).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(dim=1)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images).float()
        loss = F.cross_entropy(logits, labels)
        self.train_accuracy(logits, labels)
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images).float()
        self.val_accuracy(logits, labels)
        self.log("val/loss", F.cross_entropy(logits, labels), batch_size=len(labels), sync_dist=True)
        self.log("val/accuracy", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        return configure_adamw(self, self.lr, self.warmup, self.weight_decay, self.fused)
