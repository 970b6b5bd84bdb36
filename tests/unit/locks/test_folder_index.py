# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt index``: many files of the same model, and the odd one out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest

import xpuruntime as xrt
from xpuruntime.cli.entry import run
from xpuruntime.lockfile.canonical import save_lock
from xpuruntime.locks.folder_index import index_folder

if TYPE_CHECKING:
    from pathlib import Path

POLICY = {"execution": {"engine": "onnxruntime", "device": "cpu"}}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports of four machines, of which one has another release and kernel, locks of three, and other files."""
    folder = tmp_path_factory.mktemp("fleet") / "all of them"
    (folder / "locks").mkdir(parents=True)
    with xrt.InferenceSession(xrt.demo_model_path(), POLICY) as session:
        reports = [session.explain(runs=1) for _ in range(2)]
    for number, report in enumerate([*reports, *reports], 1):
        report.save(folder / f"machine{number}.json")
    odd = json.loads((folder / "machine3.json").read_text())
    odd["environment"]["packages"]["onnxruntime-gpu"] = "1.0.0"
    odd["units"][0]["kernel"] = "another"
    (folder / "machine3.json").write_text(json.dumps(odd))
    lock = xrt.lock(xrt.demo_model_path(), POLICY).lock
    for number in (1, 2, 3):
        save_lock(lock, folder / "locks" / f"machine{number}.lock")
    text = (folder / "locks" / "machine2.lock").read_text()
    (folder / "locks" / "machine2.lock").write_text(text.replace('"fp32"', '"fp16"', 1))
    (folder / "poetry.lock").write_text('[[package]]\nname = "numpy"\n')
    (folder / "other.json").write_text('{"schema": "something/1"}')
    (folder / "broken.json").write_text("{")
    return folder


def test_the_odd_one_is_found(fleet: Path) -> None:
    folder = index_folder(fleet)
    assert len(folder.files) == 7
    assert folder.headline == "7 files, 2 odd"
    broken, odd = folder.odd
    assert (broken.path, broken.good, "was edited" in broken.error) == ("locks/machine2.lock", False, True)
    assert (odd.path, odd.kind, odd.model, odd.engine) == ("machine3.json", "report", "digits.onnx", "onnxruntime")
    facts = {one.name: one for one in odd.odd}
    assert facts.keys() == {"packages.onnxruntime-gpu", *(name for name in facts if name.startswith("unit "))}
    assert len(facts) == 2
    package = facts["packages.onnxruntime-gpu"]
    assert (package.value, package.agreeing, package.of) == ("1.0.0", 3, 4)
    assert folder.undecided == ()


def test_two_files_have_no_majority(fleet: Path, tmp_path: Path) -> None:
    for number in (1, 3):
        (tmp_path / f"{number}.json").write_bytes((fleet / f"machine{number}.json").read_bytes())
    folder = index_folder(tmp_path)
    assert folder.odd == ()
    assert "report of digits.onnx: packages.onnxruntime-gpu" in folder.undecided


def test_locks_and_verifications_are_compared_too(tmp_path: Path) -> None:
    lock = xrt.lock(xrt.demo_model_path(), POLICY).lock
    entry, *others = lock.identity.entries
    entry = msgspec.structs.replace(entry, precision="fp16")
    other = xrt.Lock.of(msgspec.structs.replace(lock.identity, entries=(entry, *others)))
    result = xrt.verify(xrt.demo_model_path(), POLICY, only=["evidence"])
    failed = msgspec.structs.replace(result, claims=(msgspec.structs.replace(result.claims[0], verdict="fail"),))
    for number, (one, verified) in enumerate(zip((lock, lock, other), (result, result, failed), strict=True)):
        save_lock(one, tmp_path / f"{number}.lock")
        verified.save(tmp_path / f"{number}.json")
    found = {one.path: one for one in index_folder(tmp_path).odd}
    assert found.keys() == {"2.lock", "2.json"}
    assert any(fact.name == f"unit {entry.unit}" and "fp16" in fact.value for fact in found["2.lock"].odd)
    assert found["2.json"].good is False


def test_the_command_writes_a_page_with_links(fleet: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["index", str(fleet)]) == 1
    assert "packages.onnxruntime-gpu" in capfd.readouterr().out
    assert '"./machine3.json"' in (fleet / "index.html").read_text()
    page = fleet.parent / "index.html"
    assert run(["index", str(fleet), "--html", str(page), "--json"]) == 1
    assert json.loads(capfd.readouterr().out)["schema"] == "xpuruntime.index/1"
    assert '"./all%20of%20them/machine3.json"' in page.read_text()
    (tmp_path / "one.json").write_bytes((fleet / "machine1.json").read_bytes())
    assert run(["index", str(tmp_path)]) == 0


def test_what_has_nothing_to_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(xrt.InputError, match="has no report, lock or verification"):
        index_folder(tmp_path)
    with pytest.raises(xrt.InputError, match="is not a folder"):
        index_folder(tmp_path / "missing")
