# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import xpuruntime as xrt
from xpuruntime.engines.qnn import opening as probing
from xpuruntime.engines.qnn.opening import load_backend


def _wheel(monkeypatch: pytest.MonkeyPatch, folder: Path, version: str = "2.7.0", host: str = "1.31.1") -> None:
    real = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> object:
        return SimpleNamespace(origin=str(folder / "__init__.py")) if name == "onnxruntime_qnn" else real(name, package)

    versions = {"onnxruntime-qnn": version, "onnxruntime-gpu": host, "onnxruntime": host}
    monkeypatch.setattr(probing, "installed", lambda *names: {name: versions[name] for name in names})
    monkeypatch.setattr(importlib.util, "find_spec", find)


def test_no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "installed", lambda *names: {})
    facts = probing.probe("qnn")
    assert (facts.version, facts.loadable) == (None, False)
    assert "xpuruntime[qnn]" in (facts.fix or "")


@pytest.mark.parametrize(
    ("machine", "fix"),
    [("x86_64", "`pip install --no-deps onnxruntime-qnn`"), ("aarch64", "`pip install onnxruntime-qnn` (the extra ")],
)
def test_how_to_install_depends_on_the_machine(monkeypatch: pytest.MonkeyPatch, machine: str, fix: str) -> None:
    monkeypatch.setattr(probing.platform, "machine", lambda: machine)
    found = probing.missing("qnn").fix
    assert found is not None
    assert found.startswith(fix)
    assert "xpuruntime[qnn]" in found


def test_a_backend_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _wheel(monkeypatch, tmp_path)
    (tmp_path / "libonnxruntime_providers_qnn.so").write_bytes(Path("/proc/self/exe").read_bytes())
    facts = probing.probe("qnn")
    assert not facts.loadable
    assert facts.reason == f"libQnnHtp.so is not in {tmp_path}"
    assert facts.fix == "pip install --force-reinstall --no-deps onnxruntime-qnn"


def test_files_that_are_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probing, "installed", lambda *names: dict.fromkeys(names, "2.7.0"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    assert "its files are gone" in (probing.probe("qnn").reason or "")


def test_a_wheel_of_before_plugins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _wheel(monkeypatch, tmp_path, "1.24.4")
    assert "1.24.4 is no plugin" in (probing.probe("qnn").reason or "")


def test_an_onnxruntime_of_before_plugins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _wheel(monkeypatch, tmp_path, host="1.23.2")
    facts = probing.probe("qnn")
    assert not facts.loadable
    assert "ONNX Runtime 1.24.2 or later, and onnxruntime-gpu 1.23.2 is installed" in (facts.reason or "")
    assert facts.fix == 'pip install --upgrade "onnxruntime-gpu>=1.24.2"'


def test_the_real_wheel_is_probed_and_not_loaded() -> None:
    pytest.importorskip("onnxruntime_qnn")
    facts = probing.probe("qnn")
    assert facts.loadable, facts.reason
    assert facts.detail["sdk"]
    assert "QnnHtp" in facts.detail["libraries"]
    assert "QnnCpu" not in facts.detail["libraries"]


@pytest.mark.parametrize("content", [b"", b"\x7fELF" + b"\0" * 60, b"no library"], ids=["empty", "cut", "text"])
def test_a_library_that_cannot_be_loaded(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "libQnnHtp.so").write_bytes(content)
    with pytest.raises(xrt.EngineError, match=r"HTP library cannot be loaded: .*libQnnHtp\.so.*pip install"):
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
