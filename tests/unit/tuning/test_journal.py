# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The journal of a search: resumed after a kill at any time, and refused where it is not what was written."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from simulated_executor import SimulatedExecutor, run

from xpuruntime.engines.base import Tunable
from xpuruntime.errors import InputError
from xpuruntime.files.journal import Journal
from xpuruntime.tuning.space import Space
from xpuruntime.tuning.spec.tune_spec import TuneSpec

HERE = Path(__file__).parent
REQUEST = {"model": "m"}
SPACE = Space("cpu", {"a": (Tunable(key="execution.threads", values=(None, 1, 2)),)}, ())


def seconds(changes):
    return 1e-3 / (1.3 if changes.get("execution.threads") == 2 else 1.0)


def finished(path: Path | None = None):
    with Journal(path, "tune_journal/2", REQUEST) as journal:
        return run(SimulatedExecutor(seconds), SPACE, journal=journal)


def test_values_are_recalled(tmp_path):
    with Journal(tmp_path / "j", "tune_journal/2", REQUEST) as journal:
        assert journal.record("k", {"x": (1, 2.5)}, 1.25) == {"x": [1, 2.5]}
    with Journal(tmp_path / "j", "tune_journal/2", REQUEST, resume=True) as journal:
        assert journal.recall("k") == {"x": [1, 2.5]}
        assert (journal.elapsed, journal.resumed) == (1.25, 1)


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    path = tmp_path / "j"
    with Journal(path, "tune_journal/2", REQUEST) as journal:
        journal.record("k", 1, 1.0)
        journal.record("l", 2, 2.0)
    data = path.read_bytes()
    for cut in range(1, 60, 7):
        path.write_bytes(data[:-cut])
        with Journal(path, "tune_journal/2", REQUEST, resume=True) as journal:
            assert journal.has("k")
            assert not journal.has("l")
            journal.record("l", 3, 3.0)
        with Journal(path, "tune_journal/2", REQUEST, resume=True) as journal:
            assert journal.recall("l") == 3


@pytest.mark.parametrize(("old", "new"), [(b'"value":1', b'"value":9'), (b'"elapsed":1.0', b'"elapsed":0.5')])
def test_an_edited_line_is_refused(tmp_path, old, new):
    path = tmp_path / "j"
    with Journal(path, "tune_journal/2", REQUEST) as journal:
        journal.record("k", 1, 1.0)
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))
    with pytest.raises(InputError, match=r"j:2: this line was changed"):
        Journal(path, "tune_journal/2", REQUEST, resume=True)
    assert path.read_bytes() == data.replace(old, new), "it is left as it is"


def test_a_removed_line_is_refused(tmp_path):
    path = tmp_path / "j"
    with Journal(path, "tune_journal/2", REQUEST) as journal:
        journal.record("k", 1, 1.0)
        journal.record("l", 1, 1.0)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])
    with pytest.raises(InputError, match="one before it was removed"):
        Journal(path, "tune_journal/2", REQUEST, resume=True)


def test_a_journal_of_another_search_is_refused(tmp_path):
    with Journal(tmp_path / "j", "tune_journal/2", REQUEST) as journal:
        journal.record("k", 1, 1.0)
    with pytest.raises(InputError, match=r"another search: model differ"):
        Journal(tmp_path / "j", "tune_journal/2", {"model": "n"}, resume=True)


def test_one_that_did_not_end_is_not_replaced(tmp_path):
    with Journal(tmp_path / "j", "tune_journal/2", REQUEST):
        pass
    with pytest.raises(InputError, match="did not end"):
        Journal(tmp_path / "j", "tune_journal/2", REQUEST)
    with Journal(tmp_path / "j", "tune_journal/2", REQUEST, resume=True) as journal:
        journal.finish(1.0)
    with Journal(tmp_path / "j", "tune_journal/2", {"model": "n"}) as journal:
        assert journal.resumed == 0


def test_other_files_are_refused(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"\x08\x07 not a journal")
    with pytest.raises(InputError, match="not the journal of a search"):
        Journal(tmp_path / "model.onnx", "tune_journal/2", REQUEST)
    with pytest.raises(InputError, match="cannot use the journal"):
        Journal(tmp_path, "tune_journal/2", REQUEST)
    with pytest.raises(InputError, match="none is named"):
        Journal(None, "tune_journal/2", REQUEST, resume=True)


