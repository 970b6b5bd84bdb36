# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Hold training to a policy, see what ran under it, and check that in CI. Needs `pip install "xpuruntime[torch]"`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import xpuruntime as xrt
import xpuruntime.pytorch as xrt_torch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
torch.set_num_threads(1)  # the model is small

images, labels = (torch.from_numpy(array).to(device) for array in xrt.demo_images())
labels = labels.long()
model = nn.Sequential()
model.add_module("flat", nn.Flatten())
model.add_module("mlp", nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64)))
model.add_module("head", nn.Linear(64, 10))
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step() -> None:
    """Train once, on the same images."""
    loss = nn.functional.cross_entropy(model(images[:60]), labels[:60])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


policy = Path(__file__).with_name("policies") / "pytorch_training.yaml"
with xrt_torch.kernel_policy(policy):
    print("not reached by this policy:", [gap.what for gap in xrt_torch.coverage_gaps(module=model)] or "nothing")
    step()  # once before, so that what is done once is not in the times
    with xrt_torch.explain() as found:
        step()
    with xrt_torch.profile(export_chrome_trace="trace.json"):
        step()

print(found)
# For CI: every call ran as the policy states, and the policy covers nearly all of the time. The policy also names
# attention, which this model lacks: without no_unmatched=False that fails, as a model that bypasses the policy does.
print("never ran:", *found.never_ran)
found.require(coverage=0.9, no_unmatched=False)
print(f"covered: {found.coverage.covered:.0%}; trace.json opens in https://ui.perfetto.dev")
