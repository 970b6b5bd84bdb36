# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Run a module of PyTorch, and the program exported from it. Needs `pip install "xpuruntime[torch]"`."""

from __future__ import annotations

import torch

import xpuruntime as xrt

module = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)).eval()
x = torch.ones(4, 64)
torch.export.save(torch.export.export(module, (x,)), "model.pt2")
with xrt.InferenceSession(module, example_inputs=(x,), device="cpu") as session:
    expected = session.run({"input": x})["output"]
with xrt.InferenceSession("model.pt2", device="cpu") as session:
    print("same answer:", torch.equal(session.run({"input": x})["output"], expected))
    print(session.explain({"input": x}).headline)
