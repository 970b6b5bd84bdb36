# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Locks as sides of a difference: what is planted is at its level with cause and pin, and nothing else is."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from locked_cases import Case, make_case, validator_of, with_entry, with_validator

import xpuruntime as xrt
from xpuruntime.errors import InputError, LockError
from xpuruntime.lockfile.canonical import save_lock
from xpuruntime.lockfile.records import CallEntry, Identity, Lock
from xpuruntime.locks.diff.diffing import compare_environments as diff
from xpuruntime.locks.diff.result import LEVELS
from xpuruntime.testing import models


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    return make_case("onnxruntime", tmp_path_factory.mktemp("lock"))


def differing(found) -> list[str]:
    return [level.name for level in found.levels if level.verdict == "differs"]


def test_a_lock_is_the_same_as_where_it_was_made(case):
    difference = diff(str(case.path), "here", case.model)
    assert tuple(level.name for level in difference.levels) == LEVELS
    assert not differing(difference)
    assert difference.exit_code == 0
    assert difference.level("numerics").verdict == "same"
    assert difference.level("time").verdict == "not compared"
    assert " us, 2" in difference.level("time").reason  # both times, with when they were measured
    assert json.loads(difference.to_json())["comparison"] is None
    assert "L4 numerics: same" in str(difference)


def test_the_order_of_the_sides_is_kept(case):
    difference = diff("here", str(case.path), case.model)
    assert (difference.before, difference.after) == ("here", str(case.path))
    assert difference.exit_code == 0


def test_another_build_of_a_library_is_a_cause_with_its_pin(case, tmp_path):
    old = case.edited(with_validator("library", lambda expect: {**expect, "build_id": "0" * 40}), tmp_path)
    difference = diff(str(old), str(case.path))
    assert differing(difference) == ["environment"]
    (row,) = difference.level("environment").rows
    assert row.subject == f"library.{validator_of(case.lock.identity, 'library').key}"
    assert row.restore.startswith("pip install onnxruntime")
    assert difference.exit_code == 0  # the environment alone is why one compares


@pytest.mark.parametrize(
    ("changes", "level", "what"),
    [
        ({"kernel": "cpu.reference"}, "kernels", "kernel"),
        ({"precision": "bf16"}, "kernels", "precision"),
        ({"layout": "nhwc"}, "kernels", "layout"),
        ({"on": "onnxruntime cuda:0 CUDAExecutionProvider"}, "placement", "placement"),
        ({"unit": "mm2+add", "sources": ("mm2", "add")}, "placement", "fusion"),
    ],
)
def test_another_unit_names_what_it_depends_on(case, tmp_path, changes, level, what):
    def edit(identity: Identity) -> Identity:
        changed = with_entry(lambda entry: entry.unit == "mm2", **changes)(identity)
        return with_validator("engine", lambda expect: {**expect, "version": "1.0"})(changed)

    difference = diff(str(case.edited(edit, tmp_path)), str(case.path))
    assert differing(difference) == ["environment", level]
    (row,) = difference.level(level).rows
    assert row.code == what
    assert "mm2" in row.nodes
    assert row.causes == ("engine.onnxruntime",)
    assert row.restore.startswith("pip install onnxruntime")
    assert difference.exit_code == 1


def test_a_unit_of_the_engine_is_caused_by_the_engine(case, tmp_path):
    path = tmp_path / "own.lock"
    lock = xrt.lock(case.model, {"execution": {"engine": "onnxruntime", "device": "cpu"}}, path).lock

    def edit(identity: Identity) -> Identity:
        changed = with_entry(lambda entry: entry.unit == "relu", layout="nhwc")(identity)
        return with_validator("engine", lambda expect: {**expect, "version": "1.0"})(changed)

    old = save_lock(Lock.of(edit(lock.identity), measured=lock.measured), tmp_path / "old.lock")
    (row,) = diff(str(old), str(path)).level("kernels").rows
    assert row.causes == ("engine.onnxruntime",)
    assert row.restore.startswith("pip install onnxruntime")


def test_a_policy_key_is_of_the_plan_and_explains_what_follows(case, tmp_path):
    path = tmp_path / "own.lock"
    xrt.lock(case.model, {"execution": {"engine": "onnxruntime", "device": "cpu"}}, path)
    difference = diff(str(case.path), str(path))
    key = difference.level("plan").rows[0]
    assert (key.subject, key.code, key.before, key.after) == ("kernels.matmul", "policy key", "cpu.blas", "nothing")
    assert key.restore == "state kernels.matmul: cpu.blas"
    assert all(row.causes == ("kernels.matmul",) for row in difference.level("placement").rows)
    assert {row.code for row in difference.level("kernels").rows} == {"unobservable", "gone"}


