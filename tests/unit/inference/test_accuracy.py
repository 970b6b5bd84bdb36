# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The accuracy probe: when a session is compared with fp32 on the CPU, with what tolerance, and what it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
import pytest
from compile_tools import SlowEngine

import xpuruntime as xrt
from xpuruntime.engines.accuracy import Reference, read_reference, write_reference
from xpuruntime.engines.base import LoadedModel
from xpuruntime.engines.null import NullEngine
from xpuruntime.engines.onnxruntime import OnnxRuntimeEngine
from xpuruntime.engines.onnxruntime.options import OnnxRuntimeSettings
from xpuruntime.engines.registry import EngineRegistry
from xpuruntime.evidence.tolerances import TOLERANCES
from xpuruntime.runtime.machine import EngineFacts
from xpuruntime.runtime.snapshot import machine_snapshot
from xpuruntime.testing import models

if TYPE_CHECKING:
    from pathlib import Path

    from xpuruntime.engines.base import Judgement, Request
    from xpuruntime.runtime.machine import Machine

MODEL = xrt.demo_model_path()


class OffEngine(OnnxRuntimeEngine):
    """ONNX Runtime, with something added to every float output."""

    name: ClassVar[str] = "off"
    aliases: ClassVar[tuple[str, ...]] = ()

    def __init__(self, by: float) -> None:
        self.by = by
        self.closed = self.loaded = 0
        self.runs: list[dict[str, Any]] = []

    def probe(self) -> EngineFacts:
        return msgspec.structs.replace(super().probe(), name=self.name)

    def judge(self, request: Request, machine: Machine) -> Judgement:
        facts = {"onnxruntime": machine.engines[self.name]}
        return OnnxRuntimeEngine().judge(request, msgspec.structs.replace(machine, engines=facts))

    def load(self, request: Request, judgement: Judgement, machine: Machine) -> LoadedModel:
        loaded = super().load(request, judgement, machine)
        self.loaded += 1
        run, close = loaded.run, loaded.close

        def off(feeds: Any, stream: Any = None) -> dict[str, Any]:
            self.runs.append(dict(feeds))
            return {name: array + np.float32(self.by) for name, array in run(feeds, stream).items()}

        def closing() -> None:
            self.closed += 1
            close()

        loaded.run, loaded.close = off, closing  # type: ignore[method-assign]
        return loaded

    def registry(self) -> EngineRegistry:
        registry = EngineRegistry()
        registry.register(self)
        return registry


def opened(engine: OffEngine, model: Any = MODEL, **policy: Any) -> xrt.InferenceSession:
    execution = {"engine": "off", "device": "cpu", **policy.pop("execution", {})}
    return xrt.InferenceSession(model, policy={"execution": execution, **policy}, registry=engine.registry())


def test_without_an_accuracy_or_a_conversion_nothing_is_run() -> None:
    engine = OffEngine(1.0)
    with opened(engine) as session:
        assert engine.runs == []
        assert session.explain(runs=1).conversions == ()


def test_a_row_says_what_was_allowed_beside_what_is_stated() -> None:
    with opened(OffEngine(0.0), accuracy={"atol": 1e-3}) as session:
        rows = {row.key: row.reason for row in session.explain(runs=1).observations}
    assert "largest difference 0 (allowed 0.001 plus 0.0001 of the largest magnitude)" in rows["accuracy.atol"]


def test_any_engine_is_held_against_the_reference() -> None:
    engine = OffEngine(1.0)
    with pytest.raises(xrt.EngineError, match="does not agree with fp32 on the CPU") as told:
        opened(engine, accuracy={"rtol": 1e-3})
    assert "output 'logits' is out of tolerance: largest difference 1, against a largest magnitude of 7.09" in str(
        told.value
    )
    assert told.value.engine == "off"
    assert told.value.device == "cpu"
    assert engine.closed == engine.loaded > 0, "a session that is refused leaves nothing open"
    with opened(OffEngine(1.0), accuracy={"rtol": 1.0, "cosine": 0.0}) as session:
        report = session.explain(runs=1)
    assert any("a probe input was compared with fp32" in conversion.what for conversion in report.conversions)
    statuses = {observation.key: observation.status for observation in report.observations}
    assert statuses["accuracy.rtol"] == "honoured"


