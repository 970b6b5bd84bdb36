# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What `decisions` tells: sources, counts, notes, times, and how to do the same again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime import KernelPolicy, _core, ops

F32 = np.float32
A = np.ones((48, 32), F32)
B = np.ones((32, 40), F32)
BEST = KernelPolicy(auto_strategy="best_performance")


def last() -> Any:
    return xrt.decisions()[-1]


def test_one_decision_for_equal_work() -> None:
    out = np.zeros((48, 40), F32)
    for _ in range(7):
        ops.matmul(A, B, out=out)
    (decision,) = xrt.decisions()
    assert decision.count == 7
    assert decision.op == "matmul"
    assert decision.shapes == {"a": (48, 32), "b": (32, 40), "out": (48, 40)}
    assert (decision.dtype, decision.device, decision.phase) == ("fp32", "cpu", "infer")
    assert (decision.node, decision.module) == ("", "")
    assert (decision.asked, decision.asked_by, decision.source) == (("auto",), "default", "first")
    assert (decision.chosen, decision.config, decision.kernel) == ("cpu.blas", "", "cpu.blas")
    assert decision.notes == ()
    assert {candidate.id for candidate in decision.candidates} == {kernel.id for kernel in ops.kernels("matmul")}
    assert [candidate.id for candidate in decision.candidates if candidate.accepted] == ["cpu.blas"]
    assert all(candidate.reason for candidate in decision.candidates if not candidate.accepted)
    ops.matmul(A, B, phase="train")
    assert len(xrt.decisions()) == 2


def test_nothing_to_do_is_no_decision() -> None:
    ops.matmul(A[:0], B)
    assert xrt.decisions() == ()


@pytest.mark.parametrize(
    ("call", "source", "asked_by"),
    [
        (lambda: ops.matmul(A, B), "first", "default"),
        (lambda: ops.matmul(A, B, kernel="cpu"), "pinned", "kernel="),
        (lambda: ops.matmul(A, B, policy=KernelPolicy(matmul="cpu")), "pinned", "kernels.matmul"),
        (lambda: ops.matmul(A, B, policy=KernelPolicy(matmul="cublas")), "fallback", "kernels.matmul"),
        (lambda: ops.matmul(A, B, policy=KernelPolicy(matmul=["cublas", "auto"])), "first", "kernels.matmul"),
        (
            lambda: ops.matmul(A, B, policy=KernelPolicy(rules=[{"match": {"m": 48}, "use": "cpu"}])),
            "rule",
            "kernels.rules[0]",
        ),
    ],
)
def test_sources(call: Any, source: str, asked_by: str) -> None:
    call()
    assert (last().source, last().asked_by, last().chosen) == (source, asked_by, "cpu.blas")


def test_plain_values_and_text() -> None:
    ops.matmul(A, B, policy=KernelPolicy(matmul="cublas"))
    decision = last()
    document = json.loads(json.dumps(decision.to_dict()))
    assert document["chosen"] == "cpu.blas"
    assert document["shapes"]["a"] == [48, 32]
    assert document["candidates"][0].keys() == {"id", "config", "accepted", "reason", "measured_us"}
    assert str(decision) == decision.text
    for text in ("matmul fp32 [48, 32] x [32, 40], cpu", "cpu.blas", "kernels.matmul", "cublas", "note"):
        assert text in decision.text
    with pytest.raises(AttributeError):
        decision.chosen = "other"


def test_clearing() -> None:
    ops.matmul(A, B)
    xrt.clear_decisions()
    assert xrt.decisions() == ()
    ops.matmul(A, B)
    (decision,) = xrt.decisions()
    assert decision.count == 1, "it is recorded again, and counted anew"


def test_refusals_are_not_recorded() -> None:
    for _ in range(2):
        with pytest.raises(xrt.UnsupportedOperationError):
            ops.matmul(A, B, kernel="cublas")
    assert xrt.decisions() == ()


