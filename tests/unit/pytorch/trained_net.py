# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A small net, the optimizers that train it, and training it without a graph."""

from __future__ import annotations

import torch


def lr(value: float = 0.05) -> torch.Tensor:
    return torch.tensor(value)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=lr(0.01), fused=True, capturable=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=lr(0.01), fused=True, capturable=True, amsgrad=True),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=lr(), momentum=0.9, weight_decay=0.1, fused=True),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=lr(), momentum=0.9, nesterov=True, fused=True),
    "sgd dampened": lambda p: torch.optim.SGD(p, lr=lr(), momentum=0.9, dampening=0.5, fused=True),
    "sgd plain": lambda p: torch.optim.SGD(p, lr=lr(), fused=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
}


class Net(torch.nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 12), torch.nn.BatchNorm1d(12), torch.nn.Tanh(), torch.nn.Dropout(dropout),
            torch.nn.Linear(12, 1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def make(optimizer: str = "adamw", dropout: float = 0.0):
    torch.manual_seed(0)
    net = Net(dropout)
    return net, OPTIMIZERS[optimizer](net.parameters())


def batches(count: int, rows: int = 8):
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(rows, n, generator=generator) for n in (6, 1)) for _ in range(count)]


def loss_of(net):
    return lambda x, y: (net(x) - y).square().mean()


def train_eagerly(net, optimizer, data, scheduler=None):
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def same_weights(one, other) -> None:
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
