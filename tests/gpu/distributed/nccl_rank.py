# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A rank of a test, in a process of its own."""

from __future__ import annotations

import torch

from xpuruntime import distributed


class Rank:
    """This rank, and how it makes communicators."""

    def __init__(self, rank: int, ranks: int, port: int, arguments: list[str]) -> None:
        self.rank, self.ranks, self.port, self.arguments = rank, ranks, port, arguments
        self.method = f"tcp://127.0.0.1:{port}"
        self.device = f"cuda:{rank}"
        torch.cuda.set_device(rank)

    def communicator(self, timeout: float = 25.0, **policy: object) -> distributed.Communicator:
        config = distributed.CollectivePolicy(**policy)
        return distributed.Communicator.init(
            self.rank, self.ranks, init_method=self.method, device=self.device, timeout=timeout, config=config
        )

    def all_inputs(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return what every rank starts with, [ranks, size], the same on each; numbers that add up exactly."""
        made = torch.Generator().manual_seed(size)
        return torch.randint(1, 8, (self.ranks, size), generator=made).to(dtype).to(self.device)
