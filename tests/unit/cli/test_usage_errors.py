# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Mistakes in a command line: each error has a line that works, and the examples in them run."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xpuruntime
from xpuruntime.cli.app import command_line
from xpuruntime.cli.entry import EXAMPLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: Commands whose examples need a network, or another process, or serve until they are ended.
NOT_RUN = {"bisect", "oip-check", "serve"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, digits: str) -> Path:
    """The files that the examples name."""
    folder = tmp_path_factory.mktemp("examples")
    shutil.copy(digits, folder / "model.onnx")
    (folder / "policy.yaml").write_text("schema: xpuruntime.policy/1\nmode: prefer\n")
    np.savez(folder / "samples.npz", image=np.zeros((1, 1, 8, 8), np.float32))
    xpuruntime.lock(str(folder / "model.onnx"), None, folder / "model.lock", device="cpu")
    (folder / "folder").mkdir()
    for name in ("empty", "empty.yaml"):
        (folder / name).touch()
    for name in ("before.lock", "after.lock"):
        shutil.copy(folder / "model.lock", folder / name)
    for command in (["init", "--quiet"], ["add", "."], ["-c", "user.name=x", "-c", "user.email=x", "commit", "-qmx"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def test_every_command_that_lacks_an_argument_shows_its_example(xrt: Callable[..., Any]) -> None:
    lacking = {name for name, command in commands(command_line()) if any(p.required for p in command.params)}
    assert lacking == set(EXAMPLES)
    for name, example in EXAMPLES.items():
        result = xrt(*name.split())
        assert result.code == 2
        assert f". Fix: {example}\n" in result.err


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - NOT_RUN))
def test_an_example_runs(name: str, files: Path, xrt: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    assert EXAMPLES[name].startswith(f"xrt {name} ")
    budget = ["--budget", "5s"] if name == "tune" else []
    result = xrt(*shlex.split(EXAMPLES[name])[1:], *budget)
    assert result.code in (0, 4), result.err  # what is measured may be undecided on a busy machine


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("explan", "No such command 'explan'. Fix: xrt explain\n"),
        ("policy chek p.yaml", "No such command 'chek'. Fix: xrt policy check\n"),
        ("generate", "No such command 'generate'. Fix: xrt --help\n"),
        ("plan m.onnx --engin=ort", "No such option: --engin. Fix: xrt plan m.onnx --engine=ort\n"),
        ("compare m.onnx --engine ort", "No such option: --engine. Fix: xrt compare m.onnx --engines ort\n"),
        ("serve m.onnx --port 80", "No such option: --port. Fix: --http 127.0.0.1:PORT"),
        ("run m.onnx m.lock", "m.lock is a file without an option. Fix: xrt run m.onnx --lock m.lock\n"),
        ("run m.onnx 'two words'", "two words is one argument too many. Fix: xrt run m.onnx\n"),
    ],
)
def test_a_wrong_word_has_a_line_that_works(xrt: Callable[..., Any], line: str, said: str) -> None:
    result = xrt(*shlex.split(line))
    assert result.code == 2
    assert result.err.startswith(f"error: {said}")


#: Wrong names, folders for files, other formats, damaged files: what a careless user types.
CARELESS = """
run nope.onnx
run empty
run folder
run policy.yaml
run model.onnx -o folder
run model.onnx -o nowhere/x.npz
run model.onnx -i imge=1
run model.onnx -i image
run model.onnx -i image=@nope.npy
run model.onnx -i image=@model.onnx
run model.onnx --dim batch=8
run model.onnx --dim N
run model.onnx --frozen
plan model.onnx -p nope.yaml
plan model.onnx -p folder
plan model.onnx -p model.onnx
plan model.onnx -p empty.yaml
plan model.onnx -e openvno
plan model.onnx -e torch
plan model.onnx -d gpu
plan model.onnx --machine nope.json
plan model.onnx --machine model.lock
compare model.onnx nope.onnx
compare model.onnx --engines openvno
compare model.onnx --engines ,
verify model.onnx --lock nope.lock
verify model.onnx --lock empty
verify model.onnx --lock folder
lock model.onnx -o nowhere/x.lock
lock model.onnx -o model.onnx
diff model.lock nope.lock
diff model.lock model.onnx model.onnx
export model.onnx --to ort-python -o exported-2
export model.lock --to ort-python -o folder
compile model.onnx -o folder
explain model.onnx --html folder
explain empty
index nowhere
tune model.onnx
tune model.onnx --input nope.npz
policy check nope.yaml
policy convert policy.yaml policy.txt
policy calibration model.onnx nope.npz
serve nope.onnx
serve folder
serve model.onnx --http 80
"""


@pytest.mark.parametrize("line", CARELESS.split("\n")[1:-1])
def test_a_careless_line_is_told_the_problem_and_then_the_fix(
    line: str, files: Path, xrt: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    result = xrt(*line.split())
    assert result.code in (1, 2, 3)
    problem, fix, rest = result.err.partition("Fix: ")
    assert problem.startswith("error: ")
    assert fix
    assert rest.strip()


def test_an_option_is_named_as_it_was_given(xrt: Callable[..., Any], digits: str) -> None:
    first, second = xrt("plan", digits, "-d", "cudda:0", "--precision", "fp17").err.splitlines()
    assert first.startswith("error: --device: 'cudda:0' is not a device; did you mean")
    assert second.startswith("  --precision: 'fp17' is not a valid value")


def test_a_warning_that_is_given_twice_is_printed_once(xrt: Callable[..., Any], files: Path, tmp_path: Path) -> None:
    result = xrt("lock", files / "model.onnx", "--precision", "fp16", "-d", "cpu", "-o", tmp_path / "m.lock")
    assert result.code == 0, result.err
    assert result.err.count("execution.precision: fp16 is advisory") == 1
