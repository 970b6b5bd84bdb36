# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Measured times of kernels: the file that keeps them, and records with the builds that they hold for."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime import _core
from xpuruntime.measuring.rounds import KernelTiming, replacing
from xpuruntime.ops import tuned_records, tuning_cache
from xpuruntime.ops.call_context import CallContext, compile_rules
from xpuruntime.ops.tuning_cache import SCHEMA, TuningCache, tuning_path
from xpuruntime.policies import TuningPolicy

if TYPE_CHECKING:
    from pathlib import Path

VALID = {"device": "NVIDIA H200 sm90", "driver": "13.0", "cublas": "cublasLt 13.0.2"}


def entry(kernel: str = "cublas.cublasLt", microseconds: float = 12.5, **validators: str) -> dict:
    return {
        "times": [{"kernel": kernel, "config": "algo=3", "microseconds": microseconds}],
        "validators": {**VALID, **validators},
    }


@pytest.fixture
def cache(tmp_path: Path) -> TuningCache:
    return TuningCache(tmp_path / "deep" / "tuning.json")


def test_round_trip_in_another_object(cache: TuningCache) -> None:
    assert cache.find("k", VALID) == (None, "")
    assert cache.put("k", entry()) == ""
    assert cache.find("k", VALID) == (entry(), "")
    other = TuningCache(cache.path)
    assert other.find("k", VALID) == (entry(), "")
    assert other.find("other", VALID) == (None, "")
    assert other.put("k", entry(microseconds=2.0)) == ""
    assert cache.find("k", VALID) == (entry(microseconds=2.0), ""), "a file that changed is read again"
    document = json.loads(cache.path.read_text())
    assert document["schema"] == SCHEMA
    assert list(document["entries"]) == ["k"]


@pytest.mark.parametrize(
    ("validators", "said"),
    [
        ({**VALID, "driver": "13.1"}, "driver was '13.0' and is '13.1'"),
        (
            {name: value for name, value in VALID.items() if name != "cublas"},
            "cublas was 'cublasLt 13.0.2' and is 'not",
        ),
        ({**VALID, "cudnn": "9.1"}, "cudnn was 'not there' and is '9.1'"),
    ],
)
def test_a_stale_entry_is_dropped_and_said(cache: TuningCache, validators: dict, said: str) -> None:
    cache.put("k", entry())
    cache.put("other", entry())
    found, note = cache.find("k", validators)
    assert found is None
    assert "stale" in note
    assert said in note
    assert cache.find("k", validators) == (None, ""), "said once"
    assert cache.find("other", VALID) == (entry(), ""), "only its own row"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"schema": "xpuruntime.tuning/1", "entries": [1]}',
        '{"schema": "xpuruntime.tuning/0", "entries": {}}',
        "\x00" * 100,
    ],
)
def test_a_damaged_file_is_said_and_replaced(cache: TuningCache, text: str) -> None:
    cache.path.parent.mkdir()
    cache.path.write_text(text)
    found, note = cache.find("k", VALID)
    assert found is None
    assert str(cache.path) in note
    note = cache.put("k", entry())
    assert "started anew" in note
    assert cache.find("k", VALID) == (entry(), "")
    assert TuningCache(cache.path).find("k", VALID) == (entry(), "")


@pytest.mark.parametrize(
    "text",
    ["nonsense", "[]", "{}", '{"schema": 3, "entries": {}}', '{"schema": "something/1", "entries": {}}', "\x08\x0a"],
)
def test_another_file_under_the_name_is_never_replaced(cache: TuningCache, text: str) -> None:
    """The name comes from an environment variable, and may be that of a model or of a user's notes by mistake."""
    cache.path.parent.mkdir(mode=0o700)
    cache.path.write_text(text)
    for note in (cache.find("k", VALID)[1], cache.put("k", entry())):
        assert "it is no tuning cache, and stays as it is" in note
        assert str(cache.path) in note
    assert cache.path.read_text() == text


def test_a_file_cut_at_any_place(cache: TuningCache) -> None:
    for key in "abc":
        cache.put(key, entry(key + ".k"))
    data = cache.path.read_bytes()
    for length in range(0, len(data) - 1, 7):
        cache.path.write_bytes(data[:length])
        reader = TuningCache(cache.path)
        found, note = reader.find("b", VALID)
        assert found is None, length
        assert "not used" in note
        assert "started anew" in reader.put("d", entry())
    cache.path.write_bytes(b"\xff\xfe" + data)
    assert "not used" in TuningCache(cache.path).find("a", VALID)[1]


