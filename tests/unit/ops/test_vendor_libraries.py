# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`use_vendor_libraries`: the folders that the core is told of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xpuruntime import _core
from xpuruntime.ops.call_context import use_vendor_libraries


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    calls: list[list[str]] = []
    monkeypatch.setattr(_core, "set_search_folders", calls.append)
    return calls


def test_wheels_come_before_the_environment(
    told: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "site" / "nvidia" / "cu13" / "lib"
    own = tmp_path / "own libraries"
    wheel.mkdir(parents=True)
    own.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{own}{os.pathsep}{tmp_path / 'missing'}")
    use_vendor_libraries()
    (folders,) = told
    assert folders.index(str(wheel)) < folders.index(str(own))
    assert str(tmp_path / "missing") not in folders


def test_the_core_searches_them(tmp_path: Path) -> None:
    """In a process of its own: what is told stays for the process."""
    (tmp_path / "nvidia" / "cu13" / "lib").mkdir(parents=True)
    code = (
        "from xpuruntime.ops.call_context import use_vendor_libraries\n"
        "from xpuruntime import _core\n"
        "use_vendor_libraries()\n"
        "print(_core.search_folders())\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert str(tmp_path / "nvidia" / "cu13" / "lib") in result.stdout
