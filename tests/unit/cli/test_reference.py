# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The reference of commands, and their completion in a shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from xpuruntime.cli import ExitCode
from xpuruntime.runtime.doctor.facts import FindingCode

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "cli.md"


def test_every_finding_of_the_doctor_is_described() -> None:
    codes = {code.value for code in FindingCode}
    assert len(codes) > 20
    assert codes <= set(re.findall(r"`(\w+)`", PAGE.read_text()))


def test_every_exit_code_is_described() -> None:
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE.read_text(), flags=re.MULTILINE)}
    assert documented == {int(code) for code in ExitCode}


@pytest.mark.parametrize(
    "command",
    [
        "devices",
        "doctor",
        "plan",
        "run",
        "oip-check",
        "serve",
        "bench",
        "profile",
        "compile",
        "compare",
        "explain",
        "determinism",
        "diff",
        "export",
        "lock",
        "log",
        "index",
        "verify",
        "kernels",
        "policy",
        "demo",
    ],
)
def test_every_option_is_described(xrt: Any, command: str) -> None:
    text = PAGE.read_text()
    assert f"## xrt {command}" in text
    shown = re.findall(r"--[a-z]+", xrt(command, "--help").out)
    assert [option for option in shown if option not in text] == []


CALL = [sys.executable, "-c", "from xpuruntime.cli import main; main()"]
SHELLS = ("bash", "zsh", "fish")


def xrt(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CALL, *arguments], capture_output=True, text=True, env={**os.environ, **env}, check=False, timeout=120
    )


def complete(shell: str, line: str, **env: str) -> str:
    asked = {
        "_XRT_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = xrt(**asked, **env)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    ("shell", "line", "words"),
    [
        *((shell, "xrt be", ["bench"]) for shell in SHELLS),
        ("zsh", "xrt run model.onnx --engine o", ["onnxruntime", "openvino"]),
        ("bash", "xrt run model.onnx --device cu", ["cuda"]),
        ("bash", "xrt run model.onnx --prec", ["--precision"]),
        ("fish", "xrt kernels layer", ["layer_norm"]),
    ],
)
def test_words_are_completed(shell: str, line: str, words: list[str]) -> None:
    shown = complete(shell, line)
    for word in words:
        assert word in shown


@pytest.mark.parametrize("shell", ["bash", "unknown"])
def test_what_cannot_be_completed_shows_nothing_at_the_prompt(shell: str) -> None:
    complete(shell, "xrt nothing --at all")


def test_a_failure_is_not_shown_at_the_prompt(tmp_path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['xpuruntime.engines'] = None\n")
    assert complete("bash", "xrt run m.onnx --engine o", PYTHONPATH=str(tmp_path)) == ""


def test_the_script_of_the_shell_is_shown() -> None:
    done = xrt("--show-completion")
    assert (done.returncode, done.stderr) == (0, "")
    assert "_XRT_COMPLETE" in done.stdout
