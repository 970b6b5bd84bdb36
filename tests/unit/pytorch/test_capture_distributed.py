# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Captured steps of DistributedDataParallel and fully_shard: the warm-up, and modules after a failed step."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

if TYPE_CHECKING:
    from pathlib import Path

BEGIN = """
    import sys, torch
    torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.broken = torch.nn.Linear(8, 8), ""

        def forward(self, x):
            if self.broken == "forward":
                raise RuntimeError("broken off")
            y = self.linear(x).tanh()
            if self.broken == "backward":
                y.register_hook(self.fail)
            return y

        def fail(self, gradient):
            raise RuntimeError("broken off")

    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(Block(), Block(), Block())
"""

SHARDED = """
    from torch.distributed.fsdp import fully_shard
    from xpuruntime.pytorch import _private_api

    def sharded():
        made = model()
        for part in (*made, made):
            fully_shard(part, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        return made, torch.optim.SGD(made.parameters(), lr=0.1)

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    def step(made, sgd):
        sgd.zero_grad()
        loss = made(x).square().sum()
        loss.backward()
        sgd.step()
        return float(loss)

    twin = sharded()
    want = [step(*twin) for _ in range(4)]
    made, sgd = sharded()
    found = [step(made, sgd)]
    for broken, block in (("forward", 1), ("backward", 1), ("backward", 0)):
        made[block].broken = broken
        try:
            step(made, sgd)
        except RuntimeError as error:
            assert "broken off" in str(error), error
        else:
            raise AssertionError("the step was not broken off")
        made[block].broken = ""
        for parameter in made.parameters():
            parameter.grad = None
        _private_api.reset_fully_sharded(made.modules())
        assert all(hasattr(one, "full_tensor") for one in made.parameters()), "parameters are not sharded"
        found.append(step(made, sgd))
    assert found == want, (found, want)
"""

WARMUP = """
    from xpuruntime.pytorch.capture.api import _warmup
    from xpuruntime.pytorch.capture.api import state_of

    plain, wrapped = model(), torch.nn.parallel.DistributedDataParallel(model())
    assert _warmup(state_of(lambda: plain(x), None, None, [plain])) == 3
    assert _warmup(state_of(lambda: wrapped(x), None, None, [wrapped])) == 11
"""


@pytest.mark.slow
def test_in_a_process_group(tmp_path: Path) -> None:
    code = "".join(map(textwrap.dedent, (BEGIN, SHARDED, WARMUP)))
    command = [sys.executable, "-c", code, str(tmp_path / "meeting")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
