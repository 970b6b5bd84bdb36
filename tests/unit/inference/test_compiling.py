# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Models are compiled once: what is written, what is checked when it is read, on every engine that compiles."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from compile_tools import SlowEngine, edit_manifest

import xpuruntime as xrt
from xpuruntime.artifacts.manifest import open_artifact
from xpuruntime.engines import default_registry
from xpuruntime.engines.precision import probe_feeds
from xpuruntime.testing import models

if TYPE_CHECKING:
    from pathlib import Path

MODEL = xrt.demo_model_path()
#: How each engine that compiles is asked to, on a machine without an accelerator.
ASKED: dict[str, dict[str, Any]] = {
    "onnxruntime": {"device": "cpu"},
    "openvino": {"device": "cpu", "precision": "fp32"},
    "qnn": {"device": "npu", "provider_options": {"qnn": {"soc": "sm8650"}}, "precision": "fp16"},
}
#: They compile for devices that a test machine lacks; their own tests do that.
ELSEWHERE = {"tensorrt", "tensorrt-rtx"}
HERE = [engine.name for engine in default_registry() if engine.compiles and engine.name not in ELSEWHERE]


def asked_of(name: str) -> dict[str, Any]:
    facts = default_registry().get(name).probe()
    if not facts.loadable:
        pytest.skip(f"{name} is not installed: {facts.reason}")
    return {"execution": {"engine": name, "shapes": {"image": [2, 1, 8, 8]}, **ASKED[name]}}


@pytest.fixture
def artifact(tmp_path: Path) -> xrt.Artifact:
    return xrt.compile_model(MODEL, tmp_path / "digits.xrt", device="cpu", engine="onnxruntime")


def test_every_engine_that_compiles_is_tested_here_or_by_itself() -> None:
    assert set(HERE) == set(ASKED)


@pytest.mark.parametrize("name", HERE)
def test_an_artifact_gives_the_same_results_and_needs_no_model(name: str, tmp_path: Path) -> None:
    policy = asked_of(name)
    model = tmp_path / "model.onnx"
    shutil.copyfile(MODEL, model)
    with xrt.InferenceSession(model, policy=policy) as session:
        feeds = probe_feeds(session.model)
        want = session.run(feeds)
        artifact = session.save_compiled(tmp_path / "saved.xrt")
        units = {node for unit in session.explain(feeds, runs=1).units for node in unit.source_nodes}
    model.unlink()
    with xrt.InferenceSession(tmp_path / "saved.xrt") as session:
        got = session.run(feeds)
        assert session.plan.engine == name
        assert any(f"loaded from artifact {artifact.folder}" in note for note in session.plan.notes)
        report = session.explain(feeds, runs=1)
        again = session.save_compiled(tmp_path / "again.xrt")
    for key, array in want.items():
        if name == "qnn":  # a context binary rounds otherwise on the simulator than the graph it was made of
            assert np.abs(got[key] - array).max() <= 2e-3 * np.abs(array).max()
        else:
            np.testing.assert_array_equal(got[key], array)
    assert {node for unit in report.units for node in unit.source_nodes} == units
    assert again.manifest == artifact.manifest
    assert open_artifact(again.folder).manifest == artifact.manifest


