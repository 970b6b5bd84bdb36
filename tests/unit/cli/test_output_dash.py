# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``-`` as an output: no option writes to standard output by it, and none makes a file of that name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from xpuruntime.cli.app import command_line
from xpuruntime.cli.entry import run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Options that name what a command writes, wherever they are.
_WRITTEN = {"--output", "--html", "--trace", "--journal", "--statement"}


def outputs() -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each command with each of its options that names an output."""

    def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, (*path, name))
        for option in command.params:
            for word in option.opts:
                if word in _WRITTEN or (path, word) == (("tune",), "--lock"):
                    yield path, word

    yield from walk(command_line(), ())


def test_the_options_are_found() -> None:
    found = list(outputs())
    assert len(found) >= 16
    assert {word for _, word in found} == _WRITTEN | {"--lock"}


@pytest.mark.parametrize(("path", "option"), list(outputs()))
def test_dash_is_refused(
    path: tuple[str, ...],
    option: str,
    digits: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = {"bisect": ("onnxruntime", "1.0..2.0", digits), "diff": ("here", "here", digits)}
    assert run([*path, *arguments.get(path[0], (digits,)), option, "-"]) == 2
    said = capsys.readouterr().err
    assert option in said
    assert "'-' is not standard output here. Fix: " in said
    assert not list(tmp_path.iterdir())


def test_dash_as_the_target_of_a_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.yaml").write_text("execution: {device: cpu}\n", encoding="utf-8")
    assert run(["policy", "convert", "policy.yaml", "-"]) == 2
    assert "'-' is not standard output here" in capsys.readouterr().err


def test_a_file_of_that_name_can_be_named(digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["explain", digits, "--device", "cpu", "--html", "./-"]) == 0
    assert (tmp_path / "-").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
