# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The interruptions themselves: they come while the call goes on, also where the call was slow when it was timed."""

from __future__ import annotations

import time

import pytest
from interrupting import sweep


@pytest.mark.parametrize("way", ["signal", "thread"])
def test_a_call_that_was_held_up_while_it_was_timed_is_interrupted(way: str) -> None:
    calls = checks = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        time.sleep(1.0 if calls == 2 else 0.01)

    def check() -> None:
        nonlocal checks
        checks += 1

    hits = sweep(way, call, check, 40)
    assert checks == 40
    assert hits > 10