@pytest.mark.parametrize("name", HERE)
def test_an_artifact_skips_the_compilation(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = asked_of(name)
    policy["execution"]["artifacts"] = {"cache": str(tmp_path / "cache")}
    engine = type(default_registry().get(name))
    made = []
    compile_ = engine.compile
    monkeypatch.setattr(engine, "compile", lambda *a: made.append(1) or compile_(*a))
    with xrt.InferenceSession(MODEL, policy=policy) as session:
        assert session.plan.notes[-1].endswith("which was compiled now")
    for _ in range(2):
        with xrt.InferenceSession(MODEL, policy=policy) as session:
            assert session.plan.notes[-1].endswith("from the cache")
    assert made == [1]


def test_the_optimisers_of_onnxruntime_do_not_run_again(artifact: xrt.Artifact) -> None:
    import onnx

    graph = onnx.load(str(artifact.entry), load_external_data=False).graph
    assert len(graph.node) < len(artifact.manifest.model.nodes)
    with xrt.InferenceSession(artifact.folder) as session:
        units = session.explain(runs=1).units
    assert "model.onnx.data" in artifact.manifest.files
    assert {u.op for u in units if u.relation == "fused"} & {node.op_type for node in graph.node}
    mapped = sorted(name for nodes in artifact.manifest.node_map.values() for name in nodes)
    assert mapped == sorted(node.name for node in artifact.manifest.model.nodes)


def test_the_manifest_says_what_it_is_tied_to(artifact: xrt.Artifact) -> None:
    manifest = artifact.manifest
    facts = default_registry().get("onnxruntime").probe()
    assert manifest.target["onnxruntime"] == facts.version
    assert manifest.target["provider"] == "CPUExecutionProvider"
    assert manifest.target["cpu features"]
    assert manifest.version == xrt.__version__
    assert manifest.model_sha256 == xrt.plan(MODEL, device="cpu").model.sha256
    plain = msgspec.json.decode((artifact.folder / "manifest.json").read_bytes())
    assert plain["schema"] == "xpuruntime.artifact/1"
    assert set(plain["files"]) == {p.name for p in artifact.folder.iterdir()} - {"manifest.json"}
    assert xrt.Policy.coerce(plain["policy"]).execution.device == "cpu"


def test_weights_beside_the_model_count_for_its_digest(tmp_path: Path) -> None:
    import onnx

    model = models.mlp()
    digests = []
    for value in (0, 1):
        folder = tmp_path / str(value)
        folder.mkdir()
        onnx.save(model, folder / "m.onnx", save_as_external_data=True, location="w", size_threshold=0)
        model = onnx.load(folder / "m.onnx")
        data = bytearray((folder / "w").read_bytes())
        data[3] ^= value
        (folder / "w").write_bytes(bytes(data))
        manifest = xrt.compile_model(folder / "m.onnx", folder / "m.xrt", device="cpu").manifest
        digests.append((manifest.model.sha256, manifest.model_sha256))
    assert digests[0][0] == digests[1][0]
    assert digests[0][1] != digests[1][1]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: (f / "manifest.json").unlink(), "it has no manifest.json"),
        (lambda f: (f / "manifest.json").write_bytes((f / "manifest.json").read_bytes()[:300]), "cut off"),
        (lambda f: (f / "manifest.json").write_bytes(b"\x00\xff"), "damaged"),
        (lambda f: (f / "manifest.json").write_bytes(b"[]"), "schema of its manifest.json is None"),
        (lambda f: edit_manifest(f, schema="xpuruntime.artifact/2"), "made by a newer release"),
        (lambda f: edit_manifest(f, schema="xpuruntime.plan/1"), "this release reads xpuruntime.artifact/1"),
        (lambda f: edit_manifest(f, colour="red"), "unknown field `colour`"),
        (lambda f: edit_manifest(f, model={**_model(f), "flavour": 1}), r"unknown key model\.flavour"),
        (lambda f: edit_manifest(f, entry="other.onnx"), "lists no file 'other.onnx'"),
        (lambda f: edit_manifest(f, files={**_files(f), "../w": {"size": 0, "sha256": ""}}), "not inside of it"),
        (lambda f: edit_manifest(f, files={**_files(f), "/w": {"size": 0, "sha256": ""}}), "not inside of it"),
        (lambda f: (f / "model.onnx").write_bytes((f / "model.onnx").read_bytes()[:-1]), "'model.onnx' is cut off"),
        (lambda f: (f / "model.onnx").write_bytes((f / "model.onnx").read_bytes() + b"x"), "'model.onnx' is too long"),
        (lambda f: _flip(f / "model.onnx.data"), r"'model\.onnx\.data' was altered"),
        (lambda f: (f / "source.onnx").unlink(), r"'source\.onnx' is missing"),
    ],
)
def test_a_damaged_artifact_is_refused(artifact: xrt.Artifact, damage: Any, reason: str) -> None:
    damage(artifact.folder)
    with pytest.raises(xrt.ModelError, match=reason) as told:
        xrt.InferenceSession(artifact.folder)
    assert str(artifact.folder) in str(told.value)
    assert "Fix: " in str(told.value)


