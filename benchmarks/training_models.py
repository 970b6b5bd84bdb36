# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Models of the forms of GPT-2, BERT and Llama, in plain PyTorch, for measurements of training."""

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


@dataclass(frozen=True)
class LlamaSize:
    """How large a model of Llama's form is."""

    layers: int = 4
    width: int = 1024
    heads: int = 16
    kv_heads: int = 8
    hidden: int = 2816
    words: int = 32000


class LlamaAttention(nn.Module):
    """Attention with rotary positions and grouped keys; heads are counted by what a rank has of the matrices."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.head = size.width // size.heads
        self.q = nn.Linear(size.width, size.heads * self.head, bias=False)
        self.k = nn.Linear(size.width, size.kv_heads * self.head, bias=False)
        self.v = nn.Linear(size.width, size.kv_heads * self.head, bias=False)
        self.out = nn.Linear(size.heads * self.head, size.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return what each token takes from those before it; `x` is (batch, tokens, width)."""
        q, k, v = (part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class LlamaLayer(nn.Module):
    """One layer: attention and a gated unit, each behind a norm."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.attention = LlamaAttention(size)
        self.gate, self.up = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the next hidden state, of the shape of `x`."""
        x = x + self.attention(self.norm_1(x), cos, sin)
        y = self.norm_2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A language model of Llama's form."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, size: LlamaSize, positions: int) -> None:
        super().__init__()
        self.words = nn.Embedding(size.words, size.width)
        self.layers = nn.ModuleList(LlamaLayer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.words, bias=False)
        half = size.width // size.heads // 2
        angles = torch.outer(torch.arange(positions), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.apply(_begin)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, (batch, tokens, words), of tokens, (batch, tokens) int64."""
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _begin(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def loss_of(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy, of logits (batch, tokens, words) and wanted tokens (batch, tokens)."""
    return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
