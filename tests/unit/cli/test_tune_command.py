# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt tune``: exit codes, files, interruption, and what it refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import xpuruntime
from xpuruntime.cli.commands.tune import _table
from xpuruntime.evidence.documents import schema_of
from xpuruntime.notebook import plain
from xpuruntime.tuning.tune_result import CandidateResult, TuneProgress, TuneResult

Xrt = Any
CALL = [sys.executable, "-c", "from xpuruntime.cli import main; main()"]
#: One candidate beside the control, and differences that are decided at once.
QUICK = """
space: {engine: [onnxruntime], threads: [engine, 1], options: {onnxruntime: {}}, kernels: off}
decide: {min_effect: 90%, confidence: 0.8, rounds: [3, 4]}
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tune.yaml"
    path.write_text(QUICK)
    return path


def test_a_tie_writes_policy_page_and_lock(xrt: Xrt, digits: str, spec: Path, tmp_path: Path) -> None:
    options = ("-t", spec, "--input", "random", "-d", "cpu", "-o", "tuned.yaml", "--html", "t.html", "--lock", "d.lock")
    found = xrt("tune", digits, *options, "--json")
    result = found.json()
    jsonschema.Draft202012Validator(schema_of(TuneResult, "")).validate(result)
    assert (found.code, result["verdict"], result["exit_code"]) == (0, "tied", 0), result["reason"]
    assert result["headline"] == "tied: nothing is better by 90%"
    assert {candidate["code"] for candidate in result["candidates"]} <= {"control", "duplicate", "not_faster", "slower"}
    assert (tmp_path / "tuned.yaml").read_text().startswith("# tied: nothing is better by 90%, latency.p50")
    assert xpuruntime.Policy.load("tuned.yaml").execution.device == "cpu"
    assert "Trade-offs" in (tmp_path / "t.html").read_text()
    assert xpuruntime.load_lock("d.lock").identity.subject == "inference"
    journal = tmp_path / "digits.tune.jsonl"
    size = journal.stat().st_size
    again = xrt("tune", digits, "-t", spec, "--input", "random", "-d", "cpu", "--resume")
    assert (again.code, journal.stat().st_size) == (0, size), "nothing was measured again"
    assert again.out.startswith("tied: ")
    other = xrt("tune", digits, "-t", spec, "--input", "random", "-d", "cpu", "--for", "throughput", "--resume")
    assert other.code == 2
    assert "is of another search: spec differ" in other.err


def test_no_candidate_keeps_the_constraints(xrt: Xrt, digits: str, spec: Path, tmp_path: Path) -> None:
    spec.write_text(QUICK + "constraints: {memory.peak: '<=1MiB'}\n")
    found = xrt("tune", digits, "-t", spec, "--input", "random", "-d", "cpu", "-o", "tuned.yaml")
    assert found.code == 1
    assert found.out.startswith("no candidate keeps the constraints")
    assert "over the limit of 1,048,576" in found.out
    assert "no policy was written" in found.err
    assert not (tmp_path / "tuned.yaml").exists()


def test_a_budget_that_is_too_short(xrt: Xrt, digits: str, spec: Path) -> None:
    found = xrt("tune", digits, "-t", spec, "--input", "random", "-d", "cpu", "--budget", "1ms")
    assert found.code == 4
    assert found.out.startswith("undecided")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "a search needs inputs like those that the model will get"),
        (("--input", "no.npz"), "inputs: there is no file or folder 'no.npz'"),
        (("--input", "random", "--for", "latency.p5"), "did you mean 'latency.p50'?"),
        (("--input", "random", "--budget", "10"), "--budget: '10' is not a duration"),
        (("--input", "random", "--tune", "bad.yaml"), "bad.yaml:1:9: unknown key 'thread' in space"),
        (("--input", "random", "--tune", "none.yaml"), "none.yaml: cannot be read: no such file"),
        (("--input", "random", "--devices", "cpu:0-1,cpu:1"), "devices: cpu:0-1 and cpu:1 share core 1"),
        (("--input", "random", "-o", "no/such/folder.yaml"), "no/such"),
        (("--input", "random", "-o", "a.yaml", "--lock", "a.yaml"), "name the same file"),
    ],
)
def test_what_is_wrong_is_said(xrt: Xrt, digits: str, spec: Path, options: tuple[str, ...], message: str) -> None:
    (spec.parent / "bad.yaml").write_text("space: {thread: [1]}\n")
    found = xrt("tune", digits, "-d", "cpu", *options)
    assert found.code == 2, found
    assert message in found.err


def test_a_device_that_is_not_there(xrt: Xrt, digits: str, spec: Path) -> None:
    found = xrt("tune", digits, "-d", "cpu", "--input", "random", "--devices", "cuda:99")
    assert found.code == 1, "as for any device that no engine here has"
    assert "devices: cuda:99 was not found" in found.err


def test_a_cluster_needs_ray(xrt: Xrt, digits: str, spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    found = xrt("tune", digits, "-d", "cpu", "--input", "random", "--ray", "auto")
    assert found.code == 3
    assert "Ray is not installed. Fix: `pip install" in found.err


def children_of(pid: int) -> list[int]:
    results, todo = [], [pid]
    while todo:
        for task in Path("/proc", str(todo.pop()), "task").glob("*/children"):
            todo += (more := list(map(int, task.read_text().split())))
            results += more
    return results


def has_ended(pid: int) -> bool:
    try:
        return "State:\tZ" in Path("/proc", str(pid), "status").read_text()
    except OSError:
        return True


@pytest.mark.parametrize(
    ("name", "key", "code"),
    [
        ("SIGINT", "trial/c0", 130),
        ("SIGINT", "race/", 130),
        ("SIGTERM", "request", -signal.SIGTERM),
        ("SIGTERM", "race/", -signal.SIGTERM),
        ("SIGHUP", "trial/c0", -signal.SIGHUP),
    ],
)
def test_a_search_that_did_not_end_is_not_thrown_away(
    xrt: Xrt, digits: str, spec: Path, tmp_path: Path, name: str, key: str, code: int
) -> None:
    (scratch := tmp_path / "scratch").mkdir()
    child = subprocess.Popen(
        [*CALL, "tune", digits, "-t", spec, "--input", "random", "-d", "cpu", "-o", "tuned.yaml"],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(scratch)},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup has it ignored, also below
    )  # fmt: skip
    journal = tmp_path / "digits.tune.jsonl"
    until = time.monotonic() + 120
    while not (journal.exists() and key.encode() in journal.read_bytes()) and time.monotonic() < until:
        time.sleep(0.01)
    children = children_of(child.pid)
    child.send_signal(getattr(signal, name))
    out, err = child.communicate(timeout=120)
    assert child.returncode == code, err
    assert (out, err) == ("", "note: what was measured is in digits.tune.jsonl; go on with --resume\n")
    until = time.monotonic() + 60
    while not all(map(has_ended, children)) and time.monotonic() < until:
        time.sleep(0.01)
    assert [child for child in children if not has_ended(child)] == []
    assert (list(scratch.glob("xpuruntime-*")), (tmp_path / "tuned.yaml").exists()) == ([], False)
    refused = xrt("tune", digits, "-t", spec, "--input", "random", "-d", "cpu")
    assert refused.code == 2
    assert "is of a search that did not end. Fix: go on with it (resume), or remove it" in refused.err
    before = journal.read_bytes()
    assert xrt("tune", digits, "-t", spec, "--input", "random", "-d", "cpu", "--budget", "1ms", "--resume").code == 4
    assert journal.read_bytes().startswith(before[: before.rfind(b"\n") + 1])


def test_what_can_be_written_is_written(xrt: Xrt, digits: str, spec: Path, tmp_path: Path) -> None:
    options = ("-t", spec, "--input", "random", "-d", "cpu", "-o", "/dev/full", "--lock", "a.lock", "--html", "a.html")
    found = xrt("tune", digits, *options)
    assert (found.code, found.out[:6]) == (2, "tied: ")
    assert "cannot write the policy to '/dev/full': No space left on device" in found.err
    assert xpuruntime.load_lock("a.lock").identity.subject == "inference"
    assert (tmp_path / "a.html").exists()


def test_a_lock_of_another_policy_is_replaced(xrt: Xrt, digits: str, spec: Path) -> None:
    (spec.parent / "other.yaml").write_text("execution: {engine: onnxruntime, device: cpu, threads: 2}")
    assert xrt("lock", digits, "-p", "other.yaml", "-o", "d.lock").code == 0
    before = xpuruntime.load_lock("d.lock").digest
    found = xrt("tune", digits, "-t", spec, "--input", "random", "-d", "cpu", "--lock", "d.lock")
    assert found.code == 0, found.err
    assert f"d.lock has the lock {xpuruntime.load_lock('d.lock').digest}" in found.err
    assert xpuruntime.load_lock("d.lock").digest != before


def test_a_journal_to_resume_that_is_not_there(xrt: Xrt, digits: str, spec: Path) -> None:
    options = ("-t", spec, "--input", "random", "-d", "cpu", "--budget", "1ms", "--journal", "new.jsonl", "--resume")
    begun = xrt("tune", digits, *options)
    assert (begun.code, begun.err) == (4, "note: there is no journal new.jsonl to resume: the search begins\n")
    assert xrt("tune", digits, *options).err == ""


def test_the_live_table_has_what_is_left_of_the_budget() -> None:
    facts = {"engine": "a", "device": "cpu", "reason": "-"}
    rows = (
        CandidateResult(id="c0", changes={}, code="control", figure=1e-3, **facts),
        CandidateResult(id="c1", changes={"execution.threads": 1}, code="slower", figure=2e-3, **facts),
    )
    shown = plain(_table(TuneProgress("race", 30.0, 600.0, rows, ("c0",), 4, 61)), 100)
    assert "race, round 5 of at most 61: 2 candidates, 1 out; 570 s of the budget left" in shown
    assert "measured now" in shown
