# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Damaged and hostile xpuruntime files: policies, reports, plans, machines, manifests, tuning caches, arrays."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from fuzzing import NUMBERS, TEXTS, any_json, cases, change_json, controls, expect_ours, flip_bytes

import xpuruntime as xrt
from xpuruntime.artifacts.manifest import read_manifest
from xpuruntime.cli.session import read_feeds
from xpuruntime.engines.model import inspect_model
from xpuruntime.engines.registry import default_registry
from xpuruntime.evidence import Report, compare_reports
from xpuruntime.lockfile.canonical import lock_statement
from xpuruntime.lockfile.measured import Measured
from xpuruntime.lockfile.records import Identity, digest_of_part
from xpuruntime.locks.verification.formats import FORMATS
from xpuruntime.ops.tuning_cache import TuningCache
from xpuruntime.planning import Plan
from xpuruntime.policies import Policy
from xpuruntime.runtime.snapshot import load_machine, machine_snapshot, machine_to_json

if TYPE_CHECKING:
    import random
    from pathlib import Path

_POLICY = {
    "schema": "xpuruntime.policy/1",
    "mode": "strict",
    "execution": {
        "precision": "fp16",
        "device": "cuda:0",
        "engine": ["onnxruntime", "openvino"],
        "fallback": ["null@cpu"],
        "shapes": {"x": [1, "1..8..16", None]},
        "provider_options": {"onnxruntime": {"session.intra_op.allow_spinning": "0"}},
    },
    "kernels": {"attention": "flash_v2", "rules": [{"match": {"op": "matmul", "k": ">=64"}, "use": ["cpu.blas"]}]},
    "memory": {"limit": "1GiB"},
    "accuracy": {"rtol": 0.01},
}


