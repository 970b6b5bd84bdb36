# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The training loops of the requirements, word for word, on a CUDA device."""

from __future__ import annotations

import pytest
import torch

import xpuruntime.pytorch as xrt_torch

pytestmark = pytest.mark.usefixtures("cuda_is_usable_afterwards")


SEED_8_1 = """
import torch
import xpuruntime.pytorch as xrt_torch

# 모델 정의
model = MyModel().cuda()
optimizer = torch.optim.Adam(model.parameters())
criterion = torch.nn.CrossEntropyLoss()

# xpuruntime 커널 정책 설정
xrt_torch.set_kernel_policy(
    matmul="cublasLt",
    attention="flash_v2",
)

# 학습 루프
for epoch in range(num_epochs):
    for batch, target in dataloader:
        batch, target = batch.cuda(), target.cuda()

        with xrt_torch.autocast(dtype=torch.float16):
            output = model(batch)
            loss = criterion(output, target)

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


SEED_8_2 = """
import torch
import xpuruntime.pytorch as xrt_torch

model = MyModel().cuda()
optimizer = torch.optim.Adam(model.parameters())
criterion = torch.nn.CrossEntropyLoss()

# 정적 입출력 버퍼
static_input = torch.randn(32, 3, 224, 224, device='cuda')
static_target = torch.randint(0, 1000, (32,), device='cuda')

# Warmup
xrt_torch.set_kernel_policy(matmul="cublasLt")
for _ in range(3):
    output = model(static_input)
    loss = criterion(output, static_target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

# Graph capture
g = torch.cuda.CUDAGraph()
with torch.cuda.graph(g):
    output = model(static_input)
    loss = criterion(output, static_target)
    loss.backward()

# 학습 (Graph replay)
for batch, target in dataloader:
    static_input.copy_(batch)
    static_target.copy_(target)
    g.replay()
    optimizer.step()
    optimizer.zero_grad()
"""


class Picture(torch.nn.Module):
    """Patches, a layer of attention and a head: of the sizes in the seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 64, 32, stride=32)
        self.norm = torch.nn.LayerNorm(64)
        self.qkv = torch.nn.Linear(64, 192)
        self.head = torch.nn.Linear(64, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(self.patches(x).flatten(2).transpose(1, 2))
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(tokens).chunk(3, dim=-1))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.head((tokens + mixed.transpose(1, 2).flatten(2)).mean(1))


def pictures(count: int, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(32, 3, 224, 224, generator=generator).to(device),
            torch.randint(0, 1000, (32,), generator=generator).to(device),
        )
        for _ in range(count)
    ]


def test_the_seeds_training_loop():
    torch.manual_seed(0)
    names = {"MyModel": Picture, "num_epochs": 8, "dataloader": pictures(2, "cpu")}
    exec(SEED_8_1, names)
    torch.manual_seed(0)
    xrt_torch.clear_kernel_policy()
    plain = {"MyModel": Picture, "num_epochs": 8, "dataloader": pictures(2, "cpu")}
    without = SEED_8_1.replace('matmul="cublasLt",', "").replace('attention="flash_v2",', "")
    exec(without, plain)
    assert names["loss"].item() == pytest.approx(plain["loss"].item(), rel=2e-2)


def test_the_seeds_graph_loop():
    torch.manual_seed(0)
    names = {"MyModel": Picture, "dataloader": pictures(3, "cuda")}
    exec(SEED_8_2, names)
    batch, target = names["dataloader"][-1]
    torch.cuda.synchronize()
    assert torch.isfinite(names["loss"]).item()
    assert torch.equal(names["static_input"], batch)
    model, criterion = names["model"], names["criterion"]
    fresh = criterion(model(batch), target).item()
    assert names["loss"].item() == pytest.approx(fresh, rel=0.2), "the replay did not compute the loss of this model"