def _model(folder: Path) -> Any:
    return msgspec.json.decode((folder / "manifest.json").read_bytes())["model"]


def _files(folder: Path) -> Any:
    return msgspec.json.decode((folder / "manifest.json").read_bytes())["files"]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(bytes(data))


def test_what_is_no_artifact_at_all(tmp_path: Path) -> None:
    with pytest.raises(xrt.ModelError, match="there is no such folder"):
        xrt.InferenceSession(tmp_path / "none.xrt")
    (tmp_path / "file.xrt").write_bytes(b"x")
    with pytest.raises(xrt.ModelError, match="it is a file, and an artifact is a folder"):
        xrt.InferenceSession(tmp_path / "file.xrt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(xrt.ModelError, match=r"folder|directory"):
        xrt.InferenceSession(tmp_path / "empty")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"onnxruntime": "1.2.3"}, "it was compiled for onnxruntime 1.2.3 and here is "),
        ({"cpu features": "sse2"}, "it was compiled for cpu features sse2 and here is "),
        ({"provider": "CUDAExecutionProvider"}, "provider CUDAExecutionProvider and here is CPUExecutionProvider"),
        ({"moon phase": "full"}, "it was compiled for moon phase full and here is nothing"),
    ],
)
def test_an_artifact_of_another_target_is_refused(artifact: xrt.Artifact, changes: Any, reason: str) -> None:
    edit_manifest(artifact.folder, target={**artifact.manifest.target, **changes})
    with pytest.raises(xrt.EngineError, match=reason) as told:
        xrt.InferenceSession(artifact.folder)
    assert "artifact_stale" in str(told.value)
    assert "xrt compile MODEL" in str(told.value)
    with pytest.raises(xrt.EngineError, match=reason):
        xrt.plan(artifact.folder)


def test_an_artifact_runs_on_its_own_engine_and_device_only(artifact: xrt.Artifact) -> None:
    with pytest.raises(xrt.EngineError, match=r"artifact_foreign: the artifact .* was compiled by onnxruntime for cpu"):
        xrt.InferenceSession(artifact.folder, engine="null")
    with pytest.raises(xrt.EngineError, match="artifact_foreign"):
        xrt.InferenceSession(artifact.folder, device="cuda:0")
    with xrt.InferenceSession(artifact.folder, engine="ort", device="cpu") as session:
        assert session.plan.candidate == "onnxruntime@cpu"


def test_what_changes_the_compiled_model_must_be_the_same(artifact: xrt.Artifact) -> None:
    with pytest.raises(
        xrt.EngineError, match=r"its policy said execution\.precision nothing and is asked for now fp32"
    ):
        xrt.InferenceSession(artifact.folder, precision="fp32")
    options = {"onnxruntime": {"graph_optimization_level": "basic"}}
    with pytest.raises(xrt.EngineError, match="graph_optimization_level nothing and is asked for now basic"):
        xrt.InferenceSession(artifact.folder, policy={"execution": {"provider_options": options}})
    # Those that say how it is run, and options of other engines, may differ.
    free = {"execution": {"threads": 1, "provider_options": {"openvino": {"NUM_STREAMS": 1}}}, "mode": "strict"}
    with xrt.InferenceSession(artifact.folder, policy=free) as session:
        assert session.plan.device == "cpu"
        assert {c.key: c.enforceability for c in session.plan.controls}["execution.threads"] == "enforced"


