# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Exports of sessions that run here: each runs without xpuruntime, and gives the bits and units of its lock."""

from __future__ import annotations

import json
import venv
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from locked_cases import make_case, with_entry
from onnx import TensorProto, helper

import xpuruntime as xrt
from xpuruntime.engines.native_export.native_config import free_place
from xpuruntime.engines.onnxruntime.native_config import OnnxRuntimeExporter
from xpuruntime.lockfile.canonical import load_lock, save_lock
from xpuruntime.lockfile.records import Identity, Lock
from xpuruntime.testing import models

TARGETS = {"onnxruntime": "ort-python", "openvino": "openvino-json", "torch": "torch"}
POLICIES: dict[str, dict[str, Any]] = {
    "onnxruntime": {"threads": 1, "provider_options": {"onnxruntime": {"session.intra_op.allow_spinning": 0}}},
    "openvino": {"threads": 1, "precision": "fp32"},
    "torch": {"threads": 1, "determinism": "run_to_run"},
}


class Exported:
    """A locked model without kernels of xpuruntime, and its export."""

    def __init__(self, engine: str, folder: Path) -> None:
        self.engine, self.target = engine, TARGETS[engine]
        self.options: dict[str, Any] = {"trust": True} if engine == "torch" else {}
        self.model = make_case("torch", folder).model if engine == "torch" else models.save(models.mlp(), folder)
        self.policy = {"mode": "strict", "execution": {"engine": engine, "device": "cpu", **POLICIES[engine]}}
        self.path = folder / "plain.lock"
        self.lock = xrt.lock(self.model, self.policy, self.path, shapes={"x": (2, 64)}, **self.options).lock
        self.folder = folder / "exported"
        self.result = self.export(self.path, self.folder, strict=True, prove=True)

    def export(self, lock: Path, folder: Path, **options: Any) -> xrt.ExportResult:
        return xrt.export_lock(lock, self.target, folder, model=self.model, **self.options, **options)

    def edited(self, identity: Identity, folder: Path) -> Path:
        return save_lock(Lock.of(identity, measured=self.lock.measured), folder / "edited.lock")


