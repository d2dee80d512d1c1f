"""The model that speed is measured on: a Llama-style decoder, in the sizes that people train."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder and of its batch.

    Attributes:
        width: model width.
        ffn: width of the gated feed-forward layer.
        layers: number of blocks.
        batch: sequences a step.
        length: tokens a sequence.
        heads: query heads.
        kv_heads: key and value heads.
        vocabulary: number of tokens known.
    """

    width: int
    ffn: int
    layers: int
    batch: int
    length: int
    heads: int
    kv_heads: int
    vocabulary: int = 32000

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.batch * self.length


#: The first is a stack of Llama-3-8B's blocks, the others go down to a GPT-2-sized model and a tiny one.
SHAPES: dict[str, DecoderShape] = {
    "8b": DecoderShape(4096, 14336, 8, 2, 8192, 32, 8),
    "1b": DecoderShape(2048, 8192, 16, 4, 4096, 32, 8),
    "xl": DecoderShape(1600, 6400, 12, 12, 1024, 25, 25),
    "small": DecoderShape(768, 3072, 12, 32, 1024, 12, 12),
    "tiny": DecoderShape(256, 1024, 4, 16, 256, 4, 4, 8192),
}


def parse_shape(text: str) -> DecoderShape:
    """A shape by its name in :data:`SHAPES`, or from numbers: ``width,ffn,layers,batch,length[,heads[,kv_heads]]``.

    Heads are 128 wide by default, 64 where the width does not allow that.

    Raises:
        ValueError: it is neither, or the numbers do not fit together.
    """
    if text in SHAPES:
        return SHAPES[text]
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not 5 <= len(numbers) <= 7 or min(numbers) < 1:
        raise ValueError(
            f"{text!r} is no shape: use one of {', '.join(SHAPES)}, or numbers: "
            "width,ffn,layers,batch,length[,heads[,kv_heads]]."
        )
    width = numbers[0]
    heads = numbers[5] if len(numbers) > 5 else max(1, width // (128 if width % 128 == 0 and width >= 1024 else 64))
    kv_heads = numbers[6] if len(numbers) > 6 else heads
    if width % heads or heads % kv_heads:
        raise ValueError(
            f"{text!r} is no shape: heads={heads} must divide the width, and kv_heads={kv_heads} the heads."
        )
    _, ffn, layers, batch, length = numbers[:5]
    return DecoderShape(width, ffn, layers, batch, length, heads, kv_heads)


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each behind an RMS norm."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.head = shape.width // shape.heads
        self.split = [shape.width, shape.kv_heads * self.head, shape.kv_heads * self.head]
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.qkv = nn.Linear(shape.width, sum(self.split), bias=False)
        self.attention_out = nn.Linear(shape.width, shape.width, bias=False)
        self.ffn_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.gate_up = nn.Linear(shape.width, 2 * shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` in and out."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, -1, self.head).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).split(self.split, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[batch, length]`` token numbers to ``[batch, length, vocabulary]`` logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def random_tokens(shape: DecoderShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """A batch of token numbers and of the next ones, ``[batch, length]`` each; the same for the same seed."""
    generator = torch.Generator("cpu").manual_seed(0)
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1), generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
