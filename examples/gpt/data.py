"""Bytes of real text in windows: the Python standard library's own sources, or any file or folder."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from examples.loader import ResumableLoader, make_loader

#: Folders of the standard library that distributions ship or leave out as they like.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}
#: Text is held out for validation in blocks of about this size, so that neighbouring windows stay on one side.
BLOCK_BYTES = 1 << 15
#: One block of this many is held out: 5% of the text, from all over it.
HELD_OUT_EVERY = 20


def read_text(path: str | Path | None, max_bytes: int) -> bytes:
    """The bytes of a file, or of all files below a folder in the order of their names.

    Args:
        path: file or folder; ``None`` means the ``.py`` files of the Python standard library.
        max_bytes: the text is cut off here.

    Raises:
        FileNotFoundError: there is nothing to read at ``path``.
    """
    root = Path(path) if path is not None else Path(sysconfig.get_path("stdlib"))
    if root.is_file():
        files = [root]
    elif path is not None:
        files = sorted(file for file in root.rglob("*") if file.is_file() and not _hidden(file.relative_to(root)))
    else:
        files = sorted(file for file in root.rglob("*.py") if SKIPPED_FOLDERS.isdisjoint(file.relative_to(root).parts))
    if not files:
        raise FileNotFoundError(f"no text at {root}: give a file, or a folder with files in it")
    parts: list[bytes] = []
    size = 0
    for file in files:
        with file.open("rb") as stream:
            parts.append(stream.read(max_bytes - size))
        size += len(parts[-1])
        if size == max_bytes:
            break
    return b"".join(parts)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


class TextWindows(Dataset[Tensor]):
    """Windows of ``length + 1`` bytes, each beginning with the last byte of the one before (uint8 ``[length + 1]``).

    Args:
        text: the bytes.
        length: bytes that the model reads in each window; the window's last one is only predicted.

    Raises:
        ValueError: the text is shorter than one window.
    """

    def __init__(self, text: bytes, length: int) -> None:
        if len(text) <= length:
            raise ValueError(f"the text has {len(text)} bytes, one window needs {length + 1}: use more text")
        self.length = length
        self._windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, length + 1, length)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Tensor:
        return self._windows[index]

    def digest(self) -> str:
        """What identifies the text."""
        return hashlib.sha256(self._windows.numpy().tobytes()).hexdigest()[:16]

    def split(self) -> tuple[list[int], list[int]]:
        """Indices of the windows for training and of those held out."""
        block = max(1, BLOCK_BYTES // self.length)
        # A text of few blocks still needs both kinds: then the blocks are smaller.
        block = min(block, max(1, len(self) // HELD_OUT_EVERY))
        held_out = [index for index in range(len(self)) if index // block % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
        kept = [index for index in range(len(self)) if index // block % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
        return kept, held_out


class TextData(pl.LightningDataModule):
    """Text for a byte-level language model; batches are uint8 ``[batch_size, length + 1]``.

    Args:
        path: a file, or a folder whose files are read in the order of their names. Default: the sources of the
            Python standard library, which are on every machine.
        length: context length in bytes.
        batch_size: windows per batch and rank.
        val_windows: number of held-out windows that a validation reads, spread over all that there are.
        max_bytes: bytes of text used at most.
        seed: seed of the order of the windows.
    """

    def __init__(
        self,
        path: str | None = None,
        length: int = 128,
        batch_size: int = 16,
        val_windows: int = 128,
        max_bytes: int = 32_000_000,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if path is not None and not Path(path).exists():
            raise FileNotFoundError(f"no text at {path}: give a file, or a folder with files in it")
        for name, value in {"length": length, "batch_size": batch_size, "val_windows": val_windows}.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.path = path
        self.length = length
        self.batch_size = batch_size
        self.val_windows = val_windows
        self.max_bytes = max_bytes
        self.seed = seed
        self._windows: TextWindows | None = None

    def setup(self, stage: str) -> None:
        """Read the text, once."""
        if self._windows is None:
            self._windows = TextWindows(read_text(self.path, self.max_bytes), self.length)

    @property
    def windows(self) -> TextWindows:
        """Those of the whole text.

        Raises:
            RuntimeError: they are not read yet.
        """
        if self._windows is None:
            raise RuntimeError('the text is not read yet: call setup("fit") first')
        return self._windows

    def train_dataloader(self) -> ResumableLoader:
        """All windows that are not held out, in a new order each epoch."""
        windows = Subset(self.windows, self.windows.split()[0])
        return make_loader(self.trainer, windows, self.batch_size, train=True, seed=self.seed)

    def val_dataloader(self) -> ResumableLoader:
        """Held-out windows, the same in each validation.

        Raises:
            ValueError: the text is too short to hold windows out.
        """
        held_out = self.windows.split()[1]
        if not held_out:
            raise ValueError("the text is too short to hold a part of it out for validation: use more text")
        chosen = held_out[:: max(1, len(held_out) // self.val_windows)][: self.val_windows]
        windows = Subset(self.windows, chosen)
        return make_loader(self.trainer, windows, self.batch_size, train=False, seed=self.seed)
