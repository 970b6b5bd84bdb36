# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The memory of the process, as Linux tells it."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from xpuruntime.runtime.process_memory import process_memory, read_status

STATUS = "Name:\tpython\nVmPeak:\t  900 kB\nVmHWM:\t   512 kB\nVmRSS:\t   300 kB\nThreads:\t3\n"


def test_the_lines_of_status():
    found = read_status(STATUS)
    assert (found.resident, found.most_resident) == (300 * 1024, 512 * 1024)


@pytest.mark.parametrize("text", ["", "VmRSS:\n", "VmRSS:\tmuch kB\n", "VmRSS:\t3 MB\n", "no colon"])
def test_what_is_not_there_is_not_known(text):
    assert (read_status(text).resident, read_status(text).most_resident) == (None, None)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_memory_that_is_touched_is_resident():
    before = process_memory()
    held = np.ones(64 << 20, np.uint8)
    after = process_memory()
    assert after.resident - before.resident > 48 << 20
    assert after.most_resident >= after.resident
    assert held[-1] == 1
