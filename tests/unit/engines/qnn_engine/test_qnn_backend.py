# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""QNN's HTP library: a broken one is named, and its greeting keeps out of the caller's output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import xpuruntime as xrt
from xpuruntime.engines.qnn.opening import load_backend


@pytest.mark.parametrize("content", [b"", b"\x7fELF" + b"\0" * 60, b"no library"], ids=["empty", "cut", "text"])
def test_a_library_that_cannot_be_loaded(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "libQnnHtp.so").write_bytes(content)
    with pytest.raises(xrt.EngineError, match=r"HTP library cannot be loaded: .*libQnnHtp\.so.*pip install"):
        load_backend(tmp_path)


def test_a_library_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(xrt.EngineError, match="No such file"):
        load_backend(tmp_path)


def test_what_others_print_meanwhile_is_passed_on(tmp_path: Path) -> None:
    """C code that prints before, while and after the library is loaded; the library here is one of ours that prints."""
    wheel = pytest.importorskip("onnxruntime_qnn")
    code = (
        "import ctypes, sys, pathlib\n"
        "from xpuruntime.engines.qnn import opening\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.printf(b'before\\n')\n"
        "real = ctypes.CDLL\n"
        "def load(name):\n"
        "    if name is not None:\n"
        "        libc.printf(b'while 1\\n'); found = real(name); libc.printf(b'while 2, no newline')\n"
        "        return found\n"
        "    return real(name)\n"
        "ctypes.CDLL = load\n"
        "opening.load_backend(pathlib.Path(sys.argv[1]))\n"
        "libc.printf(b'\\nafter\\n')\n"
    )
    folder = Path(wheel.get_library_path()).parent
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, check=True, timeout=60)
    assert done.stdout.decode().splitlines() == ["before", "while 1", "while 2, no newline", "after"]
