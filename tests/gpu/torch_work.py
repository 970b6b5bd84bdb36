# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Work for streams: a kernel that takes a known while, and PyTorch operations on an xpuruntime stream."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from xpuruntime.runtime.stream import Stream

#: Cycles of the long kernel: a tenth of a second at 2 GHz, more on a slower clock.
LONG = 200_000_000


def on(stream: Stream) -> AbstractContextManager[Any]:
    """Let PyTorch work on an xpuruntime stream inside a ``with`` block."""
    return torch.cuda.stream(torch.cuda.ExternalStream(stream.handle, device=torch.device(stream.device)))


def keep_busy(stream: Stream, cycles: int = LONG) -> None:
    """Give `stream` a kernel that does nothing for a long time."""
    with on(stream):
        torch.cuda._sleep(cycles)


def warm_up() -> None:
    """Load every kernel that the tests use, so that none is loaded while a stream is timed or captured."""
    stream = Stream("cuda:0")
    with on(stream):
        x = torch.zeros(1024, device="cuda")
        y = torch.empty_like(x)
        torch.cuda._sleep(1000)
        x.fill_(1.0)
        x.zero_()
        y.copy_(x)
        torch.add(x, 1.0, out=y)
        torch.mul(x, 2.0, out=y)
        assert y.sum().item() == 0.0
    torch.cuda.synchronize()