def test_two_processes_do_not_share_one(tmp_path):
    with Journal(tmp_path / "j", "tune_journal/2", REQUEST), pytest.raises(InputError, match="another process writes"):
        Journal(tmp_path / "j", "tune_journal/2", REQUEST, resume=True)


def test_a_full_disk_is_an_error_with_the_reason():
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with pytest.raises(InputError, match="not a regular file"):
        Journal("/dev/full", "tune_journal/2", REQUEST)


def test_a_resumed_search_measures_nothing_again(tmp_path):
    whole = finished(tmp_path / "j")
    lines = (tmp_path / "j").read_bytes().splitlines(keepends=True)
    for kept in (1, 3, 9, len(lines) // 2, len(lines) - 2):
        path = tmp_path / f"cut-{kept}"
        path.write_bytes(b"".join(lines[:kept]))
        executor = SimulatedExecutor(seconds, seed=99)
        with Journal(path, "tune_journal/2", REQUEST, resume=True) as journal:
            found = run(executor, SPACE, journal=journal)
        assert found.verdict == whole.verdict == "winner"
        assert found.winner == whole.winner
        recorded = sum(line.startswith(b'{"key":"trial/') for line in lines[:kept])
        assert sum(one.startswith("trial") for one in executor.measured) == 3 - recorded


def test_what_the_budget_cut_off_is_measured_with_a_larger_one(tmp_path):
    path, slow = tmp_path / "j", 40.0

    def search(budget: str, *, resume: bool):
        executor = SimulatedExecutor(seconds, opens=lambda changes: slow if len(changes) > 2 else 1.0)
        with Journal(path, "tune_journal/2", REQUEST, resume=resume) as journal:
            found = run(executor, SPACE, TuneSpec.loads(f"budget: {{time: {budget}}}"), journal)
            journal.finish(journal.elapsed + executor.now)
        return found, executor

    first, executor = search("60s", resume=False)
    assert executor.now <= 60
    cut = [candidate for candidate in first.candidates if candidate.code == "not_tried"]
    assert cut
    assert {one.reason for one in cut} == {"the budget of time was used up"}
    again, idle = search("60s", resume=True)
    assert (again.verdict, again.candidates, idle.measured) == (first.verdict, first.candidates, [])
    more, executor = search("40m", resume=True)
    assert more.verdict == "winner"
    assert f"trial {cut[0].id}" in executor.measured
    assert "trial c0" not in executor.measured, "what was measured is not measured again"


CHILD = """
import sys, time
sys.path.insert(0, {here!r})
from simulated_executor import SimulatedExecutor, run
from test_journal import REQUEST, SPACE, seconds
from xpuruntime.files.journal import Journal

class Slow(SimulatedExecutor):
    def trial(self, candidate):
        time.sleep(0.02)
        return super().trial(candidate)
    def turn(self, candidate):
        time.sleep(0.004)
        return super().turn(candidate)
    def measure_fresh(self, candidates):
        time.sleep(0.02)
        return super().measure_fresh(candidates)

with Journal(sys.argv[1], "tune_journal/2", REQUEST, resume=sys.argv[2] == "resume") as journal:
    print("begun", flush=True)
    found = run(Slow(seconds), SPACE, journal=journal)
    print(found.verdict, found.winner, flush=True)
"""


def test_kill_9_at_random_moments_and_resume_give_the_same_end(tmp_path):
    whole, chance = finished(), random.Random(5)
    path, script = tmp_path / "j", tmp_path / "child.py"
    script.write_text(CHILD.format(here=str(HERE)))
    size, mode = 0, "new"
    for kills in range(12):
        child = subprocess.Popen([sys.executable, str(script), str(path), mode], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n", child.communicate(timeout=60)
        mode = "resume"
        if kills < 3:
            time.sleep(chance.uniform(0.0, 0.12))
            os.kill(child.pid, signal.SIGKILL)
        rest = child.communicate(timeout=120)[0]
        assert path.stat().st_size >= size, "what was recorded stays"
        size = path.stat().st_size
        if rest:
            break
    assert rest == f"{whole.verdict} {whole.winner}\n"
