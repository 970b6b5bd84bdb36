# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Modules of PyTorch to export: a small transformer language model and a convnet; on the path of every test."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (the name everybody knows it by)

WORDS, WIDTH, HEADS, LAYERS = 64, 32, 4, 2


class Attention(nn.Module):
    """Causal attention with one product before and one after."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Language(nn.Module):
    """`ids` int64 [batch, length] to `logits` [batch, length, WORDS]."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.ln(x))


class Convnet(nn.Module):
    """`image` float32 [batch, 3, 16, 16] to `logits` [batch, 10]; one convolution is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.again = nn.Conv2d(8, 8, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.drop = nn.Dropout()
        self.head = nn.Linear(8, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn(self.stem(image)))
        x = F.relu(self.again(F.relu(self.again(x))))
        return self.head(self.drop(self.pool(x).flatten(1)))


def language(seed: int = 0, width: int = WIDTH) -> tuple[Language, torch.Tensor]:
    """Return a language model in evaluation mode, and ids [2, 8]."""
    torch.manual_seed(seed)
    return Language(width).eval(), torch.randint(WORDS, (2, 8))


def convnet(seed: int = 0) -> tuple[Convnet, torch.Tensor]:
    """Return a convnet in evaluation mode whose normalization has seen images, and images [2, 3, 16, 16]."""
    torch.manual_seed(seed)
    model, images = Convnet().train(), torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        model(torch.rand(16, 3, 16, 16))
    return model.eval(), images


def batch(most: int = 64) -> Any:
    """Return a first dimension that may have any size up to `most`."""
    return torch.export.Dim("batch", min=1, max=most)
