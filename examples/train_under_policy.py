# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Train as ever, by kernels that you choose, and see that they ran. Needs `pip install "xpuruntime[torch]"`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (the name everybody knows it by)

import xpuruntime as xrt
import xpuruntime.pytorch as xrt_torch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
torch.set_num_threads(1)  # the model is small


class Layer(nn.Module):
    """Attention with a residual connection: float32 [N, 16, 32] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [N, 16, 32] for [N, 16, 32]."""
        q, k, v = self.qkv(self.norm(x)).view(len(x), 16, 3, 2, 16).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Digits(nn.Module):
    """A small transformer over the 16 patches of an image: float32 [N, 1, 8, 8] to [N, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(4, 32), nn.Parameter(torch.randn(16, 32) / 8)
        self.layers = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(32, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return logits [N, 10] for images [N, 1, 8, 8]."""
        patches = image.unfold(2, 2, 2).unfold(3, 2, 2).reshape(len(image), 16, 4)
        return self.head(self.layers(self.embed(patches) + self.place).mean(1))


images, labels = (torch.from_numpy(array).to(device) for array in xrt.demo_images())
labels = labels.long()
model = Digits().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
criterion = nn.CrossEntropyLoss()

# The one line that PyTorch does not have.
if device == "cuda":
    xrt_torch.set_kernel_policy(matmul="cublasLt", attention="flash_v2")
else:
    xrt_torch.set_kernel_policy(matmul="cpu.blas", attention="flash_v2", layer_norm="cpu.vectorised")


def step(batch: torch.Tensor, target: torch.Tensor) -> None:
    """Train once, as without a policy."""
    with xrt_torch.autocast(dtype=torch.bfloat16, enabled=device == "cuda"):
        loss = criterion(model(batch), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


for _ in range(20):
    for rows in torch.randperm(300).split(30):
        step(images[rows], labels[rows])
with xrt_torch.explain() as found:
    step(images[:30], labels[:30])
xrt_torch.clear_kernel_policy()

right = (model(images[300:]).argmax(1) == labels[300:]).float().mean()
print(f"{right:.0%} of 60 images recognized that it was not trained on")
for row in sorted(found.rows, key=lambda row: (row.module, row.phase)):
    if row.op and row.module in ("layers.0", "layers.0.norm", "head"):
        asked = ", ".join(row.requested) or "nothing"
        print(f"{row.module}, {row.phase}: {row.operator}, asked {asked}, ran {row.resolved}: {row.status}")
