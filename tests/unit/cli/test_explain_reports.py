# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt explain`` on saved reports: one is shown again, two are compared."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import xpuruntime as xrt_package

Xrt = Any


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, digits: str) -> Path:
    """Reports of the demo model: two of ONNX Runtime, one of the null engine, one of another model."""
    place = tmp_path_factory.mktemp("reports")
    for name, engine in (("a", "onnxruntime"), ("b", "onnxruntime"), ("null", "null")):
        with xrt_package.InferenceSession(digits, device="cpu", engine=engine) as session:
            session.explain(runs=2).save(place / f"{name}.json")
    return place


def test_one_report_is_shown_again(xrt: Xrt, folder: Path) -> None:
    saved = json.loads((folder / "a.json").read_text())
    assert xrt("explain", folder / "a.json", "--json").json() == saved
    result = xrt("explain", folder / "a.json")
    assert (result.code, result.out.splitlines()[0]) == (0, "policy honoured")


def test_a_report_is_saved_beside_being_shown(xrt: Xrt, digits: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    result = xrt("explain", digits, "-d", "cpu", "-e", "null", "-o", path)
    assert (result.code, result.out.splitlines()[0].partition(";")[0]) == (0, "policy honoured")
    assert xrt_package.Report.load(path).plan["engine"] == "null"
    refused = xrt("explain", digits, "-d", "cpu", "-e", "null", "-o", tmp_path / "none" / "saved.json", "--json")
    assert refused.code == 2
    assert "--output" in refused.json()["error"]["message"]


def test_a_page_of_a_saved_report(xrt: Xrt, folder: Path, tmp_path: Path) -> None:
    assert xrt("explain", folder / "a.json", "--html", tmp_path / "a.html").code == 0
    assert (tmp_path / "a.html").read_text() == xrt_package.Report.load(folder / "a.json").to_html()


def test_a_page_of_two_reports(xrt: Xrt, folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "changes.html"
    result = xrt("explain", folder / "a.json", folder / "null.json", "--html", page)
    assert result.code == 1
    text = page.read_text(encoding="utf-8")
    found = xrt_package.compare_reports(str(folder / "a.json"), str(folder / "null.json"))
    assert text == found.to_html()
    assert result.out.splitlines()[0].startswith("15 nodes moved")
    assert "15 nodes moved" in text


def test_a_deviating_report_exits_with_1_again(xrt: Xrt, folder: Path, tmp_path: Path) -> None:
    saved = json.loads((folder / "a.json").read_text())
    saved["observations"][0]["status"] = "substituted"
    (tmp_path / "deviating").write_text(json.dumps(saved))
    result = xrt("explain", tmp_path / "deviating")
    assert (result.code, result.out.splitlines()[0]) == (1, "1 deviation")


def test_the_same_twice(xrt: Xrt, folder: Path) -> None:
    result = xrt("explain", folder / "a.json", folder / "b.json", "--noise", 1000)
    assert (result.code, result.out.splitlines()[0]) == (0, "nothing moved"), result.out
    found = xrt("explain", folder / "a.json", folder / "b.json", "--json").json()
    assert (found["schema"], found["same"]) == ("xpuruntime.report_comparison/2", True)


def test_more_reports_are_held_against_a_baseline_and_the_odd_one_is_named(
    xrt: Xrt, folder: Path, tmp_path: Path
) -> None:
    names = ("b", "null", "c")
    shutil.copy(folder / "a.json", folder / "c.json")
    paths, page = [folder / f"{name}.json" for name in names], tmp_path / "against.html"
    arguments = ("explain", *paths, "--baseline", folder / "a.json", "--noise", 1000)
    result = xrt(*arguments, "--html", page)
    assert (result.code, result.out.splitlines()[0]) == (
        1,
        "1 of 3 reports differs from a.json; odd among all: null.json",
    )
    found = xrt(*arguments, "--json").json()
    assert (found["schema"], found["baseline"]) == ("xpuruntime.index/1", "a.json")
    rows = {one["path"]: (one["same"], one["changes"], len(one["odd"]) > 0) for one in found["files"]}
    assert rows.pop("null.json")[::2] == (False, True)
    assert rows == {
        "a.json": (True, "", False), "b.json": (True, "nothing moved", False), "c.json": (True, "nothing moved", False)
    }  # fmt: skip
    assert all(one["median_us"] > 0 for one in found["files"])
    assert "Against the baseline" in page.read_text(encoding="utf-8")
    assert xrt("explain", *[folder / f"{name}.json" for name in ("a", "b", "c")], "--noise", 1000).code == 0
    pair = xrt("explain", folder / "b.json", "--baseline", folder / "a.json", "--json").json()
    assert pair["before"]["name"] == str(folder / "a.json")


def test_another_engine(xrt: Xrt, folder: Path) -> None:
    result = xrt("explain", folder / "a.json", folder / "null.json", "--noise-us", 1e9)
    assert result.code == 1
    assert result.out.splitlines()[0].startswith("15 nodes moved, ")
    found = xrt("explain", folder / "a.json", folder / "null.json", "--noise", 0.5, "--json").json()
    assert (found["same"], found["noise"], found["noise_us"]) == (False, 0.5, 1.0)


def test_reports_are_told_by_their_header_and_not_by_their_name(
    xrt: Xrt, folder: Path, tmp_path: Path, digits: str
) -> None:
    shutil.copy(folder / "a.json", tmp_path / "report.onnx")
    assert xrt("explain", tmp_path / "report.onnx").code == 0
    shutil.copy(digits, tmp_path / "model.json")
    result = xrt("explain", tmp_path / "model.json", "--device", "cpu", "--json")
    assert result.json()["plan"]["model"]["path"].endswith("model.json")
    ordered = json.dumps(json.loads((folder / "a.json").read_text()), sort_keys=True)
    (tmp_path / "sorted").write_text(ordered)
    assert not ordered.startswith('{"schema"')
    assert xrt("explain", tmp_path / "sorted").code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("A", "MODEL"), "is no xpuruntime report"),
        (("A", "nope.json"), "is no file"),
        (("MODEL", "--baseline", "A"), "is no xpuruntime report"),
        (("A", "B", "OTHER"), "OTHER, compared with"),
        (("A", "--policy", "p.yaml"), "--policy say how a model is run"),
        (("A", "B", "-d", "cpu", "--dim", "N=1"), "--dim, --device say how"),
        (("A", "-o", "x.json"), "--output say how"),
        (("A", "B", "--html", "nowhere/x.html"), "the folder 'nowhere' was not found"),
        (("MODEL", "--html", "nowhere/x.html"), "the folder 'nowhere' was not found"),
        (("A", "--noise", "0.2"), "for several reports"),
        (("MODEL", "--noise", "0.2"), "comparison of saved reports"),
        (("A", "B", "--noise", "-1"), "noise must be 0 or more"),
        (("CUT",), "truncated"),
        (("BARE",), "it has no observations, plan, units"),
        (("PLAN",), "holds 'xpuruntime.plan/1', which is no report"),
        (("NEWER",), "has the schema 'xpuruntime.report/9', this version reads 'xpuruntime.report/1'"),
        (("A", "OTHER"), "different models"),
        ((), "Missing argument"),
    ],
)
def test_refusals(xrt: Xrt, folder: Path, tmp_path: Path, digits: str, arguments: tuple[str, ...], words: str) -> None:
    text = (folder / "a.json").read_text()
    other = json.loads(text)
    other["plan"]["model"]["sha256"] = "0" * 64
    for unit in other["units"]:
        unit["source_nodes"] = ["other_" + name for name in unit["source_nodes"]]
    made = {
        "CUT": text[:-200],
        "BARE": '{"schema": "xpuruntime.report/1"}',
        "NEWER": text.replace("xpuruntime.report/1", "xpuruntime.report/9", 1),
        "PLAN": json.dumps(json.loads(text)["plan"]),
        "OTHER": json.dumps(other),
    }
    places = {"A": folder / "a.json", "B": folder / "b.json", "MODEL": digits}
    for name, content in made.items():
        places[name] = tmp_path / name
        (tmp_path / name).write_text(content)
    given = [os.fspath(places.get(argument, argument)) for argument in arguments]
    result = xrt("explain", *given, "--json")
    assert (result.code, result.json()["error"]["exit_code"]) == (2, 2)
    assert words in result.json()["error"]["message"]


