# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Calibration inputs that a policy names: compared with their digest, and a validator of a lock."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime.cli.entry import run
from xpuruntime.lockfile.canonical import load_lock, save_lock
from xpuruntime.lockfile.records import Lock
from xpuruntime.testing import models

POLICY = """\
execution: {engine: onnxruntime, device: cpu, precision: int8}
calibration:
  path: data/calibration.npz
  digest: DIGEST
  samples: 8
"""


@dataclass
class Int8:
    """A folder with a model, calibration inputs, a policy that names them, and a lock of it."""

    folder: Path
    samples: np.ndarray

    @property
    def model(self) -> Path:
        return self.folder / "mlp.onnx"

    @property
    def policy(self) -> Path:
        return self.folder / "policy.yaml"

    @property
    def lock(self) -> Path:
        return self.folder / "mlp.lock"

    def write(self, samples: np.ndarray) -> None:
        np.savez(self.folder / "data" / "calibration.npz", x=samples)

    def bits(self, **arguments: Any) -> bytes:
        with xrt.InferenceSession(self.model, **arguments) as session:
            return np.asarray(session.run({"x": self.samples[:2, 0]})["y"]).tobytes()


def digest_of(model: Path, path: Path, capfd: Any) -> str:
    capfd.readouterr()
    assert run(["policy", "calibration", str(model), str(path)]) == 0
    text = capfd.readouterr().out
    return text.partition("digest: ")[2].split()[0].strip("'\"")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8")
    models.save(models.mlp(), folder, "mlp.onnx")
    (folder / "data").mkdir()
    case = Int8(folder, np.random.default_rng(0).standard_normal((8, 1, 64)).astype(np.float32))
    case.write(case.samples)
    from xpuruntime.engines.quantization import Calibration
    from xpuruntime.engines.registry import read_model

    digest = Calibration(folder / "data" / "calibration.npz", read_model(case.model)).digest
    case.policy.write_text(POLICY.replace("DIGEST", f"sha256:{digest}"))
    xrt.lock(case.model, case.policy, case.lock, shapes={"x": (2, 64)})
    return folder


@pytest.fixture
def case(made: Path, tmp_path: Path) -> Int8:
    folder = tmp_path / "copy"
    shutil.copytree(made, folder)
    return Int8(folder, np.random.default_rng(0).standard_normal((8, 1, 64)).astype(np.float32))


def test_a_policy_alone_gives_the_session(case: Int8, monkeypatch: pytest.MonkeyPatch) -> None:
    given = case.bits(
        policy={"execution": {"engine": "onnxruntime", "device": "cpu", "precision": "int8"}},
        calibration=case.folder / "data" / "calibration.npz",
    )
    assert case.bits(policy=case.policy) == given
    monkeypatch.chdir(case.folder / "data")  # the path is that of the policy file
    assert case.bits(policy="../policy.yaml") == given
    report = xrt.InferenceSession(case.model, policy=case.policy).explain(runs=1)
    seen = {observation.key: observation.status for observation in report.observations}
    assert (seen["calibration.digest"], seen["calibration.samples"]) == ("honoured", "honoured")


