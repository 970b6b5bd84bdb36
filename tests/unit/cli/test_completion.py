# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Completion in shells: values and options, and nothing else at the prompt."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("xrt be", ["bench"]),
        ("xrt run model.onnx --engine o", ["onnxruntime", "openvino"]),
        ("xrt run model.onnx --device cu", ["cuda"]),
        ("xrt run model.onnx --precision b", ["bf16"]),
        ("xrt run model.onnx --prec", ["--precision"]),
        ("xrt kernels layer", ["layer_norm"]),
    ],
)
def test_words_are_completed(shell: str, line: str, words: list[str]) -> None:
    shown = complete(shell, line)
    for word in words:
        assert word in shown


def test_engines_of_a_list_are_completed_once() -> None:
    found = complete("bash", "xrt compare model.onnx --engines openvino,o").split()
    assert found == ["openvino,onnxruntime", "openvino,onnxruntime-genai", "openvino,openvino-genai"]


@pytest.mark.parametrize("shell", [*SHELLS, "unknown"])
def test_what_cannot_be_completed_shows_nothing_at_the_prompt(shell: str) -> None:
    complete(shell, "xrt nothing --at all")


def test_a_failure_is_not_shown_at_the_prompt(tmp_path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['xpuruntime.engines'] = None\n")
    assert complete("bash", "xrt run m.onnx --engine o", PYTHONPATH=str(tmp_path)) == ""


def test_the_script_of_the_shell_is_shown() -> None:
    done = xrt("--show-completion")
    assert (done.returncode, done.stderr) == (0, "")
    assert "_XRT_COMPLETE" in done.stdout
