# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The plugin of pytest, in runs of pytest of their own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from importlib import metadata
from pathlib import Path

import msgspec
import onnx
import onnx.numpy_helper
import pytest

import xpuruntime as xrt
from xpuruntime.lockfile.canonical import save_lock

POLICY = {"execution": {"engine": "onnxruntime", "device": "cpu"}}
TESTS = """\
import numpy as np
import pytest


@pytest.mark.xrt_lock("models/digits.lock")
def test_holds(xrt_session, xrt_lock):
    assert xrt_session.lock.digest == xrt_lock.digest
    assert xrt_session.run({"image": np.zeros((1, 1, 8, 8), np.float32)})["logits"].shape == (1, 10)


@pytest.mark.xrt_lock("models/digits.lock", "models/other.onnx")
def test_other_model():
    raise AssertionError("the lock does not hold, so this never runs")


@pytest.mark.xrt_lock("models/missing.lock")
def test_missing(): ...


def test_no_mark(xrt_session): ...
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a locked model in a folder beside its tests."""
    folder = tmp_path_factory.mktemp("project")
    models = folder / "tests" / "models"
    models.mkdir(parents=True)
    model = Path(shutil.copy(xrt.demo_model_path(), models / "digits.onnx"))
    xrt.lock(model, POLICY, models / "digits.lock")
    other = onnx.load(model)
    weights = other.graph.initializer[0]
    weights.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weights) * 2, weights.name))
    onnx.save(other, models / "other.onnx")
    (folder / "tests" / "test_digits.py").write_text(TESTS)
    return folder


def run_pytest(folder: Path, *options: str, github: bool = False) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "GITHUB_WORKSPACE": str(folder), "GITHUB_ACTIONS": "true" if github else "", "COLUMNS": "200"}
    command = [sys.executable, "-W", "error", "-m", "pytest", "-p", "no:cacheprovider", "-q", *options]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_pytest_finds_the_plugin():
    assert "xpuruntime_pytest" in {one.value for one in metadata.entry_points(group="pytest11")}


def test_marked_tests_are_held_to_their_locks(project: Path):
    done = run_pytest(project, "--junitxml=junit.xml", "--strict-markers", "-rA")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 1 passed, 1 error" in done.stdout
    assert "this never runs" not in done.stdout
    assert "cannot read the lock" in done.stdout
    assert "Fix: add @pytest.mark.xrt_lock" in done.stdout
    assert "::error" not in done.stdout
    cases = {one.get("name"): one for one in ET.parse(project / "junit.xml").iter("testcase")}
    lock = xrt.load_lock(project / "tests" / "models" / "digits.lock")
    for name, verdict in (("test_holds", "pass"), ("test_other_model", "fail")):
        found = {one.get("name"): one.get("value") for one in cases[name].iter("property")}
        assert (found["xrt.digest"], found["xrt.verdict"]) == (lock.digest, verdict)
    assert not list(cases["test_no_mark"].iter("property"))


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_annotations_name_files_and_lines(project: Path, options: tuple[str, ...]):
    done = run_pytest(project, *options, github=True)
    matches = re.findall(r"^::error file=([^,]+),line=(\d+),.*?title=([\w.]+)::", done.stdout, re.M)
    assert matches, done.stdout + done.stderr
    lock, tests = project / "tests" / "models" / "digits.lock", project / "tests" / "test_digits.py"
    places = {title: (file, (project / file).read_text().splitlines()[int(line) - 1]) for file, line, title in matches}
    file, line = places["evidence.lock.model"]
    assert (file, '"kind":"model"' in line) == (str(lock.relative_to(project)), True)
    file, line = places["xrt_lock"]
    assert (file, line) == (str(tests.relative_to(project)), '@pytest.mark.xrt_lock("models/missing.lock")')


def test_a_run_without_marks_imports_nothing(tmp_path: Path):
    (tmp_path / "test_plain.py").write_text(
        "import sys\n\n\ndef test_plain():\n"
        "    assert not {'xpuruntime', 'torch', 'numpy', 'onnxruntime'} & sys.modules.keys()\n"
    )
    done = run_pytest(tmp_path, github=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_lock_of_another_machine_is_a_failure_unless_the_mark_says_skip(project: Path):
    lock = project / "tests" / "models" / "digits.lock"
    elsewhere = project / "tests" / "models" / "elsewhere.lock"
    identity = xrt.load_lock(lock).identity
    validators = tuple(
        msgspec.structs.replace(validator, expect={**validator.expect, "name": "Another CPU"})
        if validator.kind == "device"
        else validator
        for validator in identity.validators
    )
    save_lock(xrt.Lock.of(msgspec.structs.replace(identity, validators=validators)), elsewhere)
    marks = "".join(
        f'@pytest.mark.xrt_lock("models/elsewhere.lock"{option})\ndef test_{name}(): ...\n\n\n'
        for name, option in (("fails", ""), ("skips", ', other_machine="skip"'))
    )
    tests = project / "tests" / "test_elsewhere.py"
    tests.write_text(f"import pytest\n\n\n{marks}")
    done = run_pytest(project, str(tests), "-rs")
    tests.unlink()
    assert "1 failed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "another machine" in done.stdout