@pytest.mark.parametrize(
    "damage",
    [
        {"times": [], "validators": VALID},
        {"times": [{"kernel": "a.b", "config": "", "microseconds": -1}], "validators": VALID},
        {"times": [{"kernel": "", "config": "", "microseconds": 1}], "validators": VALID},
        {"times": [{"kernel": "a.b", "config": 3, "microseconds": 1}], "validators": VALID},
        {"times": [{"kernel": "a.b", "config": "", "microseconds": 1}]},
        {"times": "fast", "validators": VALID},
        None,
        7,
    ],
)
def test_a_damaged_entry_is_dropped_alone(cache: TuningCache, damage: object) -> None:
    cache.put("good", entry())
    document = json.loads(cache.path.read_text())
    document["entries"]["bad"] = damage
    cache.path.write_text(json.dumps(document))
    found, note = cache.find("bad", VALID)
    assert found is None
    assert "damaged entry" in note
    assert cache.find("bad", VALID) == (None, "")
    assert cache.find("good", VALID) == (entry(), "")


def test_a_file_of_a_later_release_is_left_alone(cache: TuningCache) -> None:
    cache.path.parent.mkdir()
    cache.path.write_text('{"schema": "xpuruntime.tuning/2", "entries": {}, "more": 1}')
    found, note = cache.find("k", VALID)
    assert found is None
    assert "later release" in note
    assert "later release" in cache.put("k", entry())
    assert "tuning/2" in cache.path.read_text()


def test_what_is_no_entry_is_not_kept(cache: TuningCache) -> None:
    assert "not kept" in cache.put("k", {"times": [], "validators": {}})
    assert not cache.path.exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = TuningCache(tmp_path / "file" / "tuning.json")
    assert cache.find("k", VALID)[0] is None
    assert "not kept" in cache.put("k", entry())
    folder = TuningCache(tmp_path)
    assert folder.find("k", VALID)[0] is None
    assert "not used" in folder.find("k", VALID)[1]
    assert "not kept" in folder.put("k", entry())


def test_a_full_disk(cache: TuningCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.put("k", entry())

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tuning_cache.os, "fsync", full)
    assert "No space left" in cache.put("l", entry())
    monkeypatch.undo()
    assert cache.find("k", VALID) == (entry(), "")
    assert sorted(path.name for path in cache.path.parent.iterdir()) == ["tuning.json"]


def test_who_holds_the_lock_too_long(cache: TuningCache) -> None:
    cache.put("k", entry())
    waiting = TuningCache(cache.path, lock_seconds=0.05)
    with cache._locked():
        assert "another process has held" in waiting.put("l", entry())
        assert waiting.find("k", VALID) == (entry(), ""), "reading waits for nobody"
    assert waiting.put("l", entry()) == ""


def test_the_oldest_go_when_there_are_too_many(cache: TuningCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_cache, "_MAX_ENTRIES", 3)
    for key in "abcda":
        cache.put(key, entry())
    assert list(json.loads(cache.path.read_text())["entries"]) == ["c", "d", "a"]


HAMMER = """
import sys
from xpuruntime.ops.tuning_cache import TuningCache
cache, who = TuningCache(sys.argv[1], lock_seconds=60), sys.argv[2]
for i in range(60):
    entry = {"times": [{"kernel": f"{who}.k", "config": str(i), "microseconds": 1.0}], "validators": {"v": "1"}}
    note = cache.put(f"{who}-{i}", entry)
    assert note == "", note
    found, note = cache.find(f"{who}-{i}", {"v": "1"})
    assert found == entry and note == "", (found, note)
"""


def test_two_processes_at_once_lose_nothing(cache: TuningCache) -> None:
    cache.path.parent.mkdir()
    processes = [
        subprocess.Popen([sys.executable, "-c", HAMMER, str(cache.path), who], stderr=subprocess.PIPE) for who in "xy"
    ]
    for process in processes:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error.decode()
    assert len(json.loads(cache.path.read_text())["entries"]) == 120
    for who in "xy":
        for i in range(60):
            found, note = cache.find(f"{who}-{i}", {"v": "1"})
            assert note == ""
            assert found is not None
            assert found["times"][0]["config"] == str(i)


def test_a_writer_that_dies_leaves_the_lock_free(cache: TuningCache) -> None:
    cache.path.parent.mkdir()
    code = HAMMER.split("for i in")[0] + "\nimport os\nwith cache._locked():\n    os._exit(3)\n"
    assert subprocess.run([sys.executable, "-c", code, str(cache.path), "x"], check=False).returncode == 3
    assert cache.put("k", entry()) == ""


@pytest.mark.skipif(sys.platform == "win32", reason="the XDG folders are not Windows'")
def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/nowhere")
    for name in ("XDG_CACHE_HOME", "XPURUNTIME_TUNING_CACHE"):
        monkeypatch.delenv(name, raising=False)
    if sys.platform == "linux":
        assert tuning_path() == Path("/nowhere/.cache/xpuruntime/tuning.json")
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        assert tuning_path() == Path("/nowhere/.cache/xpuruntime/tuning.json")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert tuning_path() == Path("/caches/xpuruntime/tuning.json")
    monkeypatch.setenv("XPURUNTIME_TUNING_CACHE", "~/t.json")
    assert tuning_path() == Path("/nowhere/t.json")
    for off in ("off", "OFF", " off "):
        monkeypatch.setenv("XPURUNTIME_TUNING_CACHE", off)
        assert tuning_path() is None


