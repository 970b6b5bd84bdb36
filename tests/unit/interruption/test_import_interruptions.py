# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""An import that was interrupted works when it is made again, or says what is left of a library."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import pytest

#: Imports twice; the first is interrupted at an event of the trace in files and functions of certain names.
_TWICE = """
import json, sys
work, files, function, last = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
seen = 0

def step(frame, event, _):
    global seen
    seen += 1
    if seen == last:
        sys.settrace(None)
        raise KeyboardInterrupt
    return step

def trace(frame, event, _):
    code = frame.f_code
    if files in code.co_filename and function in ("", code.co_name):
        return step(frame, event, _)

found = {"interrupted": False, "error": None}
sys.settrace(trace)
try:
    exec(work, {})
except KeyboardInterrupt:
    found["interrupted"] = True
finally:
    sys.settrace(None)
try:
    exec(work, {})
except BaseException as error:
    found["error"] = f"{type(error).__name__}: {error}"
print(json.dumps({**found, "seen": seen}))
"""
_NAMES = """
import xpuruntime as xrt
xrt.InferenceSession, xrt.KernelPolicy, xrt.Tensor, xrt.tune, xrt.serving.Server, xrt.ops.matmul
try:
    raise xrt.PolicyError("one class")
except xrt.XpuRuntimeError:
    pass
"""


def _twice(work: str, files: str, last: int, function: str = "") -> dict[str, Any]:
    command = [sys.executable, "-c", _TWICE, work, files, function, str(last)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_an_import_that_was_interrupted_in_this_package_works_again() -> None:
    events = _twice(_NAMES, "xpuruntime", 0)["seen"]
    chance = random.Random("import")
    for _ in range(2):
        found = _twice(_NAMES, "xpuruntime", chance.randrange(1, events + 1))
        assert (found["interrupted"], found["error"]) == (True, None)


def test_the_core_is_imported_again() -> None:
    work = "from xpuruntime import _core; _core.Tensor"
    events = _twice(work, "", 0)["seen"]
    for part in (0.3, 0.9):
        found = _twice(work, "", int(events * part))
        assert (found["interrupted"], found["error"]) == (True, None)


_CUT = "ImportError: xpuruntime.{} cannot be imported: an earlier import of {} in this process was cut off"


@pytest.mark.needs_module("torch")
def test_a_library_that_was_cut_off_is_named() -> None:
    found = _twice("import xpuruntime.pytorch", "torch/nn/functional.py", 20, "<module>")
    assert found["interrupted"]
    assert found["error"].startswith(_CUT.format("pytorch", "torch"))
    assert "restart the kernel" in found["error"]


def test_numpy_is_imported_again_or_named() -> None:
    work = "import xpuruntime; xpuruntime.tune"
    events = _twice(work, "numpy/", 0)["seen"]
    for part in (0.6,):
        found = _twice(work, "numpy/", int(events * part))
        assert found["interrupted"]
        assert found["error"] is None or found["error"].startswith(_CUT.format("tuning.tune", "numpy"))


def test_a_library_that_cannot_be_imported_is_not_taken_for_one_that_was_cut_off(tmp_path: Any) -> None:
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "part.py").write_text("", "utf-8")
    (tmp_path / "numpy" / "__init__.py").write_text("import numpy.part\nraise ImportError('no such library')", "utf-8")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import xpuruntime; xpuruntime.tune"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.stderr.splitlines()[-1] == "ImportError: no such library"
