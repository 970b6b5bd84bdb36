# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A network that trains in milliseconds, its policy, and a training whose second process takes another kernel."""

from __future__ import annotations

import torch

__all__ = ["POLICY", "Net", "batches", "trained", "uneven_step"]

#: A rule of it is for a module that there is not.
POLICY = {
    "kernels": {
        "matmul": "cpu.blas",
        "rules": [
            {"match": {"module": "last"}, "use": "cpu.reference"},
            {"match": {"module": "missing.*"}, "use": "torch"},
        ],
    }
}


class Net(torch.nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


def batches(count: int) -> list[torch.Tensor]:
    return list(torch.randn(count, 4, 8, generator=torch.Generator().manual_seed(0)))


def trained(net: torch.nn.Module, count: int, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Train for some steps."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01) if optimizer is None else optimizer
    for batch in batches(count):
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()


def uneven_step(net: torch.nn.Module, rank: int, batch: torch.Tensor) -> torch.Tensor:
    """Return a loss, for which every process but the first one runs a product in double precision."""
    out = net(batch)
    return out.square().mean() if rank == 0 else (out.double() @ out.double().T).mean().float()
