# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Searches that are killed at random moments, ``XPURUNTIME_TUNE_KILLS`` times, as a rule 3: each resumes to one end.

Real engines in real processes: ``kill -9`` falls into imports, the reference, trials, races, duels and writes. A search
that ends before there were enough is followed by another one.
"""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import xpuruntime

pytest.importorskip("onnxruntime")
pytest.importorskip("openvino")

KILLS = int(os.environ.get("XPURUNTIME_TUNE_KILLS", "3"))
SEED = int(os.environ.get("XPURUNTIME_TUNE_KILLS_SEED", "0"))
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
CALL = [sys.executable, "-c", "from xpuruntime.cli import main; main()"]
SPEC = f"""
space:
  engine: [onnxruntime, openvino]
  threads: {[1] if KILLS <= 3 else ["engine", 1]}
  options: {{onnxruntime: {{}}, openvino: {{}}}}
  kernels: off
decide: {{min_effect: 2%, confidence: 0.6, rounds: [3, 5]}}
budget: {{time: 5m}}
"""
#: Lines after which a kill may come at the latest.
MOST_LINES = 4 if KILLS <= 3 else 12
#: Fields of a candidate that a decision consists of; the others only describe it.
DECIDED = ("id", "engine", "device", "changes", "code", "reason", "figure", "gain", "error", "memory", "start")

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes in /proc"),
]


class Search(NamedTuple):
    """One search: its command, journal and folder of scratch files."""

    command: list[str]
    journal: Path
    scratch: Path

    def start(self, *options: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "TMPDIR": str(self.scratch)}
        return subprocess.Popen(
            [*self.command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )

    def finish(self, *options: str) -> dict[str, Any]:
        out, err = self.start(*options).communicate(timeout=600)
        assert out.startswith("{"), err
        return json.loads(out)

    def lines(self) -> int:
        return self.journal.read_bytes().count(b"\n") if self.journal.exists() else 0

    def keys(self) -> list[str]:
        return [entry["key"] for entry in entries_in(self.journal.read_bytes())]


def search(folder: Path, number: int) -> Search:
    """Return a search on all cores, or every second time on two sets of them."""
    (folder / "tune.yaml").write_text(SPEC)
    scratch = folder / f"scratch-{number}"
    scratch.mkdir()
    several = number % 2 == 1 and len(CORES) > 1
    devices = ["--devices", f"cpu:{CORES[0]},cpu:{CORES[1]}"] if several else []
    journal = folder / f"{number}.jsonl"
    command = [
        *CALL, "tune", str(xpuruntime.demo_model_path()), "-t", str(folder / "tune.yaml"), "-i", "random", "-d", "cpu",
        "--journal", str(journal), "--json", *devices,
    ]  # fmt: skip
    return Search(command, journal, scratch)


def children(pid: int) -> list[int]:
    numbers = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                numbers.append(int(stat.parent.name))
        except OSError:  # it ended
            continue
    return numbers


def gone(pids: list[int], within: float = 10.0) -> bool:
    until = time.monotonic() + within
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def decisions(result: dict[str, Any]) -> dict[str, Any]:
    """Return what a search decided."""
    rows = [{name: candidate[name] for name in DECIDED} for candidate in result["candidates"]]
    return {name: result[name] for name in ("verdict", "reason", "winner", "gain", "policy", "stages")} | {"rows": rows}


def wait_for_a_moment(this: Search, child: subprocess.Popen[str], chance: random.Random) -> None:
    """Wait until some time after the start, or until some lines were written and a little longer; or until the end."""
    lines = 0 if chance.random() < 0.3 else chance.randint(1, MOST_LINES)
    until, known = time.monotonic() + (chance.uniform(0.0, 4.0) if not lines else 600.0), this.lines()
    while child.poll() is None and time.monotonic() < until and not (lines and this.lines() >= known + lines):
        time.sleep(0.01)
    time.sleep(chance.uniform(0.0, 0.3) if lines else 0.0)


def test_kill_9_and_resume_have_the_end_of_an_unbroken_search(tmp_path: Path) -> None:
    chance, kills, moments, number = random.Random(SEED), 0, [], 0
    while kills < KILLS:
        this, before, result = search(tmp_path, number), b"", None
        number += 1
        while result is None:
            child = this.start("--resume")
            if kills < KILLS:
                wait_for_a_moment(this, child, chance)
            if kills < KILLS and child.poll() is None:
                workers = children(child.pid)
                os.kill(child.pid, signal.SIGKILL)
                kills += 1
                child.communicate()
                assert gone(workers), "workers end with the process that started them"
                now = this.journal.read_bytes() if this.journal.exists() else b""
                assert now.startswith(before[: before.rfind(b"\n") + 1]), "whole lines stay as they were"
                before = now
                entries = entries_in(now)
                moments.append(entries[-1]["key"].split("/")[0] if entries else "no line")
            else:
                out, err = child.communicate(timeout=600)
                assert out.startswith("{"), err
                result = json.loads(out)
        keys = this.keys()
        assert len(keys) == len(set(keys)), "nothing was measured twice"
        size = this.journal.stat().st_size
        replayed = this.finish("--resume")
        assert this.journal.stat().st_size == size, "nothing was measured again"
        assert decisions(replayed) == decisions(result), "measurements lead to the same decisions, broken off or not"
        trials = {entry["key"].split("/")[1]: entry["value"]["changes"] for entry in entries_of(this, "trial/")}
        assert trials == {
            candidate["id"]: candidate["changes"] for candidate in result["candidates"] if candidate["id"] in trials
        }
        assert all(candidate["reason"] for candidate in result["candidates"])
        assert not list(this.scratch.glob("xpuruntime-*")), "what killed processes left behind is removed"
    counts = ", ".join(f"{key} {count}" for key, count in collections.Counter(moments).most_common())
    print(f"{kills} kills in {number} searches; last line written before each: {counts}")


def entries_in(journal: bytes) -> list[dict[str, Any]]:
    """Return the entries of whole lines; `--resume` refuses a line that does not follow from the one before."""
    return [json.loads(line) for line in journal[: journal.rfind(b"\n") + 1].splitlines()]


def entries_of(this: Search, prefix: str) -> list[dict[str, Any]]:
    return [entry for entry in entries_in(this.journal.read_bytes()) if entry["key"].startswith(prefix)]