def test_calibration_belongs_to_the_artifact(tmp_path: Path) -> None:
    samples = [{"image": xrt.demo_images()[0][i : i + 1]} for i in range(8)]
    arguments: dict[str, Any] = {"device": "cpu", "engine": "onnxruntime", "precision": "int8"}
    artifact = xrt.compile_model(MODEL, tmp_path / "i8.xrt", calibration=samples, **arguments)
    with xrt.InferenceSession(MODEL, calibration=samples, **arguments) as session:
        want = session.run(samples[0])["logits"]
        told = [(u.op, u.relation, sorted(u.source_nodes)) for u in session.explain(samples[0], runs=1).units]
    with xrt.InferenceSession(artifact.folder) as session:
        np.testing.assert_array_equal(session.run(samples[0])["logits"], want)
        report = session.explain(samples[0], runs=1)
    assert [(u.op, u.relation, sorted(u.source_nodes)) for u in report.units] == told
    with pytest.raises(xrt.EngineError, match="quantized with other calibration inputs"):
        xrt.InferenceSession(artifact.folder, calibration=samples[:4])
    with xrt.InferenceSession(artifact.folder, calibration=samples) as session:
        assert session.plan.engine == "onnxruntime"


def test_who_cannot_compile_says_so(tmp_path: Path) -> None:
    with pytest.raises(xrt.UnsupportedOperationError, match=r"null makes no compiled artifact.*onnxruntime"):
        xrt.compile_model(MODEL, tmp_path / "m.xrt", engine="null")
    with (
        xrt.InferenceSession(MODEL, engine="null", device="cpu") as session,
        pytest.raises(xrt.UnsupportedOperationError, match="the engine null makes no compiled artifact"),
    ):
        session.save_compiled(tmp_path / "m.xrt")
    assert [p.name for p in tmp_path.iterdir()] == []
    session = xrt.InferenceSession(MODEL, device="cpu")
    session.close()
    with pytest.raises(xrt.XpuRuntimeError, match="closed"):
        session.save_compiled(tmp_path / "m.xrt")


def test_kernels_of_ours_are_not_lost_in_an_artifact(tmp_path: Path) -> None:
    model = models.save(models.mlp(batch=4), tmp_path)
    policy: Any = {"execution": {"engine": "onnxruntime", "device": "cpu"}, "kernels": {"matmul": "cpu.blas"}}
    plan = xrt.plan(model, policy=policy)
    if not plan.settings.get("rewrites"):
        pytest.skip("this build has no operators for ONNX Runtime")
    with pytest.warns(xrt.XpuRuntimeWarning, match=r"kernels\.matmul: cpu\.blas is unsupported"):
        xrt.compile_model(model, tmp_path / "m.xrt", policy=policy)
    with pytest.raises(xrt.UnsupportedOperationError, match=r"kernels\.matmul"):
        xrt.compile_model(model, tmp_path / "n.xrt", policy={**policy, "mode": "strict"})
    policy["execution"]["artifacts"] = {"cache": str(tmp_path / "cache")}
    with pytest.warns(xrt.XpuRuntimeWarning, match="whose rules are kept by the process"):
        session = xrt.InferenceSession(model, policy=policy)
    with session:
        assert session.plan.settings["rewrites"]
        control = session.plan.control("execution.artifacts.cache")
        assert control is not None
        assert control.enforceability == "unsupported"
        assert not (tmp_path / "cache").exists()
        with pytest.raises(xrt.UnsupportedOperationError, match="whose rules are kept by the process"):
            session.save_compiled(tmp_path / "s.xrt")


def test_an_engine_that_wrote_nothing_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SlowEngine(tmp_path / "log")
    compile_ = engine.compile

    def forgetful(*arguments: Any) -> Any:
        result = compile_(*arguments)
        (arguments[-1] / "model.bin").write_bytes(b"")
        return result

    monkeypatch.setattr(engine, "compile", forgetful)
    with pytest.raises(xrt.EngineError, match=r"slow did not write 'model\.bin'.*is the disk full"):
        xrt.compile_model(MODEL, tmp_path / "m.xrt", engine="slow", registry=engine.registry())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log"]