def test_a_converted_model_is_checked_unasked() -> None:
    with pytest.warns(xrt.XpuRuntimeWarning), pytest.raises(xrt.EngineError, match=r"rtol 0\.01 of the"):
        opened(OffEngine(1.0), execution={"precision": "fp16"})
    with pytest.warns(xrt.XpuRuntimeWarning):
        opened(OffEngine(0.0), execution={"precision": "fp16"}).close()


def test_limits_that_are_not_stated_are_those_of_the_precision() -> None:
    for precision, row in TOLERANCES.items():
        assert row.rtol >= TOLERANCES["fp32"].rtol, precision
        assert row.cosine <= TOLERANCES["fp32"].cosine, precision
    with pytest.raises(xrt.EngineError, match=r"rtol 0\.5 of the largest magnitude, atol 1e-05, cosine 0\.99999"):
        opened(OffEngine(5.0), accuracy={"rtol": 0.5})


class CoarseSettings(OnnxRuntimeSettings, frozen=True, kw_only=True):
    computes: str = "fp16"


class CoarseEngine(OffEngine):
    """One that computes float32 tensors in fp16, and says so."""

    def judge(self, request: Request, machine: Machine) -> Judgement:
        judgement = super().judge(request, machine)
        settings = CoarseSettings(**msgspec.structs.asdict(judgement.settings))
        return msgspec.structs.replace(judgement, settings=settings)

    def target(self, request: Request, judgement: Judgement, machine: Machine) -> dict[str, str]:
        return {"off": "1"}


def test_arithmetic_that_nobody_asked_for_is_told_of() -> None:
    with pytest.warns(
        xrt.XpuRuntimeWarning, match=r"off computes float32 in fp16.*'logits' is out of tolerance"
    ) as told:
        session = opened(CoarseEngine(1.0))
    assert len(told) == 1
    assert session.plan.warnings == (str(told[0].message).partition(": ")[2],)
    session.close()
    opened(CoarseEngine(0.02)).close()  # within the limits of fp16, and beyond those of fp32
    with pytest.raises(xrt.EngineError, match=r"rtol 0\.01 of the"):
        opened(CoarseEngine(1.0), mode="strict")
    with pytest.raises(xrt.EngineError, match=r"rtol 0\.01 of the"):
        opened(CoarseEngine(1.0), accuracy={"rtol": 0.01})


def test_arithmetic_that_nobody_asked_for_is_told_of_where_an_artifact_is_loaded(tmp_path: Path) -> None:
    engine = CoarseEngine(1.0)
    arguments: Any = {"engine": "off", "device": "cpu", "registry": engine.registry()}
    artifact = xrt.compile_model(MODEL, tmp_path / "m.xrt", **arguments)
    assert artifact.manifest.accuracy is not None
    assert not artifact.manifest.accuracy.passed
    with pytest.warns(xrt.XpuRuntimeWarning, match="off computes float32 in fp16"):
        xrt.InferenceSession(artifact.folder, registry=engine.registry()).close()


def test_where_the_reference_does_not_run_unasked_arithmetic_is_not_held_against_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise xrt.EngineError("no kernel", engine="onnxruntime", device="cpu")

    monkeypatch.setattr("xpuruntime.engines.accuracy.unconverted", refuse)
    with opened(CoarseEngine(1.0)) as session:
        (said,) = (
            conversion
            for conversion in session.explain(runs=1).conversions
            if conversion.what.startswith("not compared with")
        )
    assert "no kernel" in said.reason


