# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Models of the sizes of GPT-2 and BERT, in plain PyTorch, for measurements of training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    """How large a transformer is."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    words: int = 50257
    positions: int = 1024


GPT2 = Size()
BERT = Size(words=30522, positions=512)


class Layer(nn.Module):
    """One layer: norm first and causal as in GPT-2, or norm last as in BERT."""

    def __init__(self, size: Size, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = size.heads, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Return what each token takes from the others; `x` is (batch, tokens, width)."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def think(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of the two large matrices."""
        return self.down(functional.gelu(self.up(x), approximate="tanh"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the next hidden state, of the shape of `x`."""
        if self.causal:
            x = x + self.attend(self.norm_1(x))
            return x + self.think(self.norm_2(x))
        x = self.norm_1(x + self.attend(x))
        return self.norm_2(x + self.think(x))


class Decoder(nn.Module):
    """A language model of GPT-2's form; the matrix of the words is that of the results."""

    def __init__(self, size: Size = GPT2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(size.words, size.width), nn.Embedding(size.positions, size.width)
        self.layers = nn.ModuleList(Layer(size, causal=True) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.words, bias=False)
        self.head.weight = self.words.weight
        self.apply(_begin)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, (batch, tokens, words), of tokens, (batch, tokens) int64."""
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Encoder(nn.Module):
    """A model of masked words of BERT's form."""

    def __init__(self, size: Size = BERT) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(size.words, size.width), nn.Embedding(size.positions, size.width)
        self.norm = nn.LayerNorm(size.width)
        self.layers = nn.ModuleList(Layer(size, causal=False) for _ in range(size.layers))
        self.dense, self.last = nn.Linear(size.width, size.width), nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.words)
        self.head.weight = self.words.weight
        self.apply(_begin)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, (batch, tokens, words), of tokens, (batch, tokens) int64."""
        x = self.norm(self.words(tokens) + self.places.weight[: tokens.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last(functional.gelu(self.dense(x))))


def _begin(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def loss_of(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy, of logits (batch, tokens, words) and wanted tokens (batch, tokens)."""
    return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
