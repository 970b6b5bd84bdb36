# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A training step under a lock, as the only work of a process: ``locked_step.py DEVICE LOCK``.

Without the file, the kernels of a step are measured and locked. Then steps run under the lock, captured on a CUDA
device, and their kernels, losses and parameters are printed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

import xpuruntime as xrt
import xpuruntime.pytorch as xt

STEPS = 6


def main(device: str, path: str) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.LayerNorm(256), torch.nn.GELU(), torch.nn.Linear(256, 8)
    ).to(device)
    fused = device.startswith("cuda")  # an SGD can only be captured so
    optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.05, device=device), momentum=0.9, fused=fused)
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(32, 64, generator=generator).to(device), torch.randint(8, (32,), generator=generator).to(device))
        for _ in range(STEPS)
    ]

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(net(x), y)

    def eager(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if not Path(path).exists():
        before = {name: one.clone() for name, one in net.state_dict().items()}
        measured = xrt.KernelPolicy(matmul="auto", layer_norm="auto", auto_strategy="best_performance")
        with xt.kernel_policy(measured):
            loss_of(*data[0]).backward()  # where kernels are measured
            optimizer.zero_grad()
            with xt.explain() as report:
                loss_of(*data[0]).backward()
        optimizer.zero_grad()
        xt.lock(report, path)
        net.load_state_dict(before)
    with xt.kernel_policy(lock=path):
        step = eager
        if device.startswith("cuda"):
            step = xt.capture_graph(loss_of, data[0], optimizer=optimizer)
        losses = [float(step(*batch)) for batch in data]
        digest = hashlib.sha256()
        for one in net.state_dict().values():
            digest.update(one.cpu().numpy().tobytes())
        with xt.explain() as report:
            loss_of(*data[0]).backward()
    kernels = sorted(f"{row.module} {row.phase} {row.op}: {row.resolved}" for row in report.rows if row.resolved)
    print(json.dumps({"kernels": kernels, "losses": losses, "parameters": digest.hexdigest()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
