# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Times and memory of batches in a lock, and what a server makes of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import xpuruntime as xrt
from xpuruntime.lockfile.canonical import load_lock, save_lock
from xpuruntime.lockfile.measured import BatchTime, SessionMemory
from xpuruntime.lockfile.records import Lock
from xpuruntime.serving.models.service import Models
from xpuruntime.serving.models.settings import ServeSettings
from xpuruntime.testing import models

CPU = {"execution": {"engine": "onnxruntime", "device": "cpu"}}


@pytest.fixture(scope="module")
def locked(digits, tmp_path_factory):
    path = tmp_path_factory.mktemp("batches") / "digits.lock"
    xrt.lock(digits, CPU, path, batches=(4, 1, 2, 2), command="xrt lock digits.onnx --batches 1,2,4")
    return path


def changed(path, folder, **changes):
    lock = load_lock(path)
    measured = msgspec.structs.replace(lock.measured, **changes)
    return save_lock(Lock.of(lock.identity, measured=measured, provenance=lock.provenance), folder / "changed.lock")


def served(digits, lock, **more):
    batching = {"max_batch_size": 4, **more.pop("batching", {})}
    settings = {"source": str(digits), "lock": str(lock), "batching": batching, **more.pop("model", {})}
    return ServeSettings.coerce({"schema": "xpuruntime.serve/1", "models": {"digits": settings}, **more})


def evidence(settings):
    with Models(settings) as service:
        assert service.ready() == (True, "")
        return service.evidence("digits", "evidence")


def test_times_and_memory_are_measured_and_no_part_of_the_identity(digits, locked, tmp_path):
    measured = load_lock(locked).measured
    assert [batch.rows for batch in measured.batches] == [1, 2, 4]
    assert all(0 < batch.median_us <= batch.longest_us and batch.runs >= 3 for batch in measured.batches)
    assert (measured.memory.device, measured.memory.rows) == ("cpu", 4)
    assert 0 < measured.memory.bytes < 1 << 30
    plain = xrt.lock(digits, CPU, tmp_path / "plain.lock").lock
    assert (plain.measured.batches, plain.measured.memory) == ((), None)
    assert plain.digest == load_lock(locked).digest


def test_a_lock_that_holds_gets_times_when_they_are_asked_for(digits, tmp_path):
    path = tmp_path / "digits.lock"
    xrt.lock(digits, CPU, path)
    assert not xrt.lock(digits, None, path).written
    assert xrt.lock(digits, None, path, batches=[2]).written
    assert [batch.rows for batch in load_lock(path).measured.batches] == [2]
    assert not xrt.lock(digits, None, path).written
    assert xrt.lock(digits, None, path, upgrade=True).written, "measured again, in the same sizes"
    assert [batch.rows for batch in load_lock(path).measured.batches] == [2]
    with pytest.raises(xrt.InputError, match="no batches are timed"):
        xrt.lock(digits, None, path, batches=[2], check=True)


@pytest.mark.parametrize("batches", [[0], [-1], [1 << 40]])
def test_what_is_no_batch_size(digits, batches):
    with pytest.raises(xrt.InputError, match=r"batches: .* is not a batch size"):
        xrt.lock(digits, CPU, batches=batches)


@pytest.mark.parametrize("batches", [[1.5], [True], ["2"]])
def test_batch_sizes_of_another_type(digits, batches):
    with pytest.raises(TypeError, match="batches is a list of whole numbers"):
        xrt.lock(digits, CPU, batches=batches)


def test_a_model_without_a_batch(tmp_path):
    path = models.save(models.mlp(batch=3), tmp_path)
    with pytest.raises(xrt.InputError, match="no input of the model begins with an open dimension"):
        xrt.lock(path, CPU, batches=[1, 2])


def test_the_command(digits, tmp_path, capsys):
    from xpuruntime.cli import main

    path = tmp_path / "digits.lock"
    options = ["lock", str(digits), "--device", "cpu", "--engine", "onnxruntime", "-o", str(path), "--batches"]
    with pytest.raises(SystemExit, match=r"^0$"):
        main([*options, "1,2"])
    assert "batches: 1 in " in capsys.readouterr().out
    assert [batch.rows for batch in load_lock(path).measured.batches] == [1, 2]
    for wrong in ("1;2", "1,", "a"):
        with pytest.raises(SystemExit, match=r"^2$"):
            main([*options, wrong])


def test_a_latency_is_chosen_for_from_the_lock(digits, locked, tmp_path):
    times = tuple(BatchTime(rows=rows, median_us=800.0 * rows, longest_us=1000.0 * rows, runs=9) for rows in (1, 2, 4))
    lock = changed(locked, tmp_path, batches=times)
    found = evidence(served(digits, lock, model={"slo": {"p99": "5ms"}}))
    slo = found["slo"]
    assert (slo["met"], slo["max_batch_size"], slo["max_queue_delay_us"]) == (True, 2, 1000)
    assert [one["longest_us"] for one in slo["curve"]] == [1000, 2000, 4000]
    assert slo["source"].startswith(f"lock {load_lock(lock).digest}, made 2")
    assert slo["source"].endswith("by xrt lock digits.onnx --batches 1,2,4")
    less = evidence(served(digits, lock, model={"slo": {"p99": "1s"}}, batching={"max_batch_size": 3}))["slo"]
    assert (less["max_batch_size"], len(less["curve"])) == (2, 2), "max_batch_size bounds the choice"
    measured = evidence(served(digits, lock, model={"slo": {"p99": "1s", "curve": "load"}}))["slo"]
    assert measured["source"] == "measured when the model was loaded"
    assert measured["curve"][-1]["longest_us"] != 4000


def test_a_lock_without_the_times_that_are_asked_for(digits, locked, tmp_path):
    lock = changed(locked, tmp_path, batches=())
    found = evidence(served(digits, lock, model={"slo": {"p99": "1s"}}))["slo"]
    assert found["source"] == "measured when the model was loaded"
    asked = {"slo": {"p99": "1s", "curve": "lock"}}
    with Models(served(digits, lock, model=asked)) as service:
        ready, reason = service.ready()
        assert not ready
        assert "slo.curve: 'lock', but the lock has no times of batches" in reason
        assert f"Fix: xrt lock {Path(digits).name} -o {Path(lock).name} --batches 1,2,4, or state curve: load" in reason
    with pytest.raises(xrt.PolicyError, match=r"models\.digits\.slo\.curve: 'lock' needs the key 'lock'"):
        ServeSettings.coerce({"schema": "xpuruntime.serve/1", "models": {"digits": {"source": str(digits), **asked}}})


def test_the_memory_of_a_model_is_that_of_its_lock(digits, locked, tmp_path):
    size = 123 << 20
    lock = changed(locked, tmp_path, memory=SessionMemory(device="cpu", bytes=size, rows=4))
    memory = evidence(served(digits, lock))["memory"]
    assert memory == {"bytes": size, "source": "lock", "device": "cpu"}
    larger = evidence(served(digits, lock, batching={"max_batch_size": 8}))["memory"]
    assert larger["source"] != "lock", "it was measured with smaller batches"
    with Models(served(digits, lock, memory={"budget": {"cpu": size - 1}})) as service:
        ready, reason = service.ready()
        assert not ready
        assert "takes 123.0 MiB on cpu, whose budget is 123.0 MiB (128974847 bytes)" in reason
    with Models(served(digits, lock, memory={"budget": {"cpu": size}})) as service:
        assert service.ready() == (True, "")
        assert service.budget.used() == {"cpu": size}