def test_other_bits_of_an_output_are_numerics(case, tmp_path):
    def edit(identity: Identity) -> Identity:
        (output,) = identity.outputs
        return msgspec.structs.replace(identity, outputs=(msgspec.structs.replace(output, sha256="0" * 64),))

    difference = diff(str(case.edited(edit, tmp_path)), str(case.path))
    assert differing(difference) == ["numerics"]
    assert (difference.level("numerics").rows[0].subject, difference.level("numerics").rows[0].code) == (
        "output y",
        "bits",
    )
    assert "by how much outputs differ" in difference.level("numerics").reason


@pytest.mark.parametrize(("far", "verdict"), [(1e-4, "same"), (1e-2, "differs")])
def test_outputs_that_do_not_repeat_are_compared_within_their_tolerance(case, tmp_path, far, verdict):
    from xpuruntime.lockfile.measured import Measured, OutputSample

    (output,) = case.lock.identity.outputs
    loose = msgspec.structs.replace(output, grade="tolerance", sha256="", rtol=1e-3, atol=0.0)
    identity = msgspec.structs.replace(case.lock.identity, outputs=(loose,))
    paths = [
        save_lock(
            Lock.of(identity, measured=Measured(samples=(OutputSample(name="y", at="s0", values=(1.0, value)),))),
            tmp_path / f"{value}.lock",
        )
        for value in (2.0, 2.0 * (1 + far))
    ]
    assert diff(*map(str, paths)).level("numerics").verdict == verdict
    without = save_lock(Lock.of(identity), tmp_path / "without.lock")
    assert diff(str(paths[0]), str(without)).level("numerics").verdict == "unobservable"


def test_other_shapes_make_outputs_incomparable(case, tmp_path):
    path = tmp_path / "one.lock"
    xrt.lock(case.model, case.policy, path, shapes={"x": (1, 64)})
    difference = diff(str(case.path), str(path))
    assert [row.code for row in difference.level("plan").rows] == ["shapes"]
    assert difference.level("numerics").verdict == "not compared"


def test_a_report_is_compared_as_far_as_it_tells(case, tmp_path):
    with xrt.InferenceSession(case.model, policy=case.policy) as session:
        report = session.explain({"x": np.zeros((2, 64), np.float32)}, runs=1)
    path = tmp_path / "report.json"
    path.write_text(report.to_json())
    difference = diff(str(case.path), str(path))
    assert not differing(difference), difference
    assert difference.level("numerics").verdict == "unobservable"
    assert "does not record library libscipy_openblas.so: not compared" in difference.notes[0]

    def other(expect):
        return {**expect, "build_id": "0" * 40}

    old = case.edited(with_validator("kernel_source", other), tmp_path)
    assert differing(diff(str(old), str(path))) == ["environment"]
    plain = json.loads(report.to_json())
    plain["plan"]["execution"] = {}
    path.write_text(json.dumps(plain))
    difference = diff(str(case.path), str(path))
    assert not differing(difference)
    assert f"{path} does not record" in difference.notes[0]
    assert "device cpu" in difference.notes[0]


def test_locks_of_training_are_compared_by_their_calls(tmp_path):
    def saved(kernel: str):
        call = CallEntry(op="matmul", dtype="fp32", facts={"m": 2}, kernel=kernel)
        return str(save_lock(Lock.of(Identity(subject="training", calls=(call,))), tmp_path / f"{kernel}.lock"))

    old, new = saved("cpu.blas"), saved("cpu.reference")
    difference = diff(old, new)
    assert differing(difference) == ["kernels"]
    assert difference.level("kernels").rows[0].code == "kernel"
    assert difference.level("numerics").verdict == "unobservable"
    with pytest.raises(InputError, match="a lock of training can be compared with another lock alone"):
        diff(old, "here", xrt.demo_model_path())


def test_locks_that_cannot_be_compared_are_refused(case, tmp_path):
    other = tmp_path / "other.lock"
    xrt.lock(models.save(models.conv(), tmp_path), {"execution": {"engine": "onnxruntime", "device": "cpu"}}, other)
    with pytest.raises(InputError, match="of different models and have no source node in common"):
        diff(str(case.path), str(other))
    cut = tmp_path / "cut.lock"
    cut.write_bytes(case.path.read_bytes()[:-200])
    with pytest.raises(LockError, match=r"cut\.lock"):
        diff(str(cut), str(case.path))
    with pytest.raises(InputError, match=r"leave '.*' out"):
        diff(str(case.path), str(case.path), case.model)
    with pytest.raises(InputError, match=r"runs a model\. Fix: give the model as MODEL"):
        diff(str(case.path), "here")