def test_int8_is_checked_on_the_first_calibration_input() -> None:
    samples = [{"image": xrt.demo_images()[0][i : i + 2]} for i in range(0, 16, 2)]
    arguments: Any = {"engine": "onnxruntime", "device": "cpu", "precision": "int8"}
    with xrt.InferenceSession(MODEL, calibration=samples, **arguments) as session:
        (told,) = (c for c in session.explain(runs=1).conversions if "probe input" in c.what)
    assert "(the first calibration input)" in told.reason
    with pytest.raises(xrt.EngineError, match="does not agree with fp32"):
        xrt.InferenceSession(
            MODEL, calibration=samples, policy={"execution": arguments, "accuracy": {"rtol": 1e-6, "atol": 0.0}}
        )


def test_the_probe_has_the_shapes_of_the_policy() -> None:
    engine = OffEngine(0.0)
    opened(engine, accuracy={"rtol": 1e-3}, execution={"shapes": {"image": [5, 1, 8, 8]}}).close()
    assert [run["image"].shape for run in engine.runs] == [(5, 1, 8, 8)]
    engine = OffEngine(0.0)
    opened(engine, accuracy={"rtol": 1e-3}, execution={"shapes": {"image": ["3..7", 1, 8, 8]}}).close()
    assert 3 <= engine.runs[0]["image"].shape[0] <= 7


def test_a_model_without_a_probe_input_says_so(tmp_path: Path) -> None:
    model = models.save(models.identity("string"), tmp_path)
    policy = {"execution": {"device": "cpu"}, "accuracy": {"rtol": 1e-3}}
    with pytest.warns(xrt.XpuRuntimeWarning, match=r"inconclusive: no probe can be made .* of type string\. Fix: pass"):
        session = xrt.InferenceSession(model, policy=policy)
    session.close()


def count_loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    loads: list[int] = []
    from xpuruntime.engines import accuracy

    original = accuracy.unconverted
    monkeypatch.setattr(accuracy, "unconverted", lambda *a: loads.append(1) or original(*a))
    return loads


def test_an_artifact_that_passed_is_not_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = {"execution": {"engine": "onnxruntime", "device": "cpu"}, "accuracy": {"rtol": 1e-3}}
    made = count_loads(monkeypatch)
    artifact = xrt.compile_model(MODEL, tmp_path / "m.xrt", policy=policy)
    assert made == [1]
    assert artifact.manifest.accuracy is not None
    assert artifact.manifest.accuracy.passed
    with xrt.InferenceSession(artifact.folder) as session:
        (told,) = (c for c in session.explain(runs=1).conversions if "probe input" in c.what)
    assert told.reason.startswith("when the artifact was made")
    assert made == [1]


def test_another_tolerance_is_checked_with_the_reference_that_it_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy: Any = {"execution": {"engine": "onnxruntime", "device": "cpu", "precision": "fp16"}}
    made = count_loads(monkeypatch)
    with pytest.warns(xrt.XpuRuntimeWarning):
        artifact = xrt.compile_model(MODEL, tmp_path / "m.xrt", policy=policy)
    assert "probe.npz" in artifact.manifest.files
    tight = {**policy, "accuracy": {"rtol": 1e-9, "atol": 1e-12}}
    with pytest.warns(xrt.XpuRuntimeWarning), pytest.raises(xrt.EngineError, match="does not agree"):
        xrt.InferenceSession(artifact.folder, policy=tight)
    wide = {**policy, "accuracy": {"rtol": 0.5}}
    with pytest.warns(xrt.XpuRuntimeWarning), xrt.InferenceSession(artifact.folder, policy=wide) as session:
        (told,) = (c for c in session.explain(runs=1).conversions if "probe input" in c.what)
    assert "when the artifact" not in told.reason
    assert made == [1], "the reference was not computed again"


