# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt verify``: exit codes, output files, annotations, and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from xpuruntime.evidence.documents import schema_of
from xpuruntime.locks.verification.result import VerificationResult

Xrt = Any
CPU = "execution: {engine: onnxruntime, device: cpu}\n"
DEVIATING = "execution:\n  engine: onnxruntime\n  device: cpu\n  layout: nchw\n"


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "policy.yaml"
    path.write_text(CPU)
    return path


def test_a_policy_that_holds(xrt: Xrt, digits: str, policy: Path) -> None:
    shown = xrt("verify", digits, "-p", policy, "--only", "evidence,accuracy")
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.startswith("verified: ")
    result = xrt("verify", digits, "-p", policy, "--only", "evidence", "--json").json()
    jsonschema.Draft202012Validator(schema_of(VerificationResult, "")).validate(result)
    assert (result["verdict"], result["exit_code"]) == ("pass", 0)
    assert result["notes"][0].startswith("probe inputs were generated (seed 0)")


def test_a_policy_that_does_not(xrt: Xrt, digits: str, policy: Path) -> None:
    policy.write_text(DEVIATING)
    result = xrt("verify", digits, "-p", policy, "--only", "evidence", "--json")
    assert result.code == result.json()["exit_code"] == 1
    [claim] = [claim for claim in result.json()["claims"] if claim["verdict"] == "fail"]
    assert (claim["id"], claim["line"], claim["column"]) == ("evidence.execution.layout", 4, 3)


@pytest.mark.parametrize(("word", "code"), [(None, 4), ("fail", 1), ("warn", 0), ("pass", 0)])
def test_an_inconclusive_claim(xrt: Xrt, policy: Path, tmp_path: Path, word: str | None, code: int) -> None:
    """A model whose output is zero everywhere has nothing to compare."""
    import numpy as np
    import onnx
    from onnx import helper, numpy_helper

    shape = [1, 3]
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "zero"], ["y"], "mul")],
        "zeros",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(np.zeros(1, np.float32), "zero")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), "zeros.onnx")
    words = () if word is None else ("--inconclusive", word)
    found = xrt("verify", "zeros.onnx", "-p", policy, "--only", "evidence,accuracy", *words, "--json")
    assert found.code == code, found.out
    assert [claim["verdict"] for claim in found.json()["claims"] if claim["section"] == "accuracy"] == ["inconclusive"]


def test_outputs(xrt: Xrt, digits: str, policy: Path, tmp_path: Path) -> None:
    policy.write_text(DEVIATING)
    formats = ("json", "md", "junit", "sarif", "openmetrics", "html", "intoto")
    options = ["--html", "html.out", *(w for name in formats if name != "html" for w in ("-o", f"{name}={name}.out"))]
    assert xrt("verify", digits, "-p", "policy.yaml", "--only", "evidence", "--gitlab", *options).code == 1
    assert ET.parse(tmp_path / "junit.out").getroot().get("failures") == "1"
    place = json.loads((tmp_path / "sarif.out").read_text())["runs"][0]["results"][0]["locations"][0]
    assert place["physicalLocation"]["artifactLocation"]["uri"] == "policy.yaml"
    assert (tmp_path / "xrt-junit.xml").read_text() == (tmp_path / "junit.out").read_text()
    assert (tmp_path / "metrics.txt").read_text().endswith("# EOF\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*(f"{name}.out" for name in formats), "policy.yaml", "xrt-junit.xml", "metrics.txt"]
    )


@pytest.mark.parametrize("as_json", [False, True])
def test_github(
    xrt: Xrt, digits: str, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    policy.write_text(DEVIATING)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    more = ("--json",) if as_json else ()
    found = xrt("verify", digits, "-p", "policy.yaml", "--only", "evidence", "--github", *more)
    lines = [line for line in (found.err if as_json else found.out).splitlines() if line.startswith("::")]
    assert len(lines) == 1
    assert lines[0].startswith("::error file=policy.yaml,line=4,col=3,title=evidence.execution.layout::not in nchw")
    assert (tmp_path / "summary.md").read_text(encoding="utf-8").startswith("## 1 failed")
    if as_json:
        assert found.json()["verdict"] == "fail"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-o", "xml=a"), "'xml' is not a format"),
        (("-o", "junit.xml"), "Fix: --output junit=junit.xml"),
        (("-o", "html=a.html"), "Fix: --html a.html"),
        (("-o", "junit=nowhere/a.xml"), "the folder"),
        (("-o", "junit=a", "-o", "sarif=a"), "name the same file"),
        (("-o", "md=policy.yaml"), "would replace the policy"),
        (("--lock", "policy.yaml", "-o", "md=./policy.yaml"), "would replace the policy"),
        (("--lock", "nowhere.lock"), "nowhere.lock"),
        (("--only", "evidnce"), "did you mean 'evidence'?"),
        (("--budget", "60"), "no unit is given"),
        (("--inconclusive", "ignore"), "'ignore' is not a valid value"),
        (("--metric", "nowhere.py:f=1"), "is not a file"),
    ],
)
def test_refusals(xrt: Xrt, digits: str, policy: Path, options: tuple[str, ...], words: str) -> None:
    found = xrt("verify", digits, "-p", policy, *options)
    assert (found.code, found.out) == (2, "")
    assert words in found.err
    assert policy.read_text() == CPU