RULE = TuningPolicy()


def replacement(verdict: str = "faster", seconds: float = 3.0) -> Any:
    ours = KernelTiming("cpu.blas", "threads=2", 5.0, 0.5, 0.48, 0.52, verdict)
    return replacing([KernelTiming("torch.mm", "", 10.0), ours], rounds=11, seconds=seconds)


def test_what_is_kept_is_recalled_as_it_was(own_tuning_cache: Path) -> None:
    found = replacement()
    assert tuned_records.keep("k", {"torch": "1"}, found) == ""
    assert tuned_records.recall("k", {"torch": "1"}, RULE) == found
    entry = json.loads(own_tuning_cache.read_text())["entries"]["k"]
    assert entry["times"][0] == {
        "kernel": "cpu.blas", "config": "threads=2", "microseconds": 5.0, "ratio": 0.5, "low": 0.48, "high": 0.52,
        "verdict": "faster",
    }  # fmt: skip
    assert entry["rounds"] == 11


@pytest.mark.usefixtures("own_tuning_cache")
def test_it_holds_for_the_same_validators_and_rule_alone() -> None:
    tuned_records.keep("k", {"torch": "1"}, replacement())
    assert tuned_records.rule_suffix(RULE) == tuned_records.rule_suffix(RULE.replace(budget=60.0)) == ""
    assert tuned_records.rule_suffix(RULE.replace(min_effect=0.05)) == ";min_effect=0.05;confidence=0.99"
    assert tuned_records.recall("k", {"torch": "1"}, RULE.replace(budget=60.0)) is not None, "it is decided"
    assert tuned_records.recall("k", {"torch": "2"}, RULE) is None


@pytest.mark.usefixtures("own_tuning_cache")
def test_what_is_undecided_holds_for_no_larger_budget() -> None:
    tuned_records.keep("k", {}, replacement("inconclusive", seconds=3.0))
    found = tuned_records.recall("k", {}, RULE)
    assert found is not None
    assert (found.undecided, found.chosen.kernel) == (True, "torch.mm")
    assert tuned_records.recall("k", {}, RULE.replace(budget=4.0)) is None


def test_what_is_cancelled_is_not_kept(own_tuning_cache: Path) -> None:
    tuned_records.keep("k", {}, replacement()._replace(cancelled=True))
    assert not own_tuning_cache.exists()


@pytest.mark.usefixtures("own_tuning_cache")
def test_the_validators_name_the_build_of_the_kernels() -> None:
    validators = tuned_records.validators("matmul", "cpu", {"torch": "1"}, ["libc.so*"])
    assert validators["core"] == tuning_cache.core_build()
    assert validators["torch"] == "1"
    assert validators["protocol"]
    assert "cpu.reference=" in validators["kernels"]
    assert any(name.startswith("libc.so") and build for name, build in validators.items())


def test_a_file_that_is_no_library_is_named_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "libx.so"
    path.write_bytes(b"12345")
    assert tuning_cache.build_of(str(path)) == "5 bytes"


def test_another_build_of_the_core_measures_its_kernels_anew(
    own_tuning_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher = _core.Dispatcher.instance()
    x, out = np.ones((24, 24), np.float32), np.empty((24, 24), np.float32)  # of the same alignment in each call

    def notes() -> tuple[str, ...]:
        dispatcher.forget_measurements()
        xrt.clear_decisions()
        policy = xrt.Policy(kernels=xrt.KernelPolicy(auto_strategy="best_performance"))
        site = _core.CallSite(compile_rules(policy))
        call_context = CallContext(site=site, allow_tf32=False, deterministic=False, policy=policy)
        _core.op_matmul(call_context, x, x, None, None, None, out, None, None, None, None)
        (decision,) = xrt.decisions()
        assert decision.source == "tuned"
        return decision.notes

    try:
        tuning_cache.use_tuning_cache()
        assert not notes()
        (entry,) = json.loads(own_tuning_cache.read_text())["entries"].values()
        assert entry["validators"]["core"] == tuning_cache.core_build()
        assert entry["times"][0]["verdict"] in ("control", "faster")
        assert not notes(), "it is replayed"
        monkeypatch.setattr(tuning_cache, "core_build", lambda: "another")
        (note,) = notes()
        assert "stale entry" in note
        assert "core was" in note
    finally:
        monkeypatch.undo()
        tuning_cache.use_tuning_cache()
        dispatcher.forget_measurements()
