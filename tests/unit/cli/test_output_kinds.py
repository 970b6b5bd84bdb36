# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Files that commands write by their ending, and standard output by a dash."""

from __future__ import annotations

import gzip
import html
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from xpuruntime.cli.app import command_line
from xpuruntime.cli.entry import run
from xpuruntime.cli.output import _KINDS, refuse_other_kinds
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Xrt = Callable[..., Any]
    from collections.abc import Iterator


VERIFICATIONS = ("json", "md", "junit", "sarif", "openmetrics", "html", "intoto")
TRACE = b'{"schemaVersion": 1, "traceEvents": [], "metadata": {}}'
#: Files of somebody else.
OTHERS = {
    "text": b"years of work\n",
    "markdown": b"## Chapter 1\n\nIt was a dark night.\n",
    "yaml": b"services: {web: {image: nginx}}\n",
    "json": b'{"name": "left-pad", "version": "1.0.0"}\n',
    "json list": b"[1, 2]",
    "xml": b'<?xml version="1.0"?>\n<project/>\n',
    "zip": b"PK\x03\x04\x14\x00\x00\x00",
    "gzip": gzip.compress(b"years of work"),
    "cut gzip": gzip.compress(TRACE)[:20],
    "binary": bytes(range(256)),
    "blank": b"\n",
}


def to(verification: str, path: str) -> tuple[str, str]:
    """Return the option of `xrt verify` that writes a format to a file."""
    return ("--html", path) if verification == "html" else ("--output", f"{verification}={path}")


@pytest.fixture
def own(xrt: Xrt, digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[bytes]]:
    """What the commands write, by its kind."""
    monkeypatch.chdir(tmp_path)
    outs = [word for verification in VERIFICATIONS for word in to(verification, f"v.{verification}")]
    for command in (
        ("explain", digits, "-d", "cpu", "-o", "report", "--html", "page"),
        ("explain", digits, "-d", "cpu", "-o", "units.csv"),
        ("run", digits, "-d", "cpu", "-o", "a.npz"),
        ("run", digits, "-d", "cpu", "-o", "a.npy"),
        ("profile", digits, "-d", "cpu", "--trace", "t.json", "--runs", "1"),
        ("profile", digits, "-d", "cpu", "--trace", "t.json.gz", "--runs", "1"),
        ("lock", digits, "-d", "cpu", "-o", "lock", "--statement", "statement"),
        ("verify", digits, "-d", "cpu", "--only", "evidence", *outs),
    ):
        assert xrt(*command).code == 0
    names = {
        "report": ["report"], "page": ["page"], "arrays": ["a.npz", "a.npy"], "trace": ["t.json", "t.json.gz"],
        "lock": ["lock"], "statement": ["statement"], "units as csv": ["units.csv"],
        **{f"verification as {verification}": [f"v.{verification}"] for verification in VERIFICATIONS},
    }  # fmt: skip
    found = {kind: [(tmp_path / name).read_bytes() for name in paths] for kind, paths in names.items()}
    found["policy"] = [b"# tied\nexecution: {device: cpu}\n", b'{"mode": "prefer"}']
    found["diff"] = [b'{"schema": "xpuruntime.diff/2"}', b'{"a": 1, "schema" : "xpuruntime.diff/2"}']
    found["bisection"] = [b'{"schema": "xpuruntime.bisect/1"}']
    return found


def accepted(kind: str, content: bytes, path: Path) -> bool:
    path.write_bytes(content)
    try:
        refuse_other_kinds({"--output": (str(path), kind)})
    except InputError:
        return False
    return True


def test_each_kind_is_told_from_all_others(own: dict[str, list[bytes]], tmp_path: Path) -> None:
    assert own.keys() == _KINDS.keys()
    same = {frozenset(("page", "verification as html")), frozenset(("statement", "verification as intoto"))}
    for kind in _KINDS:
        for name, contents in own.items():
            expected = name == kind or frozenset((name, kind)) in same
            for content in contents:
                assert accepted(kind, content, tmp_path / "there") is expected, (kind, name)
        for name, content in OTHERS.items():
            assert not accepted(kind, content, tmp_path / "there"), (kind, name)
        assert accepted(kind, b"", tmp_path / "there"), "an empty file, as mktemp makes one"


def test_what_is_no_file_is_not_looked_at(tmp_path: Path) -> None:
    for path in (None, str(tmp_path / "new"), "/dev/null", str(tmp_path)):
        refuse_other_kinds({"--output": (path, "report")})


OPTIONS = [
    ("explain", "-o", "there"), ("explain", "-o", "there.csv"), ("explain", "--html", "there"),
    ("run", "-o", "there.npz"),
    ("profile", "--trace", "there.json"), ("compare", "--html", "there"), ("bench", "--html", "there"),
    ("lock", "--statement", "there"), ("plan", "--html", "there"), ("determinism", "--html", "there"),
    ("tune", "-o", "there"), ("tune", "--lock", "there"), ("tune", "--html", "there"), ("tune", "--journal", "there"),
    *(("verify", *to(verification, "there")) for verification in VERIFICATIONS),
]  # fmt: skip


@pytest.mark.parametrize(("command", "option", "value"), OPTIONS)
def test_no_command_replaces_a_file_of_somebody_else(
    xrt: Xrt, digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, option: str, value: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / value.partition("=")[2] if "=" in value else tmp_path / value
    path.write_text("years of work\n")
    more = ("--input", "random", "--budget", "1ms") if command == "tune" else ()
    found = xrt(command, digits, "-d", "cpu", *more, option, value)
    assert (found.code, path.read_text()) == (2, "years of work\n"), found.err
    assert "would replace a file that is not" in found.err or "is not the journal of a search" in found.err
    assert "Fix: " in found.err


def test_saved_reports_and_sides_of_a_diff(
    xrt: Xrt, digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert xrt("explain", digits, "-d", "cpu", "-o", "r.json").code == 0
    shutil.copy("r.json", "s.json")
    for name in ("there", "there.json"):
        (tmp_path / name).write_text(json.dumps({"name": "left-pad"}))
    before = (tmp_path / "there").read_text()
    for command in (("explain", "r.json"), ("explain", "r.json", "s.json")):
        found = xrt(*command, "--html", "there")
        assert (found.code, (tmp_path / "there").read_text()) == (2, before), found.err
    found = xrt("diff", "r.json", "s.json", "-o", "there.json")
    assert (found.code, (tmp_path / "there.json").read_text()) == (2, before), found.err


def test_every_report_is_also_a_page(xrt: Xrt, digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [
        ("plan", digits, "-d", "cpu"), ("profile", digits, "-d", "cpu", "-n", "1"), ("lock", digits, "-o", "m.lock"),
        ("diff", "m.lock", "m.lock"), ("determinism", digits, "--grade", "run_to_run", "--trials", "1"), ("doctor",),
    ]  # fmt: skip
    for number, command in enumerate(commands):
        as_json, as_text = xrt(*command, "--html", "json.html", "--json"), xrt(*command, "--html", f"{number}.html")
        assert (as_text.code, as_json.code) == (0, 0), as_text.err + as_json.err
        assert json.loads(as_json.out)
        headline = next(filter(str.strip, as_text.out.splitlines())).split(":")[0].strip()
        assert html.escape(headline) in (tmp_path / f"{number}.html").read_text(encoding="utf-8"), command


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
