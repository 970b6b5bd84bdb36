# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The benchmark of verify keeps each result, goes on after a cut, and refuses a journal of something else."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("bench_verify")


def trial(share: float, verdict: str, code: str) -> dict[str, Any]:
    figures = {"ratio": 1.0 + share, "low": 1.0, "high": 1.2, "rounds": 11.0, "control_us": 300.0}
    return {"kind": "trial", "planted": share, "verdict": verdict, "code": code, **figures, "load": 2.0, "seconds": 3.0}


def test_results_are_kept_and_gone_on_with(bench, tmp_path):
    path, of = tmp_path / "j", {"width": 64}
    results = bench.Results(path, of, resume=False)
    claims = [["accuracy", "pass", "ok"], ["speed", "inconclusive", "noisy"]]
    results.add({"kind": "verify", "claims": claims, "failed": [], "load": 1.0, "seconds": 5.0})
    results.add(trial(0.1, "fail", "slower"))
    results.close()
    with path.open("ab") as file:
        file.write(b'{"key":"2"')  # the line that was written when the process ended
    again = bench.Results(path, of, resume=True)
    again.add(trial(0.1, "inconclusive", "undecided"))
    again.close()
    last = bench.Results(path, of, resume=True)
    assert (last.count("verify"), last.count("trial", 0.1), last.count("trial", 0.0)) == (1, 2, 0)
    summary = bench.summary(last, [0.0, 0.1])
    assert summary["sections"] == {"accuracy": {"pass": 1}, "speed": {"too noisy": 1}}
    (row,) = summary["planted"]
    assert (row["planted"], row["claims"], row["verdicts"]) == (0.1, 2, {"fail": 1, "inconclusive": 1})
    assert (summary["verifications"], summary["with_failure"], summary["load"]) == (1, 0, [1.0, 2.0, 2.0])
    assert summary["seconds"] == 11.0


def test_what_cannot_be_gone_on_with_is_refused(bench, tmp_path):
    path = tmp_path / "j"
    bench.Results(path, {"width": 64}, resume=False).close()
    with pytest.raises(SystemExit, match=r"did not end\. Fix: go on with it \(resume\), or remove it"):
        bench.Results(path, {"width": 64}, resume=False)
    with pytest.raises(SystemExit, match="of another search: width differ"):
        bench.Results(path, {"width": 65}, resume=True)
    path.write_bytes(path.read_bytes().replace(b"64", b"65"))
    with pytest.raises(SystemExit, match="changed after it was written"):
        bench.Results(path, {"width": 65}, resume=True)
