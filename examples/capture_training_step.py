# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Capture a training step in a CUDA graph, or say why it runs eagerly. Needs `pip install "xpuruntime[torch]"`."""

from __future__ import annotations

import warnings

import torch
from torch import nn

import xpuruntime as xrt
import xpuruntime.pytorch as xrt_torch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
torch.set_num_threads(1)  # the model is small

images, labels = (torch.from_numpy(array).to(device) for array in xrt.demo_images())
labels = labels.long()
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.GELU(), nn.Flatten(), nn.LayerNorm(1024), nn.Linear(1024, 64), nn.GELU(),
    nn.Linear(64, 10),
).to(device)  # fmt: skip
criterion = nn.CrossEntropyLoss()
# What runs in a graph reads the learning rate on the device, so that a scheduler still reaches it.
rate = torch.tensor(2e-3, device=device) if device == "cuda" else 2e-3
optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=device == "cuda")
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)


def loss_of(batch: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return what is to become small: a number in a tensor."""
    with xrt_torch.autocast(dtype=torch.bfloat16, enabled=device == "cuda"):
        return criterion(model(batch), target)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", xrt.XpuRuntimeWarning)  # the report below says why, too
    step = xrt_torch.capture_graph(loss_of, (images[:30], labels[:30]), optimizer=optimizer)

for epoch in range(8):
    total = 0.0
    for rows in torch.randperm(300, device=device).split(30):
        total += step(images[rows], labels[rows]).item()
    scheduler.step()
    print(f"epoch {epoch}: loss {total / 10:.3f}")

right = (model(images[300:]).argmax(1) == labels[300:]).float().mean()
print(f"{right:.0%} of 60 images recognized that it was not trained on")
print(step.report)
