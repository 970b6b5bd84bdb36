# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Nothing that a command reads is replaced by what it writes, however the file is named."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from xpuruntime.evidence import Report

if TYPE_CHECKING:
    from collections.abc import Callable

    Xrt = Callable[..., Any]


@pytest.fixture
def inputs(tmp_path: Path, digits: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Everything that the command below reads: what it is to where it lies."""
    import onnx

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "in"
    folder.mkdir()
    model = onnx.load(digits)
    onnx.save(model, folder / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    (folder / "policy.yaml").write_text("mode: prefer\n")
    np.savez(folder / "x.npz", image=np.zeros((1, 1, 8, 8), np.float32))
    (folder / "samples").mkdir()
    np.savez(folder / "samples" / "0.npz", image=np.zeros((1, 1, 8, 8), np.float32))
    return {
        "model": folder / "m.onnx",
        "data": folder / "w.bin",
        "policy": folder / "policy.yaml",
        "input": folder / "x.npz",
        "calibration": folder / "samples" / "0.npz",
    }


def symlink(path: Path, ending: str) -> str:
    Path(f"link{ending}").symlink_to(path)
    return f"link{ending}"


def hard_link(path: Path, ending: str) -> str:
    os.link(path, f"hard{ending}")
    return f"hard{ending}"


def through_a_folder(path: Path, ending: str) -> str:
    del ending
    Path("elsewhere").symlink_to(path.parent)
    return f"elsewhere/{path.name}"


SPELLINGS: dict[str, Callable[[Path, str], str]] = {
    "itself": lambda path, _: str(path),
    "relative": lambda path, _: f"./in/../{os.path.relpath(path)}",
    "a link": symlink,
    "a hard link": hard_link,
    "a linked folder": through_a_folder,
}
OPTIONS = [
    ("explain", "--output", ".json"), ("explain", "--html", ".html"), ("run", "--output", ".npz"),
    ("profile", "--trace", ".json"), ("compare", "--html", ".html"), ("bench", "--html", ".html"),
]  # fmt: skip


def contents(inputs: dict[str, Path]) -> dict[str, bytes]:
    return {what: path.read_bytes() for what, path in inputs.items()}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(("command", "option", "ending"), OPTIONS)
@pytest.mark.parametrize("what", ["model", "data", "policy", "input", "calibration"])
def test_an_output_is_no_input(
    xrt: Xrt, inputs: dict[str, Path], what: str, command: str, option: str, ending: str, spelling: str
) -> None:
    target = SPELLINGS[spelling](inputs[what], ending)
    before = contents(inputs)
    result = xrt(
        command, inputs["model"], "--device", "cpu", "--policy", inputs["policy"], "--input", f"@{inputs['input']}",
        "--calibration", inputs["calibration"].parent, option, target,
    )  # fmt: skip
    assert contents(inputs) == before
    assert result.code == 2
    if command not in ("run", "profile") or target.endswith(ending):  # else it is refused by its ending
        assert option in result.err
        assert "Fix: " in result.err


@pytest.mark.parametrize("option", ["--output", "--html", "--lock", "--journal"])
@pytest.mark.parametrize("what", ["search", "base", "samples"])
def test_what_a_search_reads_is_no_output(xrt: Xrt, inputs: dict[str, Path], what: str, option: str) -> None:
    search = inputs["policy"].with_name("search.yaml")
    search.write_text("base: policy.yaml\ninputs: samples\n")
    read = {"search": search, "base": inputs["policy"], "samples": inputs["calibration"]}
    before = {name: path.read_bytes() for name, path in read.items()}
    result = xrt("tune", inputs["model"], "--tune", search, "--budget", "1ms", option, read[what])
    assert {name: path.read_bytes() for name, path in read.items()} == before
    assert result.code == 2
    assert f"{option} {read[what]} would replace" in result.err


@pytest.mark.parametrize(
    ("command", "options"),
    [("explain", ["-o"]), ("explain", ["--html"]), ("run", ["-o"]), ("verify", ["--html"]), ("verify", ["-o"])],
)
def test_a_lock_is_no_output(xrt: Xrt, inputs: dict[str, Path], command: str, options: list[str]) -> None:
    lock = inputs["policy"].with_name("lock.npz")
    lock.write_text("{}")
    target = f"junit={lock}" if (command, options) == ("verify", ["-o"]) else lock
    result = xrt(command, inputs["model"], "-d", "cpu", "--lock", lock, *options, target)
    assert lock.read_text() == "{}"
    assert result.code == 2
    assert f"{lock} would replace" in result.err


def test_metrics_and_sides_are_no_outputs(xrt: Xrt, inputs: dict[str, Path]) -> None:
    metric = inputs["policy"].with_name("metric.py")
    metric.write_text("def worst(run, inputs): return 1.0\n")
    before = metric.read_text()
    result = xrt("verify", inputs["model"], "-d", "cpu", "--metric", f"{metric}:worst=0", "--output", f"junit={metric}")
    assert (result.code, metric.read_text()) == (2, before)
    assert "would replace the file of a metric" in result.err
    one, two = (inputs["policy"].with_name(name) for name in ("one.json", "two.json"))
    for side in (one, two):
        Report().save(side)
        before = side.read_text()
        result = xrt("diff", one, two if two.exists() else one, "-o", side)
        assert (result.code, side.read_text()) == (2, before)
        assert "would replace" in result.err


@pytest.mark.parametrize("name", ["manifest.json", "model.onnx", "new.json"])
def test_nothing_is_written_into_an_artifact(xrt: Xrt, inputs: dict[str, Path], tmp_path: Path, name: str) -> None:
    artifact = tmp_path / "a.xrt"
    made = xrt("compile", inputs["model"], "-o", artifact, "--device", "cpu", "--engine", "onnxruntime")
    assert made.code == 0, made.err
    before = {path.name: path.read_bytes() for path in artifact.iterdir()}
    result = xrt("explain", artifact, "--output", artifact / name)
    assert {path.name: path.read_bytes() for path in artifact.iterdir()} == before
    assert result.code == 2


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_reports_and_policies_are_no_outputs(xrt: Xrt, inputs: dict[str, Path], tmp_path: Path, spelling: str) -> None:
    for name in ("one.json", "two.json"):
        Report().save(tmp_path / "in" / name)
    path, two = tmp_path / "in" / "one.json", tmp_path / "in" / "two.json"
    target = SPELLINGS[spelling](two, ".html")
    before = two.read_bytes()
    for reports in ([two], [path, two]):
        result = xrt("explain", *reports, "--html", target)
        assert (result.code, two.read_bytes()) == (2, before)
    if spelling != "a linked folder":
        target = SPELLINGS[spelling](inputs["policy"], ".yaml")
        result = xrt("policy", "convert", inputs["policy"], target)
        assert result.code == 2
    assert inputs["policy"].read_text() == "mode: prefer\n"


def test_two_outputs_are_two_files(xrt: Xrt, digits: str, tmp_path: Path) -> None:
    result = xrt("explain", digits, "--device", "cpu", "--output", tmp_path / "r", "--html", f"{tmp_path}/./r")
    assert result.code == 2
    assert "name the same file" in result.err
    assert not (tmp_path / "r").exists()
    assert xrt("explain", digits, "--device", "cpu", "-o", "/dev/null", "--html", "/dev/null").code == 0


KEPT: dict[str, Callable[[Path], object]] = {
    "a file": lambda place: place.write_text("years of work"),
    "a folder": lambda place: (place.mkdir(), (place / "thesis.txt").write_text("years of work")),
    "an empty manifest": lambda place: (place.mkdir(), (place / "manifest.json").write_text("{}")),
    "another manifest": lambda place: (
        place.mkdir(), (place / "manifest.json").write_text('{"schema": "web/1", "files": {}}')
    ),
    "a link to a folder": lambda place: (
        (place.parent / "real").mkdir(), (place.parent / "real" / "thesis.txt").write_text("x"),
        place.symlink_to("real"),
    ),
    "a dangling link": lambda place: place.symlink_to("nowhere"),
    "a pipe": os.mkfifo,
}  # fmt: skip


def state(folder: Path) -> list[tuple[str, bool, bytes]]:
    return sorted(
        (str(path.relative_to(folder)), path.is_symlink(), path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    )


@pytest.mark.parametrize("kind", KEPT)
def test_force_replaces_nothing_but_an_artifact(xrt: Xrt, digits: str, tmp_path: Path, kind: str) -> None:
    KEPT[kind](tmp_path / "out")
    before = state(tmp_path)
    command = ("compile", digits, "-o", tmp_path / "out", "--device", "cpu", "--engine", "onnxruntime", "--force")
    result = xrt(*command)
    assert state(tmp_path) == before
    assert result.code == 2
    assert "cannot replace" in result.err
    assert "Fix: " in result.err


def test_force_keeps_an_artifact_with_files_of_the_user(xrt: Xrt, digits: str, tmp_path: Path) -> None:
    path = tmp_path / "a.xrt"
    command = ("compile", digits, "-o", path, "--device", "cpu", "--engine", "onnxruntime")
    assert xrt(*command).code == 0
    assert xrt(*command).code == 2
    assert xrt(*command, "--force").code == 0
    (path / "notes").mkdir()
    (path / "notes" / "thesis.txt").write_text("years of work")
    before = state(tmp_path)
    result = xrt(*command, "--force")
    assert (result.code, state(tmp_path)) == (2, before)
    assert "'notes'" in result.err
    shutil.rmtree(path / "notes")
    shutil.copy(path / "model.onnx", tmp_path / "other.onnx")
    (path / "manifest.json").write_text((path / "manifest.json").read_text().replace("artifact/1", "artifact/7"))
    assert xrt(*command, "--force").code == 0, "one of another release is an artifact, too"
    before = state(tmp_path)
    inside = xrt("compile", path / "model.onnx", *command[2:], "--force")
    assert (inside.code, state(tmp_path)) == (2, before)
