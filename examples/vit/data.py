"""scikit-learn's handwritten digits: 1797 images of 8 x 8 pixels that come with the library."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from examples.loader import ResumableLoader, make_loader

#: One image of this many is for validation.
HELD_OUT_EVERY = 5


class DigitsData(pl.LightningDataModule):
    """Digits as pairs of images (fp32 ``[batch, 1, 8, 8]``, from 0 to 1) and labels (int64 ``[batch]``).

    Args:
        batch_size: images per batch and rank.
        seed: seed of the order of the images.
    """

    def __init__(self, batch_size: int = 32, seed: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.seed = seed
        self.digits: TensorDataset | None = None

    def setup(self, stage: str) -> None:
        """Read the images, once."""
        if self.digits is None:
            from sklearn.datasets import load_digits

            digits = load_digits()
            images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
            self.digits = TensorDataset(images, torch.tensor(digits.target, dtype=torch.int64))

    def train_dataloader(self) -> ResumableLoader:
        """Four images of five, in a new order each epoch."""
        return make_loader(self.trainer, self._part(held_out=False), self.batch_size, train=True, seed=self.seed)

    def val_dataloader(self) -> ResumableLoader:
        """Every fifth image."""
        return make_loader(self.trainer, self._part(held_out=True), self.batch_size, train=False, seed=self.seed)

    def _part(self, held_out: bool) -> Dataset[tuple[torch.Tensor, ...]]:
        if self.digits is None:
            raise RuntimeError('the images are not read yet: call setup("fit") first')
        chosen = [i for i in range(len(self.digits)) if (i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out]
        return Subset(self.digits, chosen)
