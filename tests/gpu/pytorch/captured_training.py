# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A net with every kind of state, its training on a CUDA device without a graph, and what must stay usable."""

from __future__ import annotations

import torch

import xpuruntime.pytorch as xrt_torch

DEVICE = torch.device("cuda", 0)


STEPS = 12


def assert_usable() -> None:
    """Fail where a capture has left CUDA, the allocator or the random numbers in a state of its own."""
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.current_stream() == torch.cuda.default_stream(), "another stream is current"
    x = torch.ones(1000, device=DEVICE, requires_grad=True)
    torch.nn.functional.dropout(x, 0.5).sum().backward()
    assert set(x.grad.tolist()) == {0.0, 2.0}
    torch.cuda.synchronize()


class Net(torch.nn.Module):
    """A convolution, a batch norm, dropout and products: small, and with every kind of state."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(
            3, 8, 3, padding=1, bias=False
        )  # before a batch norm it would have noise for a gradient
        self.norm = torch.nn.BatchNorm2d(8)
        self.drop = torch.nn.Dropout(dropout)
        self.head = torch.nn.Linear(8 * 64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.relu(self.norm(self.conv(x)))).flatten(1))


def make_net(dropout: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(dropout).to(DEVICE)


def batches(count: int = STEPS, rows: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(rows, 3, 8, 8, generator=generator).to(DEVICE),
            torch.randint(10, (rows,), generator=generator).to(DEVICE),
        )
        for _ in range(count)
    ]


def rate(value: float) -> torch.Tensor:
    return torch.tensor(value, device=DEVICE)


def adamw(parameters, fused: bool = True):
    return torch.optim.AdamW(parameters, lr=rate(1e-3), fused=fused, capturable=True)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=rate(0.05), momentum=0.9, weight_decay=1e-4, fused=True)


def loss_of(net, autocast=None):
    def fn(x, y):
        if autocast is None:
            return torch.nn.functional.cross_entropy(net(x), y)
        with xrt_torch.autocast(autocast):
            return torch.nn.functional.cross_entropy(net(x), y)

    return fn


def train(step, data, scheduler=None) -> list[float]:
    losses = []
    for batch in data:
        losses.append(step(*batch).clone())
        if scheduler is not None:
            scheduler.step()
    return [loss.item() for loss in losses]


def eagerly(fn, optimizer, scaler=None):
    optimizer._warned_capturable_if_run_uncaptured = True  # it is made for both, to compare them

    def step(*batch):
        optimizer.zero_grad()
        loss = fn(*batch)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        return loss.detach()

    return step


def assert_same_state(module: torch.nn.Module, other: torch.nn.Module, **tolerance: float) -> None:
    for (name, a), b in zip(module.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}", **tolerance)