@pytest.fixture(scope="module", params=TARGETS)
def exported(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    pytest.importorskip(request.param)
    return Exported(request.param, tmp_path_factory.mktemp(request.param))


def test_it_runs_as_locked_without_xpuruntime(exported: Exported) -> None:
    result = exported.result
    assert result.proof is not None
    assert not result.proof.of("fail", "inconclusive"), result.proof.of("fail")
    passed = {one.id for one in result.proof.of("pass")}
    assert {"evidence.engine", "evidence.device"} < passed
    assert {f"accuracy.outputs.{output.name}" for output in exported.lock.identity.outputs} < passed
    assert {f"evidence.units.{entry.unit}" for entry in exported.lock.identity.entries} < passed
    assert result.exit_code == 0


def test_every_key_is_kept(exported: Exported) -> None:
    assert {key.key: key.outcome for key in exported.result.keys} == dict.fromkeys(
        exported.lock.identity.policy.stated, "kept"
    )


def test_exporting_twice_gives_the_same_files(exported: Exported, tmp_path: Path) -> None:
    again = exported.export(exported.path, tmp_path / "again")
    assert again.files == exported.result.files
    assert (tmp_path / "again" / "export.json").read_bytes() == (exported.folder / "export.json").read_bytes()


def test_another_output_fails_the_proof(exported: Exported, tmp_path: Path) -> None:
    identity = exported.lock.identity
    output = msgspec.structs.replace(identity.outputs[0], sha256="0" * 64)
    lock = exported.edited(msgspec.structs.replace(identity, outputs=(output,)), tmp_path)
    result = exported.export(lock, tmp_path / "out", prove=True)
    assert result.proof is not None
    assert [one.id for one in result.proof.of("fail")] == [f"accuracy.outputs.{output.name}"]
    assert result.exit_code == 1


def test_another_unit_fails_the_proof(exported: Exported, tmp_path: Path) -> None:
    lock = exported.edited(
        with_entry(lambda one: bool(one.sources), precision="fp16")(exported.lock.identity), tmp_path
    )
    result = exported.export(lock, tmp_path / "out", prove=True)
    assert result.proof is not None
    (failed,) = result.proof.of("fail")
    assert failed.id.startswith("evidence.units.")
    assert "fp16" in failed.reason


def test_the_script_refuses_another_version(exported: Exported, tmp_path: Path) -> None:
    identity = exported.lock.identity
    old = tuple(
        msgspec.structs.replace(validator, expect={**validator.expect, "version": "0.9.1"})
        if validator.kind == "engine"
        else validator
        for validator in identity.validators
    )
    lock = exported.edited(msgspec.structs.replace(identity, validators=old), tmp_path)
    with pytest.raises(xrt.EngineError, match=r"locked with .* 0\.9\.1"):
        exported.export(lock, tmp_path / "out", prove=True)


def test_kernels_of_xpuruntime_are_lost(tmp_path: Path) -> None:
    case = make_case("onnxruntime", tmp_path)
    with pytest.raises(xrt.UnsupportedOperationError, match=r"kernels\.matmul is lost: xpuruntime's kernels.*--strict"):
        xrt.export_lock(case.path, "ort-python", tmp_path / "out", strict=True)
    assert not (tmp_path / "out").exists()
    result = xrt.export_lock(case.path, "ort-python", tmp_path / "out", prove=True)
    assert [(one.key, one.outcome) for one in result.not_kept] == [("kernels.matmul", "lost")]
    assert "2 nodes run on kernels of xpuruntime" in result.notes[0]
    assert result.proof is not None
    failed = {one.id for one in result.proof.of("fail")}
    assert {"evidence.units.matmul fp32 mm1", "evidence.units.matmul fp32 mm2"} <= failed
    assert result.exit_code == 1


def test_a_key_that_nobody_speaks_for_is_lost(tmp_path: Path) -> None:
    model = models.save(models.mlp(), tmp_path)
    policy = {
        "mode": "strict",
        "execution": {"engine": "onnxruntime", "device": "cpu", "static_batch": 4},
        "accuracy": {"rtol": 0.01},
    }
    xrt.lock(model, policy, tmp_path / "m.lock", shapes={"x": (2, 64)})
    result = xrt.export_lock(tmp_path / "m.lock", "ort-python", tmp_path / "out", model=model)
    outcomes = {key.key: (key.outcome, key.reason) for key in result.keys}
    assert outcomes["accuracy.rtol"][0] == "lost"
    assert outcomes["execution.static_batch"] == ("lost", "batches are not padded")
    assert outcomes["mode"] == ("weakened", "not every key is kept: accuracy.rtol, execution.static_batch")


@pytest.mark.filterwarnings("ignore::xpuruntime.errors.XpuRuntimeWarning")
@pytest.mark.parametrize(("engine", "target"), [("onnxruntime", "ort-python"), ("openvino", "openvino-json")])
def test_a_grade_that_rests_on_padded_batches_is_lost(tmp_path: Path, engine: str, target: str) -> None:
    pytest.importorskip(engine)
    execution = {"engine": engine, "device": "cpu", "static_batch": 4, "determinism": "batch_invariant"}
    model = models.save(models.mlp(), tmp_path)
    xrt.lock(model, {"execution": execution}, tmp_path / "m.lock", shapes={"x": (2, 64)})
    result = xrt.export_lock(tmp_path / "m.lock", target, tmp_path / "native", model=model)
    outcomes = {key.key: (key.outcome, key.reason) for key in result.keys}
    assert outcomes["execution.determinism"] == ("lost", "it rests on execution.static_batch")


def test_a_converted_graph_is_what_is_written(tmp_path: Path) -> None:
    model = models.save(models.mlp(), tmp_path)
    policy = {"execution": {"engine": "onnxruntime", "device": "cpu", "precision": "fp16"}}
    with pytest.warns(xrt.XpuRuntimeWarning):
        xrt.lock(model, policy, tmp_path / "m.lock", shapes={"x": (2, 64)})
    result = xrt.export_lock(tmp_path / "m.lock", "ort-python", tmp_path / "out", model=model, prove=True)
    assert result.exit_code == 0
    import onnx

    proto = onnx.load(tmp_path / "out" / "model.onnx")
    assert {one.data_type for one in proto.graph.initializer} >= {onnx.TensorProto.FLOAT16}


def test_external_data_is_written_beside(tmp_path: Path) -> None:
    import onnx

    proto = models.mlp()
    path = tmp_path / "big.onnx"
    onnx.save_model(proto, str(path), save_as_external_data=True, location="big.data", size_threshold=0)
    xrt.lock(
        path, {"execution": {"engine": "onnxruntime", "device": "cpu"}}, tmp_path / "big.lock", shapes={"x": (2, 64)}
    )
    result = xrt.export_lock(tmp_path / "big.lock", "ort-python", tmp_path / "out", prove=True)
    assert "big.data" in result.files
    assert result.exit_code == 0


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    model = models.save(models.mlp(), folder)
    xrt.lock(model, {"execution": {"engine": "onnxruntime", "device": "cpu"}}, folder / "m.lock", shapes={"x": (2, 64)})
    return folder / "m.lock"


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"target": "ort-pyton"}, xrt.InputError, "did you mean 'ort-python'"),
        (
            {"target": "torch"},
            xrt.UnsupportedOperationError,
            r"torch is for torch.*Fix: .* onnxruntime's targets, kserve, oci-layout, ort-python",
        ),
        ({"target": "triton", "prove": True}, xrt.UnsupportedOperationError, "triton is not run here"),
        ({"model": "/nowhere.onnx"}, xrt.ModelError, "/nowhere.onnx"),
        ({"output": ".."}, xrt.InputError, "names no new folder"),
    ],
)
def test_what_is_refused(plain: Path, tmp_path: Path, arguments: dict[str, Any], error: type, match: str) -> None:
    given = {"target": "ort-python", "output": tmp_path / "out", **arguments}
    with pytest.raises(error, match=match):
        xrt.export_lock(plain, **given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"level": '"; import os'}, "Invalid enum value"),
        ({"threads": "1; import os"}, r"\$\.threads"),
        ({"provider": None}, "damaged lock: the settings of its plan are none of onnxruntime"),
    ],
)
def test_settings_that_are_none_of_the_engine_are_refused(
    plain: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """A lock is a file of anybody, and a script runs: nothing of it gets there that the engine's settings lack."""
    identity = load_lock(plain).identity
    settings = {**identity.plan.settings, **changes}
    edited = msgspec.structs.replace(identity, plan=msgspec.structs.replace(identity.plan, settings=settings))
    path = save_lock(Lock.of(edited), tmp_path / "edited.lock")
    with pytest.raises(xrt.LockError, match=message):
        xrt.export_lock(path, "ort-python", tmp_path / "out", model=plain.with_name("model.onnx"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("location", ["session.py", "model.onnx", "./export.json", "sub/../requirements.txt"])
def test_data_with_the_name_of_a_file_that_is_written_is_refused(tmp_path: Path, location: str) -> None:
    (tmp_path / "model.onnx").touch()
    with pytest.raises(xrt.ModelError, match=r"is a file of the model, and an export writes.*Fix: "):
        free_place(tmp_path, location, also=("session.py", "requirements.txt", "export.json"))
    assert free_place(tmp_path, "sub/session.py", also=("session.py",)) == tmp_path / "sub/session.py"


def test_inputs_that_cannot_be_generated_are_named(tmp_path: Path) -> None:
    strings = helper.make_tensor_value_info("s", TensorProto.STRING, [2])
    result = helper.make_tensor_value_info("y", TensorProto.STRING, [2])
    graph = helper.make_graph([helper.make_node("Identity", ["s"], ["y"])], "strings", [strings], [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "strings.onnx").write_bytes(model.SerializeToString())
    lock, policy = tmp_path / "strings.lock", {"execution": {"engine": "onnxruntime", "device": "cpu"}}
    xrt.lock(tmp_path / "strings.onnx", policy, lock, inputs={"s": np.array(["a", "b"], object)})
    with pytest.raises(
        xrt.InputError, match=r"out is written, and cannot be proved: .*'s' of type string\. Fix: leave"
    ):
        xrt.export_lock(lock, "ort-python", tmp_path / "out", prove=True)


def test_another_model_is_refused(plain: Path, tmp_path: Path) -> None:
    other = models.save(models.mlp(batch=3), tmp_path)
    with pytest.raises(xrt.LockError, match=r"model .*restore the file that was locked"):
        xrt.export_lock(plain, "ort-python", tmp_path / "out", model=other)


def test_a_model_that_is_not_beside_the_lock_is_asked_for(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "m.lock").write_bytes(plain.read_bytes())
    with pytest.raises(xrt.InputError, match=r"not beside .*--model"):
        xrt.export_lock(tmp_path / "m.lock", "ort-python", tmp_path / "out")


def test_only_an_export_is_replaced(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    xrt.export_lock(plain, "ort-python", out)
    with pytest.raises(xrt.InputError, match="--force"):
        xrt.export_lock(plain, "ort-python", out)
    xrt.export_lock(plain, "triton", out, overwrite=True)
    assert json.loads((out / "export.json").read_text())["target"] == "triton"
    (out / "mine.txt").write_text("x")
    with pytest.raises(xrt.InputError, match="no folder that an export wrote, alone"):
        xrt.export_lock(plain, "ort-python", out, overwrite=True)
    assert (out / "mine.txt").read_text() == "x"


def test_a_folder_that_another_process_made_meanwhile_stays(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, write = tmp_path / "out", OnnxRuntimeExporter.write

    def late(self: Any, target: str, folder: Path) -> Any:
        done = write(self, target, folder)
        out.mkdir()
        (out / "theirs").write_text("x")
        return done

    monkeypatch.setattr(OnnxRuntimeExporter, "write", late)
    with pytest.raises(xrt.InputError, match="is there already"):
        xrt.export_lock(plain, "ort-python", out)
    assert [path.name for path in out.iterdir()] == ["theirs"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # nothing half written beside it


def test_an_interpreter_without_the_engine(plain: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    with pytest.raises(xrt.EngineUnavailable, match=r"pip install -r .*requirements\.txt"):
        xrt.export_lock(plain, "ort-python", tmp_path / "out", prove=True, python=tmp_path / "venv" / "bin" / "python")
    assert (tmp_path / "out" / "requirements.txt").read_text().startswith("onnxruntime")


def test_xpuruntime_cannot_be_imported_in_a_proof(tmp_path: Path) -> None:
    from xpuruntime.engines.native_export.native_config import native_call
    from xpuruntime.engines.onnxruntime import native_worker

    script = tmp_path / "session.py"
    script.write_text("import xpuruntime\n")
    call = native_call(Path(native_worker.__file__), script, {}, None, "onnxruntime")
    with pytest.raises(xrt.EngineUnavailable, match="xpuruntime"), call:
        pass
