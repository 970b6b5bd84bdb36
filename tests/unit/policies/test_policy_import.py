# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Importing the policies is cheap and needs no reader of files."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def loaded_by(code: str) -> set[str]:
    return set(run(f"{code}; import sys; print(*sys.modules)").split())


def test_it_costs_little_more_than_msgspec():
    before = "import xpuruntime, msgspec, typing, re, functools, stat, os, collections.abc"
    more = loaded_by(f"{before}; import xpuruntime.policies") - loaded_by(before)
    ours = {name for name in more if name.split(".")[0] == "xpuruntime"}
    small = {"errno", "math", "bisect", "_bisect"}
    assert more - ours <= small, "import what reads and writes files when a file is read or written"
    assert {name for name in ours if not name.startswith(("xpuruntime.policies", "xpuruntime.errors"))} <= {
        "xpuruntime"
    }


def test_the_public_names():
    import xpuruntime.policies as policies

    assert sorted(policies.__all__, key=lambda name: (not name.isupper(), name)) == policies.__all__
    assert all(hasattr(policies, name) for name in policies.__all__)
