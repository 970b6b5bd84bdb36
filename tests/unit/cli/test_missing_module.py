# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Missing modules: the error of a command names the package that imports one, and what to install."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from xpuruntime import inference

if TYPE_CHECKING:
    from collections.abc import Callable

MISSING = "absent_of_needy"


@pytest.fixture
def needy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install a package that imports a module which is missing, and have `xrt plan` import it."""

    def install(requires: str = "", body: str = f"import {MISSING}\n", *, listed: bool = True) -> None:
        (tmp_path / "needy.py").write_text(body)
        if listed:
            folder = tmp_path / "needy_tools-1.2.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: needy-tools\nVersion: 1.2\n{requires}")
            (folder / "RECORD").write_text("needy.py,,\n")
            (folder / "top_level.txt").write_text("needy\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "needy", raising=False)
        monkeypatch.setattr(inference, "plan", lambda *_, **__: importlib.import_module("needy"))

    return install


def test_a_requirement_that_is_not_installed(needy: Callable[..., None], xrt: Callable[..., Any], digits: str) -> None:
    needy("Requires-Dist: numpy\nRequires-Dist: absent-of-needy>=2.5,<3\n")
    found = xrt("plan", digits)
    assert found.code == 3
    assert f"needy-tools 1.2 needs the module '{MISSING}', which is not installed although needy-tools requires it" in (
        " ".join(found.err.split())
    )
    assert "Fix: pip install 'absent-of-needy<3,>=2.5'" in " ".join(found.err.split())


@pytest.mark.parametrize("requires", ["", "Requires-Dist: absent-of-needy; extra == 'all'\n", "Requires-Dist: ???\n"])
def test_a_module_that_is_no_requirement(
    needy: Callable[..., None], xrt: Callable[..., Any], digits: str, requires: str
) -> None:
    needy(requires)
    found = xrt("plan", digits, "--json")
    error = found.json()["error"]
    assert (found.code, error["type"], error["exit_code"]) == (3, "ModuleNotFoundError", 3)
    assert error["message"] == (
        f"needy-tools 1.2 needs the module '{MISSING}', which is not installed. Fix: install it, or another version "
        "of needy-tools; `pip check` lists what packages lack"
    )


def test_a_module_of_no_package(needy: Callable[..., None], xrt: Callable[..., Any], digits: str) -> None:
    needy(listed=False)
    error = xrt("plan", digits, "--json").json()["error"]
    assert error["message"] == f"needy needs the module '{MISSING}', which is not installed. Fix: install it"


def test_words_of_its_own_stay(needy: Callable[..., None], xrt: Callable[..., Any], digits: str) -> None:
    needy(body="raise ModuleNotFoundError('needy works on the moon only', name='moon')\n")
    assert xrt("plan", digits, "--json").json()["error"]["message"] == "needy works on the moon only"


@pytest.mark.parametrize(
    ("body", "reason", "listed"),
    [
        ("raise ImportError('libneedy.so: no such file')", "ImportError: libneedy.so: no such file", True),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded", True),
        ("1 / 0", "ZeroDivisionError: division by zero", True),
        ("1 / 0", "ZeroDivisionError: division by zero", False),
    ],
)
def test_a_package_that_fails_as_it_is_imported(
    needy: Callable[..., None], xrt: Callable[..., Any], digits: str, body: str, reason: str, listed: bool
) -> None:
    needy(body=f"{body}\n", listed=listed)
    found = xrt("plan", digits, "--json")
    error = found.json()["error"]
    assert (found.code, error["exit_code"]) == (3, 3)
    who, fix = (
        ("needy 1.2", "python -m pip install --force-reinstall needy-tools")
        if listed
        else ("needy", "repair or remove needy")
    )
    assert error["message"] == f"{who} cannot be imported: {reason}. Fix: {fix}"


def test_a_module_of_this_package_is_a_bug(needy: Callable[..., None], xrt: Callable[..., Any], digits: str) -> None:
    needy(body="import xpuruntime.nothing_of_that_name\n")
    found = xrt("plan", digits)
    assert found.code == 70
    assert "this is a bug in xpuruntime" in found.err


def test_a_part_of_a_package_that_is_installed(
    needy: Callable[..., None], xrt: Callable[..., Any], digits: str
) -> None:
    needy("Requires-Dist: packaging>=20\n", "import packaging.nothing_of_that_name\n")
    message = xrt("plan", digits, "--json").json()["error"]["message"]
    assert message == (
        "needy-tools 1.2 needs the module 'packaging.nothing_of_that_name', which packaging "
        f"{metadata.version('packaging')} does not have. Fix: install another version of it, or of needy-tools; "
        "`pip check` lists versions that do not fit"
    )