def test_replaying_what_was_decided() -> None:
    out = ops.matmul(A, B, policy=BEST)
    decision = last()
    again = ops.matmul(A, B, kernel=decision.kernel)
    np.testing.assert_array_equal(again, out)
    assert (last().chosen, last().config, last().source) == (decision.chosen, decision.config, "pinned")
    with xrt.use_policy(KernelPolicy(matmul=decision.kernel)):
        np.testing.assert_array_equal(ops.matmul(A, B), out)
    with pytest.raises(xrt.InputError, match=r"'nothing=1'"):
        ops.matmul(A, B, kernel=f"{decision.chosen}@nothing=1")


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.matmul(A, B),
        lambda: ops.attention(*(np.ones((1, 2, 16, 8), F32),) * 3),
        lambda: ops.layer_norm(A),
        lambda: ops.rms_norm_backward(A, A, np.ones(48, F32)),
        lambda: ops.conv2d(np.ones((1, 4, 8, 8), F32), np.ones((4, 4, 3, 3), F32)),
    ],
    ids=["matmul", "attention", "layer_norm", "rms_norm_backward", "conv2d"],
)
def test_the_fastest_of_what_is_measured(call: Any) -> None:
    """Where other work of the machine leaves it undecided, the first kernel stays, and the decision says so."""
    _core.Dispatcher.instance().forget_measurements()
    with xrt.use_policy(BEST):
        call()
    decision = last()
    times = {
        candidate.id: candidate.measured_us for candidate in decision.candidates if candidate.measured_us is not None
    }
    assert len(times) < 2 or decision.source == "tuned"
    assert all(time > 0 for time in times.values())
    assert "null.null" not in times, "what is not automatic is not measured"
    for candidate in decision.candidates:
        if candidate.measured_us is not None and candidate.measured_us < 0.8 * times[decision.chosen]:
            assert "which is not decided" in candidate.reason or "first two rounds" in candidate.reason, decision.text


PROCESS = """
import json
import numpy as np
import xpuruntime as xrt
def ones(*shape):  # at an address of the same alignment in each process: kernels are measured for one alignment
    memory = np.empty(4 * shape[0] * shape[1] + 256, np.uint8)
    start = -memory.ctypes.data % 256
    array = memory[start : start + 4 * shape[0] * shape[1]].view(np.float32).reshape(shape)
    array[...] = 1
    return array
a, b, out = ones(48, 32), ones(32, 40), ones(48, 40)
with xrt.use_policy(xrt.KernelPolicy(auto_strategy="best_performance")):
    xrt.ops.matmul(a, b, out=out)
print(json.dumps(xrt.decisions()[-1].to_dict()))
"""


def run(path: Path | str) -> dict[str, Any]:
    environment = {**os.environ, "XPURUNTIME_TUNING_CACHE": str(path)}
    done = subprocess.run([sys.executable, "-c", PROCESS], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def times_of(decision: dict[str, Any]) -> dict[str, float]:
    return {
        candidate["id"]: candidate["measured_us"]
        for candidate in decision["candidates"]
        if candidate["measured_us"] is not None
    }


def test_the_tuning_cache_serves_another_process(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "tuning.json"
    first = run(path)
    assert (first["source"], first["notes"]) == ("tuned", [])
    assert len(times_of(first)) > 1
    # Other times, as no measurement gives them: whoever tells them has them from the file.
    document = json.loads(path.read_text())
    (entry,) = document["entries"].values()
    for row in entry["times"]:
        row["microseconds"] = 1e6 if row["kernel"] == first["chosen"] else 7.25
    entry["times"].sort(key=lambda row: row["microseconds"])
    path.write_text(json.dumps(document))
    second = run(path)
    assert second["chosen"] != first["chosen"]
    assert times_of(second)[second["chosen"]] == 7.25
    assert (second["source"], second["notes"]) == ("tuned", [])


def test_a_stale_or_damaged_cache_is_told(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    run(path)
    document = json.loads(path.read_text())
    (entry,) = document["entries"].values()
    name = sorted(entry["validators"])[0]
    entry["validators"][name] = "another"
    path.write_text(json.dumps(document))
    stale = run(path)
    assert any("stale entry" in note and name in note for note in stale["notes"]), stale["notes"]
    assert len(times_of(stale)) > 1
    assert run(path)["notes"] == [], "it was measured anew"
    path.write_bytes(path.read_bytes()[:60] + b"nonsense")
    damaged = run(path)
    assert any("not used" in note for note in damaged["notes"])
    assert any("started anew" in note for note in damaged["notes"])
    assert run(path)["notes"] == []


def test_the_tuning_cache_can_be_turned_off(tmp_path: Path) -> None:
    for where in ("off", tmp_path / "no" / "such" / "folder" / "x.json"):
        assert run(where)["source"] == "tuned"
    (tmp_path / "file").write_text("")
    unwritable = run(tmp_path / "file" / "x.json")
    assert unwritable["source"] == "tuned"
    assert any("not kept" in note or "not used" in note for note in unwritable["notes"]), unwritable["notes"]


def test_they_are_printed_as_tables() -> None:
    assert str(xrt.decisions()).startswith("no decision")
    ops.matmul(A, B, policy=KernelPolicy(matmul=["cublas.cublas", "cpu.reference"]))
    ops.matmul(A, B)
    ops.matmul(A, B)
    text = str(xrt.decisions())
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.split())
    assert "xpuruntime kernels: 2 kinds of calls" in flat
    missing = "the backend cublas is not in this build"
    reason = missing if _core.why_not_built("cublas") else "serves cuda, and the operands are on cpu"
    assert f"cublas.cublas matmul {reason}" in flat
    assert isinstance(xrt.decisions(), tuple)