def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(
    xrt: Xrt, digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.mkdir", refused)
    monkeypatch.setattr("xpuruntime.cli.session.open_session", lambda *_, **__: pytest.fail("it was run"))
    for command, option in (("explain", "--output"), ("explain", "--html"), ("profile", "--trace")):
        result = xrt(command, digits, "--device", "cpu", option, tmp_path / "x.json")
        assert (result.code, result.out) == (2, "")
        assert "Read-only file system" in result.err


@pytest.mark.parametrize("command", ["explain", "profile"])
def test_what_cannot_be_saved_was_printed(
    xrt: Xrt, digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    option, words = {"explain": ("-o", "policy honoured"), "profile": ("--trace", "digits.onnx on")}[command]
    given = (command, digits, "--device", "cpu", option, tmp_path / "x.json")
    monkeypatch.setattr(os, "fsync", full)
    result = xrt(*given)
    assert result.code == 2
    assert words in result.out
    assert "No space left on device" in result.err
    assert not list(tmp_path.iterdir())
    assert "No space left on device" in xrt(*given, "--json").json()["error"]["message"]


def test_nodes_of_a_profile_without_a_trace_are_refused(xrt: Xrt, digits: str) -> None:
    result = xrt("profile", digits, "--device", "cpu", "--nodes")
    assert (result.code, result.out) == (2, "")
    assert "give --trace FILE" in result.err


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="no such file")
def test_a_report_goes_into_a_pipe(digits: str) -> None:
    """``/dev/stdout`` is no file to be replaced."""
    import subprocess
    import sys

    code = "import sys; from xpuruntime.cli import main; sys.argv[0] = 'xrt'; sys.exit(main())"
    given = [sys.executable, "-c", code, "explain", digits, "--device", "cpu", "--html", "/dev/stdout"]
    done = subprocess.run(given, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"policy honoured" in done.stdout.partition(b"<!DOCTYPE html>")[0]
    assert done.stdout.rstrip().endswith(b"</html>")
