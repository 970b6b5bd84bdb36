# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A block of layers, a step of its training, and the rows of an explanation."""

from __future__ import annotations

from typing import Any

import torch


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 16, bias=False)
        self.norm = torch.nn.LayerNorm(16)
        self.down = torch.nn.Linear(16, 8, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down(self.norm(self.up(x)))


def step(model: Any, x: Any) -> Any:
    # The square keeps the gradient from having strides of zero, which no kernel of ours takes.
    loss = model(x).square().sum()
    loss.backward()
    return loss


def of(found: Any, op: str, **values: Any) -> list[Any]:
    return [row for row in found.rows if row.op == op and all(getattr(row, k) == v for k, v in values.items())]
