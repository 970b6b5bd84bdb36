# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Tuned and captured steps of DistributedDataParallel and fully_shard, in a process group of one GPU over NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

BEGIN = """
    import contextlib, sys, torch, xpuruntime.pytorch as xt
    from torch.distributed.fsdp import fully_shard
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    torch.distributed.init_process_group(
        "nccl", init_method="file://" + sys.argv[1], rank=0, world_size=1, device_id=device
    )
    wait = False

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(64, 64)

        def forward(self, x):
            y = self.linear(x).tanh()
            if wait and torch.cuda.is_current_stream_capturing():
                y.sum().item()
            return y

    def make(wrap):
        torch.manual_seed(0)
        model = torch.nn.Sequential(Block(), Block(), Block()).to(device)
        if wrap == "ddp":
            with torch.cuda.stream(torch.cuda.Stream()):
                model = torch.nn.parallel.DistributedDataParallel(model)
            torch.cuda.synchronize()
        elif wrap == "fsdp2":
            for part in (*model, model):
                fully_shard(part)
        lr = torch.tensor(0.01, device=device)
        return model, torch.optim.AdamW(model.parameters(), lr=lr, fused=True, capturable=True)

    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).to(device)

    def eager(model, optimizer, steps):
        found = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            found.append(float(loss))
        return found

    want = eager(*make(""), 6)
"""

TUNED = """
    model, optimizer = make(sys.argv[2])
    launches = ["eager", "compile", "compile:reduce-overhead", "capture", "capture:compile"]
    tuned = xt.tune(
        lambda x: model(x).square().mean(), (x,), optimizer=optimizer, launches=launches, kernels={"native": None},
        budget=10,
    )
    print(tuned)
    rows = {row.name: row for row in tuned.candidates}
    for name in ("capture", "capture:compile"):
        assert rows[name].code not in ("infeasible", "failed", "inaccurate"), rows[name]
    with tuned:
        found = [float(tuned(x)) for _ in range(6)]
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
"""

#: A capture that fails in the middle of a forward pass: the step runs eagerly, and trains.
FAILED = """
    import warnings
    model, optimizer = make(sys.argv[2])
    wait = True
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step = xt.capture_graph(lambda x: model(x).square().mean(), (x,), optimizer=optimizer)
        found = [float(step(x)) for _ in range(6)]
    assert not step.report.captured
    assert any("cannot be captured" in str(one.message) for one in seen), [str(one.message) for one in seen]
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
"""


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
@pytest.mark.parametrize("program", [TUNED, FAILED], ids=["tuned", "failed"])
def test_steps_of_a_process_group(program: str, wrap: str, tmp_path: Path) -> None:
    code = textwrap.dedent(BEGIN) + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "meeting"), wrap],
        capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "4"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    print(done.stdout)
