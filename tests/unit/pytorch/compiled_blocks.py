# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A module whose calls have rules in compiled code, and what served them."""

from __future__ import annotations

import torch

import xpuruntime as xrt
import xpuruntime.pytorch as xt


class Block(torch.nn.Module):
    """With a product, a norm, a batched product and a convolution."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.inner = torch.nn.Linear(8, 8)
        self.conv = torch.nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x):
        h = self.inner(self.norm(x)).view(2, 4, 8)
        return x + self.conv(torch.bmm(h, h.transpose(1, 2)) @ h).view(8, 8).tanh()


def strict(*rules):
    return xrt.Policy(mode="strict", kernels=xrt.KernelPolicy(rules=list(rules)))


def rule(use="cpu.reference", **match):
    return {"match": match, "use": use}


def gradients(run, model, x):
    return torch.autograd.grad(run(x).square().mean(), (x, *model.parameters()))


def served(run):
    """What ran in the second call of `run`, by operator, module and phase."""
    run()
    with xt.explain() as report:
        run()
    return {
        (row.operator.removeprefix("aten::").removeprefix("xpuruntime::"), row.module, row.phase): row.resolved
        for row in report.rows
        if row.op
    }