def test_an_output_that_cannot_be_written_is_told_after_the_result(xrt: Xrt, digits: str, policy: Path) -> None:
    found = xrt("verify", digits, "-p", policy, "--only", "evidence", "-o", "md=/dev/full")
    assert found.code == 2
    assert found.out.startswith("verified: ")
    assert "/dev/full" in found.err


@pytest.mark.parametrize(
    ("body", "code", "claim_code"),
    [
        ("print('{}'); return 1", 0, "ok"),
        ("import os; os._exit(0)", 1, "metric_crashed"),
        ("while True: print('{}')", 4, "metric_timeout"),
    ],
)
def test_a_metric_does_not_decide_the_exit_code(
    xrt: Xrt, digits: str, policy: Path, body: str, code: int, claim_code: str
) -> None:
    policy.with_name("metric.py").write_text(f"def top1(run):\n    {body}\n")
    options = ("--only", "accuracy", "--metric", "metric.py:top1=0.5", "--metric-timeout", "3s", "--json")
    found = xrt("verify", digits, "-p", policy, *options)
    assert found.code == found.json()["exit_code"] == code
    assert found.json()["claims"][-1]["code"] == claim_code


def test_a_lock_in_place_of_the_model(xrt: Xrt, digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model.onnx", "other.onnx"):
        shutil.copy(digits, name)
    assert xrt("lock", "model.onnx", "-d", "cpu", "-e", "onnxruntime").code == 0
    found = xrt("verify", "model.lock", "--only", "evidence", "--json")
    assert (found.code, found.json()["model"], found.json()["lock"]) == (0, "model.onnx", "model.lock")
    Path("model.onnx").unlink()
    lonely = xrt("verify", "model.lock")
    assert lonely.code == 2
    assert "'model.onnx' is not beside model.lock. Fix: xrt verify MODEL --lock model.lock" in lonely.err


def test_files_in_the_wrong_place_give_the_command_that_is_meant(
    xrt: Xrt, digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.onnx", "b.onnx"):
        shutil.copy(digits, name)
    Path("policy.yaml").write_text("execution: {device: cpu, engine: onnxruntime}\n")
    assert xrt("lock", "a.onnx", "-p", "policy.yaml").code == 0
    meant = {
        ("plan", "a.onnx", "policy.yaml"): ["xrt plan a.onnx --policy policy.yaml"],
        ("verify", "a.onnx", "--only", "evidence", "a.lock"): ["xrt verify a.onnx --only evidence --lock a.lock"],
    }
    for command in ("compare", "explain", "diff"):
        text = xrt(command, "a.onnx", "b.onnx").err
        meant[command, "a.onnx", "b.onnx"] = re.findall(r"`(xrt [^`]*)`", text)
    for slip, commands in meant.items():
        found = xrt(*slip)
        assert found.code == 2
        assert commands, slip
        for command in commands:
            assert command in found.err
            for part in re.split(r"&&|;", command):
                assert xrt(*shlex.split(part)[1:]).code == 0, part
    assert "`xrt verify --help` lists" in xrt("verify", "a.onnx", "--html").err
    for command, option, words in (
        ("explain", "--out", "No such option: --out. Fix: --html FILE for the page, or -o FILE"),
        ("serve", "--port", "No such option: --port. Fix: --http 127.0.0.1:PORT"),
    ):
        assert words in xrt(command, "a.onnx", option, "b").err
    for command, wrong, words in (
        ("run", "a.lock", "a lock of xpuruntime. Fix: name the model, and this file with --lock"),
        ("plan", "policy.yaml", "a policy of xpuruntime. Fix: name the model, and this file with --policy"),
        ("lock", "first.json", "a report of xpuruntime"),
    ):
        assert words in xrt(command, wrong).err
