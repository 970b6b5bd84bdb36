# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The repository's own checks find what they are for."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "check_repo.py"
HEAD = "# SPDX-License-Identifier: Apache-2.0\n# SPDX-FileCopyrightText: The xpuruntime developers\n"


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location("check_repo", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)

    def run(name: str, text: str | bytes) -> list[str]:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return module.check_text(name)

    run.module = module
    return run


def test_a_good_file_has_no_problem(check):
    assert check("good.py", HEAD + "X = 1\n") == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (HEAD + "x\n" * 799, "801 lines"),
        ("X = 1\n", "no SPDX header"),
        (HEAD + "X = 1", "no newline"),
        (HEAD + "X = 1 \n", "blanks at the end"),
        (HEAD + "X = '" + "/home" + "/someone/model.onnx'\n", "absolute path"),
        (HEAD.encode() + b"\xff\n", "not UTF-8"),
    ],
)
def test_each_problem_is_found(check, text, problem):
    found = check("bad.py", text)
    assert len(found) == 1
    assert problem in found[0]


def test_a_header_that_needs_another_is_found(check, tmp_path: Path):
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    (tmp_path / "good.h").write_text("#pragma once\n#include <string>\nstd::string f();\n")
    (tmp_path / "bad.h").write_text("#pragma once\nstd::string f();\n")
    assert check.module.check_header("good.h", compiler, None) == []
    assert "does not compile by itself" in check.module.check_header("bad.h", compiler, None)[0]