def test_an_artifact_without_a_reference_needs_its_model(tmp_path: Path) -> None:
    model = models.save(models.mlp(), tmp_path)
    artifact = xrt.compile_model(model, tmp_path / "m.xrt", device="cpu", engine="onnxruntime")
    asked = {"execution": {"engine": "onnxruntime", "device": "cpu"}, "accuracy": {"rtol": 1e-3}}
    xrt.InferenceSession(artifact.folder, policy=asked).close()
    models.save(models.mlp(seed=1), tmp_path)
    with pytest.raises(xrt.EngineError, match=r"keeps no reference.*is another model by now"):
        xrt.InferenceSession(artifact.folder, policy=asked)
    model.unlink()
    with pytest.raises(xrt.EngineError, match=r"keeps no reference.*there is no such file"):
        xrt.InferenceSession(artifact.folder, policy=asked)


def test_compiled_ahead_of_time_it_is_checked_where_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is not where it is compiled, so the probe input travels in the artifact."""

    class Ahead(SlowEngine):
        def judge(self, request: Request, machine: Machine) -> Judgement:
            judgement = super().judge(request, machine)
            if request.purpose == "run" and not here:
                verdict = msgspec.structs.replace(
                    judgement.verdict, accepted=False, code="device_missing", reason="no such chip"
                )
                return msgspec.structs.replace(judgement, verdict=verdict)
            controls = tuple(msgspec.structs.replace(c, enforceability="enforced") for c in judgement.controls)
            return msgspec.structs.replace(judgement, controls=controls)

    here: list[bool] = []
    engine = Ahead(tmp_path / "log")
    policy = {"execution": {"engine": "slow", "device": "cpu"}, "accuracy": {"rtol": 1e-3}}
    artifact = xrt.compile_model(MODEL, tmp_path / "m.xrt", policy=policy, registry=engine.registry())
    assert artifact.manifest.accuracy is None
    assert artifact.manifest.notes[-1] == "not loaded where it was made: no such chip"
    assert engine.lines() == ["compile"]
    with pytest.raises(xrt.XpuRuntimeError, match="no such chip"):
        xrt.InferenceSession(artifact.folder, registry=engine.registry())
    here.append(True)
    made = count_loads(monkeypatch)
    with pytest.raises(xrt.EngineError, match=r"does not agree.*'logits' is out of tolerance"):
        xrt.InferenceSession(artifact.folder, registry=engine.registry())  # it answers with zeros
    assert made == []


def test_references_round_trip(tmp_path: Path) -> None:
    feeds = {"a/b": np.arange(6, dtype=np.int64).reshape(2, 3), "é": np.array(2.5, np.float16)}
    outputs = {"a/b": np.zeros((0, 3), np.float32), "t": np.array([True, False]), "c": np.array([1 + 2j])}
    reference = Reference(feeds=feeds, outputs=outputs, origin="given")
    assert write_reference(reference, tmp_path / "probe.npz")
    read = read_reference(tmp_path / "probe.npz")
    assert read.origin == "given"
    for before, after in ((feeds, read.feeds), (outputs, read.outputs)):
        assert list(before) == list(after)
        for name, array in before.items():
            np.testing.assert_array_equal(after[name], array, strict=True)
    sequence = Reference(feeds={"x": [np.zeros(2)]}, outputs={})
    assert not write_reference(sequence, tmp_path / "sequence.npz")
    (tmp_path / "probe.npz").write_bytes((tmp_path / "probe.npz").read_bytes()[:40])
    with pytest.raises(xrt.ModelError, match="compile the model again"):
        read_reference(tmp_path / "probe.npz")


def test_a_reference_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: OnnxRuntimeEngine) -> EngineFacts:
        return EngineFacts(name=self.name, reason="no wheel is installed", fix="pip install onnxruntime-gpu")

    machine = machine_snapshot([NullEngine()])
    monkeypatch.setattr(OnnxRuntimeEngine, "probe", gone)
    with pytest.raises(xrt.EngineError, match=r"onnxruntime refuses it: .*Fix: pip install onnxruntime-gpu$"):
        xrt.compare_engines(MODEL, ["null"], device="cpu", machine=machine)
