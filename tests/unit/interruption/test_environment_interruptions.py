# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Interruptions while the environment of a communicator is set leave it as it was, and the next block does not wait."""

from __future__ import annotations

import os

import pytest
from interrupting import WAYS, sweep

from xpuruntime.distributed.environment import outer_environment, variables_set


@pytest.mark.parametrize("way", WAYS)
def test_the_environment_comes_back(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_PROTO", "LL")
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    turn = 0

    def blocks() -> None:
        for name in ("ring", "tree") * 5:
            with variables_set({"NCCL_ALGO": name, "NCCL_PROTO": "Simple"}, 5):
                outer_environment()

    def check() -> None:
        nonlocal turn
        turn += 1
        assert "NCCL_ALGO" not in os.environ
        with variables_set({"NCCL_ALGO": str(turn)}, 0):  # others have ended
            assert os.environ["NCCL_PROTO"] == "LL"

    assert sweep(way, blocks, check, 200) > 10
