# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Two real training runs, small: a convolutional network on handwritten digits, a language model on Python's help."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Losses = list[float]


class Digits(nn.Module):
    """Convolutions with and without bias, strided and grouped; a norm over channels; two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, stride=2, bias=False)
        self.third = nn.Conv2d(32, 32, 3, padding=1, groups=4)
        self.norm = nn.LayerNorm(32 * 9)
        self.hidden = nn.Linear(32 * 9, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.second(functional.relu(self.first(x))))
        x = functional.relu(self.third(x)) + x
        return self.out(functional.relu(self.hidden(self.norm(x.flatten(1)))))


class Block(nn.Module):
    """Attention behind a layer norm, and a gated layer behind an RMS norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width, bias=False)
        self.between = nn.RMSNorm(width)
        self.gate = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            one.view(batch, length, self.heads, -1).transpose(1, 2) for one in self.qkv(self.before(x)).chunk(3, -1)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).reshape(batch, length, width))
        gate, value = self.gate(self.between(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * value)


class Language(nn.Module):
    """Predicts the next character."""

    def __init__(self, characters: int, width: int = 64, heads: int = 4, layers: int = 2, length: int = 32) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.places = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, characters, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.characters(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def text() -> str:
    """Return what ``help()`` says about the language: prose that every Python has."""
    from pydoc_data import topics

    return "".join(topics.topics[name] for name in sorted(topics.topics))[:60_000]


def _train(model: nn.Module, batches: Any, device: str, autocast: torch.dtype | None, rate: float) -> Losses:
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []
    for given, wanted in batches:
        where = contextlib.nullcontext() if autocast is None else torch.autocast(device, autocast)
        with where:
            scores = model(given.to(device))
            loss = functional.cross_entropy(scores.flatten(0, -2), wanted.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def train_digits(
    device: str = "cpu", steps: int = 40, autocast: torch.dtype | None = None, seed: int = 0
) -> tuple[Losses, nn.Module]:
    """Return the loss of each step, and the network. The images are those that the package ships."""
    from xpuruntime.demo.run import demo_images

    images, labels = demo_images()
    torch.manual_seed(seed)
    model = Digits()
    order = torch.Generator().manual_seed(seed)

    def batches() -> Any:
        for _ in range(steps):
            rows = torch.randperm(len(images), generator=order)[:64]
            yield torch.from_numpy(images)[rows].reshape(-1, 1, 8, 8).float(), torch.from_numpy(labels)[rows].long()

    return _train(model, batches(), device, autocast, 3e-3), model


def train_text(
    device: str = "cpu", steps: int = 40, autocast: torch.dtype | None = None, seed: int = 0, **size: int
) -> tuple[Losses, nn.Module]:
    """Return the loss of each step, in nats per character, and the model. `size` is that of `Language`."""
    prose = text()
    known = {one: number for number, one in enumerate(sorted(set(prose)))}
    numbers = torch.tensor([known[one] for one in prose])
    torch.manual_seed(seed)
    length = size.get("length", 32)
    model = Language(len(known), **size)
    order = torch.Generator().manual_seed(seed)

    def batches() -> Any:
        for _ in range(steps):
            starts = torch.randint(len(numbers) - length - 1, (8,), generator=order)
            rows = torch.stack([numbers[start : start + length + 1] for start in starts])
            yield rows[:, :-1], rows[:, 1:]

    return _train(model, batches(), device, autocast, 3e-3), model