def damaged(sound: bytes, rng: random.Random) -> bytes:
    """Return JSON with other values in some places, or other bytes."""
    kind = rng.randrange(10)
    if kind < 3:
        return flip_bytes(sound, rng)
    if kind == 3:
        depth = rng.choice((200, 2000, 100_000))
        text = sound.decode()
        at = text.find(":") + 1
        return (text[:at] + "[" * depth + "]" * depth + "," + text[at:]).encode()
    if kind == 4:
        return json.dumps(any_json(rng)).encode()
    return json.dumps(change_json(json.loads(sound), rng), ensure_ascii=rng.random() < 0.5).encode(
        "utf-8", "surrogatepass"
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "r.json"
    with xrt.InferenceSession(xrt.demo_model_path(), device="cpu", engine="onnxruntime") as session:
        session.explain(runs=1).save(path)
    return path


def test_policies(tmp_path: Path) -> None:
    sound = json.dumps(_POLICY).encode()
    for seed, rng in cases():
        path = tmp_path / rng.choice(("p.json", "p.yaml"))
        path.write_bytes(damaged(sound, rng))

        def use(path: Path = path) -> None:
            policy = Policy.load(path)
            assert Policy.loads(policy.dumps("yaml"), "yaml") == policy
            xrt.plan(xrt.demo_model_path(), policy=policy, device="cpu", engine="null")

        expect_ours(seed, use, Warning)
        value = any_json(rng)
        expect_ours(seed, lambda value=value: xrt.plan(xrt.demo_model_path(), policy=value), TypeError, Warning)


def test_reports(report: Path, tmp_path: Path) -> None:
    sound, path = report.read_bytes(), tmp_path / "r.json"

    def use() -> None:
        found = Report.load(path)
        for text in (str(found), found._repr_html_(), found.to_html()):
            assert not controls(text)
        found.to_json()
        str(compare_reports(path, report)), compare_reports(report, path).to_html()

    for seed, rng in cases():
        path.write_bytes(damaged(sound, rng))
        expect_ours(seed, use)


def test_plans_and_machines(tmp_path: Path) -> None:
    engines = default_registry().engines()
    machine = machine_to_json(machine_snapshot(engines)).encode()
    plan = xrt.plan(xrt.demo_model_path(), device="cpu").to_json().encode()
    path = tmp_path / "m.json"

    def use_machine() -> None:
        xrt.plan(xrt.demo_model_path(), machine=load_machine(path))

    def use_plan(data: bytes) -> None:
        found = Plan.from_json(data)
        str(found), found.to_json(), found.execution_hash

    for seed, rng in cases():
        path.write_bytes(damaged(machine, rng))
        expect_ours(seed, use_machine, Warning)
        data = damaged(plan, rng)
        expect_ours(seed, lambda data=data: use_plan(data))


def test_manifests(tmp_path: Path) -> None:
    folder = tmp_path / "m.xrt"
    xrt.compile_model(xrt.demo_model_path(), folder, device="cpu", engine="onnxruntime")
    manifest = folder / "manifest.json"
    sound = manifest.read_bytes()
    for seed, rng in cases():
        manifest.write_bytes(damaged(sound, rng))
        expect_ours(seed, lambda: read_manifest(folder))
        expect_ours(seed, lambda: xrt.plan(folder, device="cpu", engine="onnxruntime"), Warning)


def resealed(data: bytes) -> bytes:
    """Return a lock with the digests of its parts, where it has them."""
    try:
        plain = json.loads(data)
        plain["digest"] = digest_of_part(msgspec.convert(plain["identity"], Identity).ungrouped())
        plain["measured_digest"] = digest_of_part(msgspec.convert(plain["measured"], Measured))
    except (LookupError, RecursionError, TypeError, ValueError, msgspec.ValidationError):
        return data
    return json.dumps(plain).encode()


def test_locks(tmp_path: Path) -> None:
    policy = {"execution": {"engine": "onnxruntime", "device": "cpu"}, "kernels": {"matmul": "cpu.blas"}}
    model, sound = xrt.demo_model_path(), tmp_path / "sound.lock"
    xrt.lock(model, policy, sound, batches=(1, 2))
    path = tmp_path / "m.lock"

    def use() -> None:
        lock = xrt.load_lock(path)
        texts = [lock_statement(lock, str(path)), str(xrt.compare_environments(sound, path))]
        result = xrt.verify(model, lock=path, only=["evidence"])
        texts += [str(result), *(write(result) for write in FORMATS.values())]
        for text in texts:
            assert not controls(text)
        if result.verdict == "pass":
            held = xrt.load_lock(sound).identity
            assert (lock.identity.model, lock.identity.outputs) == (held.model, held.outputs)

    for seed, rng in cases():
        path.write_bytes(resealed(damaged(sound.read_bytes(), rng)))
        expect_ours(seed, use, Warning)


def test_tuning_caches(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    entry = {"times": [{"kernel": "cpu.blas", "config": "", "microseconds": 1.0}], "validators": {"v": "1"}}
    assert TuningCache(path).put("k", entry) == ""
    sound = path.read_bytes()
    for seed, rng in cases():
        path.write_bytes(damaged(sound, rng))

        def use() -> None:
            found, note = TuningCache(path).find("k", {"v": "1"})
            assert found is None or found["times"][0]["kernel"]
            assert isinstance(note, str)
            assert isinstance(TuningCache(path).put("q", entry), str)

        expect_ours(seed, use)
        garbage = any_json(rng)
        assert isinstance(TuningCache(path).put("z", garbage), str)


def test_arrays_of_the_command_line(tmp_path: Path) -> None:
    model = inspect_model(xrt.demo_model_path())
    array = np.ones((1, 1, 8, 8), np.float32)
    np.save(tmp_path / "x.npy", array)
    np.savez_compressed(tmp_path / "x.npz", image=array)
    sound = {name: (tmp_path / name).read_bytes() for name in ("x.npy", "x.npz")}

    def literal(rng: random.Random) -> str:
        return rng.choice((json.dumps(any_json(rng)), rng.choice(TEXTS), str(rng.choice(NUMBERS))))

    for seed, rng in cases():
        name = rng.choice(("x.npy", "x.npz"))
        path = tmp_path / ("bad" + name)
        path.write_bytes(flip_bytes(sound[name], rng))
        values: list[Any] = [f"image=@{path}", f"@{path}", f"image={literal(rng)}", f"{rng.choice(TEXTS)}=1"]
        for value in values:
            expect_ours(seed, lambda value=value: read_feeds(model, [value]))
        dims = [f"{rng.choice(TEXTS)}={rng.choice(TEXTS)}"]
        expect_ours(seed, lambda dims=dims: read_feeds(model, None, dims))
