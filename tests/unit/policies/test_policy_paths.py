# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Paths in policies, ``serve.yaml`` and locks: relative to the file that states them, whatever the current folder."""

from __future__ import annotations

from pathlib import Path

import pytest

import xpuruntime as xrt
from xpuruntime.policies import Policy
from xpuruntime.serving.models.settings import ServeSettings

DIGEST = f"sha256:{'0' * 64}"
PLACED = f"""\
execution:
  lock: locks/m.lock
  artifacts: {{cache: ./cache}}
calibration: {{path: ../samples.npz, digest: '{DIGEST}'}}
"""


def places(policy: Policy) -> list[str]:
    assert policy.calibration is not None
    locks = (policy.execution.lock, policy.execution.artifacts.cache, policy.calibration.path)
    return [Path(str(lock)).as_posix() for lock in locks]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "policies").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "policies" / "p.yaml").write_text(PLACED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_paths_of_a_file_start_at_its_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [(folder / one).as_posix() for one in ("policies/locks/m.lock", "policies/cache", "samples.npz")]
    policy = Policy.load("policies/p.yaml")
    assert places(policy) == wanted
    monkeypatch.chdir("policies")
    assert places(Policy.load("p.yaml")) == wanted
    monkeypatch.chdir("../elsewhere")
    assert places(policy) == places(Policy.load("../policies/p.yaml")) == wanted


def test_a_saved_file_names_what_is_below_it(folder: Path) -> None:
    policy = Policy.load("policies/p.yaml")
    policy.save("policies/q.yaml")
    text = Path("policies/q.yaml").read_text()
    assert "lock: locks/m.lock" in text
    assert 'cache: "./cache"' in text
    assert Policy.load("policies/q.yaml") == policy
    policy.save("elsewhere/q.json")
    assert Policy.load("elsewhere/q.json") == policy


def test_words_and_absolute_paths_stay(folder: Path) -> None:
    Path("w.yaml").write_text("execution: {lock: ~/m.lock, artifacts: {cache: default}}\n")
    policy = Policy.load("w.yaml")
    assert (policy.execution.lock, policy.execution.artifacts.cache) == ("~/m.lock", "default")
    policy.save("elsewhere/w.yaml")
    assert Policy.load("elsewhere/w.yaml") == policy


def test_a_session_finds_the_lock_beside_its_policy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime", reason="needs ONNX Runtime")
    stated = {"engine": "onnxruntime", "device": "cpu"}
    xrt.lock(xrt.demo_model_path(), {"execution": stated}, "policies/m.lock")
    Path("policies/locked.yaml").write_text("execution: {engine: onnxruntime, device: cpu, lock: m.lock}\n")
    policy = Policy.load("policies/locked.yaml")
    monkeypatch.chdir("elsewhere")
    for one in (policy, "../policies/locked.yaml"):
        with xrt.InferenceSession(xrt.demo_model_path(), policy=one) as session:
            assert session.lock is not None


def test_a_mapping_starts_at_the_current_folder_when_it_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime", reason="needs ONNX Runtime")
    stated = {"engine": "onnxruntime", "device": "cpu", "artifacts": {"cache": "./cache"}}
    with xrt.InferenceSession(xrt.demo_model_path(), policy={"execution": stated}) as session:
        monkeypatch.chdir("elsewhere")
        assert session.policy.execution.artifacts.cache == str(folder / "cache")
    spec = xrt.SessionSpec(model=xrt.demo_model_path(), policy={"execution": stated})
    monkeypatch.chdir(folder)
    with spec.open() as session:
        assert session.policy.execution.artifacts.cache == str(folder / "elsewhere" / "cache")


def test_a_lock_holds_wherever_compiled_models_are_kept(folder: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs ONNX Runtime")
    stated = "execution: {engine: onnxruntime, device: cpu, artifacts: {cache: ./cache}}\n"
    Path("p.yaml").write_text(stated)
    xrt.lock(xrt.demo_model_path(), "p.yaml", "m.lock")
    Path("elsewhere/p.yaml").write_text(stated)
    with xrt.InferenceSession(xrt.demo_model_path(), policy="elsewhere/p.yaml", lock="m.lock") as session:
        assert session.plan.policy_source == "lock"
    assert xrt.lock(xrt.demo_model_path(), "elsewhere/p.yaml", "m.lock", check=True).drifts == ()


def test_paths_of_served_models_start_at_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("policies/serve.yaml").write_text(
        "schema: xpuruntime.serve/1\naccess_log: log.jsonl\nadmin: {key_file: key}\n"
        "models:\n  m: {source: m.onnx, policy: p.yaml, lock: m.lock, shadow: {policy: q.yaml}}\n"
    )
    settings = ServeSettings.load("policies/serve.yaml")
    model = settings.models["m"]
    assert model.shadow is not None
    access_logs = (
        settings.access_log,
        settings.admin.key_file,
        model.source,
        model.policy,
        model.lock,
        model.shadow.policy,
    )
    monkeypatch.chdir("elsewhere")
    assert [Path(str(log)).parent.resolve() for log in access_logs] == [folder / "policies"] * 6
    assert ServeSettings.coerce({"schema": "xpuruntime.serve/1", "access_log": "-"}).in_folder(folder).access_log == "-"
