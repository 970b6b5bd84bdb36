# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Importing the policies is cheap and needs no reader of files."""

from __future__ import annotations

import subprocess
import sys
import time

LATE = (
    "yaml",
    "json",
    "difflib",
    "fnmatch_",
    "onnx",
    "onnxruntime",
    "numpy",
    "torch",
    "rich",
    "xpuruntime._core",
    "xpuruntime.runtime",
)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_what_is_imported():
    loaded = set(run("import sys, xpuruntime.policies; print(*sys.modules)").split())
    assert not loaded & set(LATE)


def test_it_takes_little_time():
    # On an idle machine 26 ms for msgspec and 24 ms for the rest. The ratio holds on a busy one too.
    codes = ("pass", "import msgspec", "import xpuruntime.policies")
    times: dict[str, list[float]] = {code: [] for code in codes}
    for _ in range(9):
        for code in codes:
            start = time.perf_counter()
            run(code)
            times[code].append(time.perf_counter() - start)
    nothing, library, policies = (min(times[code]) for code in codes)
    assert policies - nothing < 3 * (library - nothing)


def test_the_public_names():
    import xpuruntime.policies as policies

    assert sorted(policies.__all__, key=lambda name: (not name.isupper(), name)) == policies.__all__
    assert all(hasattr(policies, name) for name in policies.__all__)