def test_the_command_prints_the_section(
    case: Int8, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = case.folder / "data" / "calibration.npz"
    stated = xrt.Policy.load(case.policy).calibration
    assert stated is not None
    assert digest_of(case.model, path, capfd) == stated.digest
    monkeypatch.chdir(case.folder / "data")
    assert run(["policy", "calibration", str(case.model), "calibration.npz", "--policy", "../policy.yaml"]) == 0
    section = capfd.readouterr().out
    assert xrt.Policy.loads(section).calibration == xrt.CalibrationPolicy(
        path="data/calibration.npz", digest=stated.digest, samples=8
    )


def test_a_saved_policy_finds_the_inputs(case: Int8, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(case.folder)
    (tmp_path / "elsewhere").mkdir()
    saved = tmp_path / "elsewhere" / "saved.yaml"
    xrt.Policy.load("policy.yaml").save(saved)
    monkeypatch.chdir("/")
    assert case.bits(policy=saved) == case.bits(policy=case.policy)


def changed(case: Int8) -> None:
    other = case.samples.copy()
    other[3, 0, 5] += 1
    case.write(other)


def reordered(case: Int8) -> None:
    case.write(case.samples[::-1])


def shortened(case: Int8) -> None:
    case.write(case.samples[:7])


def gone(case: Int8) -> None:
    (case.folder / "data" / "calibration.npz").unlink()


PLANTED = [
    (
        changed, r"calibration\.digest: .*sha256:[0-9a-f]{64}, and the policy states sha256:", "content",
        "restore the samples",
    ),
    (reordered, r"calibration\.digest: .*xrt policy calibration", "ordered", "restore the order"),
    (shortened, r"calibration\.samples: .*has 7 samples .*states 8", "samples", "restore the samples"),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "message", "differs", "restore"), PLANTED)
def test_planted_drift(case: Int8, plant: Any, message: str, differs: str, restore: str) -> None:
    plant(case)
    with pytest.raises(xrt.PolicyError, match=message):
        xrt.InferenceSession(case.model, policy=case.policy)
    with pytest.raises(xrt.LockError) as refused:
        xrt.InferenceSession(case.model, lock=case.lock, calibration=case.folder / "data" / "calibration.npz")
    (drift,) = refused.value.drifts
    assert drift.code == "calibration"
    assert differs in drift.before
    assert restore in drift.restore
    assert ("content" in drift.before) == (plant is not reordered)


def test_inputs_that_are_gone(case: Int8, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(case.folder)
    xrt.lock("mlp.onnx", "policy.yaml", "here.lock", shapes={"x": (2, 64)})
    gone(case)
    with pytest.raises(xrt.PolicyError, match=r"calibration\.path: there is no file or folder .*--calibration"):
        xrt.InferenceSession(case.model, policy=case.policy)
    with pytest.raises(xrt.LockError, match=r"does not hold: calibration: .*--calibration PATH"):
        xrt.InferenceSession(case.model, lock="here.lock")


def test_inputs_that_are_given_must_have_the_digest(case: Int8) -> None:
    given = [{"x": sample} for sample in case.samples]
    assert case.bits(policy=case.policy, calibration=given) == case.bits(policy=case.policy)
    with pytest.raises(xrt.PolicyError, match=r"calibration\.digest: a list of 8"):
        xrt.InferenceSession(case.model, policy=case.policy, calibration=given[::-1])


def test_a_lock_reproduces_the_session(case: Int8, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(case.folder)
    lock = load_lock("mlp.lock")
    expect = next(validator.expect for validator in lock.identity.validators if validator.kind == "calibration")
    assert set(expect) == {"samples", "ordered", "content"}
    made = xrt.lock("mlp.onnx", "policy.yaml", "again.lock", shapes={"x": (2, 64)}).lock
    identity = lock.identity
    assert identity.policy is not None
    assert made.identity.policy is not None
    assert made.identity.policy.document["calibration"]["path"] == "data/calibration.npz"
    assert made.identity.policy.stated == identity.policy.stated
    assert made.identity.policy.sha256 == identity.policy.sha256  # wherever the files are
    assert case.bits(lock="again.lock") == case.bits(policy="policy.yaml")
    assert case.bits(lock="again.lock", frozen=True) == case.bits(policy="policy.yaml")


def test_every_command_honours_it(case: Int8, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.chdir(case.folder)
    xrt.lock("mlp.onnx", "policy.yaml", "here.lock", shapes={"x": (2, 64)})
    for command in (
        ["run", "mlp.onnx", "--policy", "policy.yaml"],
        ["run", "mlp.onnx", "--lock", "here.lock"],
        ["lock", "mlp.onnx", "--policy", "policy.yaml", "-o", "here.lock", "--check", "--shapes", "x=2x64"],
        ["verify", "mlp.onnx", "--policy", "policy.yaml", "--only", "evidence"],
        ["compile", "mlp.onnx", "--policy", "policy.yaml", "-o", "mlp.xrt"],
        ["run", "mlp.xrt"],
        ["export", "here.lock", "--to", "ort-python", "-o", "native", "--prove", "--strict", "--model", "mlp.onnx"],
    ):
        assert run(command) == 0, (command, capfd.readouterr())
    changed(case)
    for command in (
        ["run", "mlp.onnx", "--policy", "policy.yaml"],
        ["verify", "mlp.onnx", "--policy", "policy.yaml"],
        ["compile", "mlp.onnx", "--policy", "policy.yaml", "-o", "other.xrt"],
        ["export", "here.lock", "--to", "ort-python", "-o", "other", "--model", "mlp.onnx"],
        ["run", "mlp.onnx", "--lock", "here.lock"],
    ):
        capfd.readouterr()
        assert run(command) in (1, 2), command
        assert "digest" in capfd.readouterr().err, command


def test_a_policy_without_int8_is_refused(case: Int8) -> None:
    policy = xrt.Policy.load(case.policy).with_overrides(precision="fp32")
    with pytest.raises(xrt.XpuRuntimeError, match="calibration_unused"):
        xrt.InferenceSession(case.model, policy=policy)


def test_a_byte_of_a_locked_artifact(case: Int8, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(case.folder)
    artifact = xrt.compile_model("mlp.onnx", "mlp.xrt", policy="policy.yaml")
    xrt.lock(artifact.folder, None, "artifact.lock", shapes={"x": (2, 64)})
    with xrt.InferenceSession("mlp.xrt", lock="artifact.lock"):
        pass
    lock = load_lock("artifact.lock")
    others = tuple(
        msgspec.structs.replace(validator, expect="0" * 64) if validator.kind == "artifact" else validator
        for validator in lock.identity.validators
    )
    save_lock(Lock.of(msgspec.structs.replace(lock.identity, validators=others), measured=lock.measured), "other.lock")
    with pytest.raises(xrt.LockError, match=r"hold for mlp.onnx: artifact: .*restore the artifact") as refused:
        xrt.InferenceSession("mlp.xrt", lock="other.lock")
    assert [drift.code for drift in refused.value.drifts] == ["artifact"]
    entry = artifact.folder / artifact.manifest.entry
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 1
    entry.write_bytes(data)
    with pytest.raises(xrt.ModelError, match=r"altered|damaged|changed"):
        xrt.InferenceSession("mlp.xrt", lock="artifact.lock")


def test_a_lock_finds_the_inputs_from_any_folder(case: Int8, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, below = case.folder / "beside.lock", case.folder / "locks" / "below.lock"
    below.parent.mkdir()
    for lock in (beside, below):
        monkeypatch.chdir(case.folder)
        xrt.lock("mlp.onnx", "policy.yaml", lock.relative_to(case.folder), shapes={"x": (2, 64)})
        monkeypatch.chdir(below.parent)
        wanted = case.bits(policy=case.policy)
        assert case.bits(lock=lock) == wanted
        assert xrt.lock(case.model, None, lock, check=True).drifts == ()
        assert not xrt.lock(case.model, None, lock, upgrade=True).written
        assert xrt.verify(case.model, lock=lock, only=["accuracy"]).exit_code == 0
