# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Locks, evidence, canary, shadow, and batches chosen for a latency."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from serving_models import WAIT, FaultyEngine, ask, rows_of

import xpuruntime as xrt
from xpuruntime.lockfile.measured import BatchTime
from xpuruntime.serving.messages import ServingError, Status
from xpuruntime.serving.models.loading import choose_limits
from xpuruntime.testing import models

if TYPE_CHECKING:
    from xpuruntime.serving.models.service import Models

Serve = "Callable[..., Models]"
X = rows_of(1)


@pytest.fixture
def locked(mlp: Path, tmp_path: Path) -> dict[str, Any]:
    """Return the settings of a model with a lock."""
    lock = tmp_path / "mlp.lock"
    xrt.lock(mlp, {"execution": {"engine": "onnxruntime", "device": "cpu"}}, lock, shapes={"x": (2, 64)})
    return {"source": str(mlp), "lock": str(lock), "batching": {"max_batch_size": 4}}


def test_a_model_with_a_lock(locked: dict[str, Any], serve: Serve) -> None:
    service = serve({"m": locked})
    assert service.ready() == (True, "")
    digest = service.evidence("m", "lock")["digest"]
    assert digest.startswith("sha256:")
    response = service.infer(ask("m", {"x": X}, parameters={"xrt_evidence": True})).result(WAIT)
    assert response.parameters["xrt_lock"] == digest
    assert response.parameters["xrt_engine"] == "onnxruntime@cpu"
    assert service.infer(ask("m", {"x": X}, parameters={"xrt_evidence": False})).result(WAIT).parameters == {}
    evidence = service.evidence("m", "evidence")
    assert evidence["lock"] == digest
    assert [(one["source"], one["shapes"]) for one in evidence["warmup"]] == [("lock", {"x": [2, 64]})]
    assert service.model_config("m")["parameters"]["xrt_lock"] == {"string_value": digest}


def test_a_lock_that_does_not_hold_is_fail_closed(locked: dict[str, Any], serve: Serve, tmp_path: Path) -> None:
    models.save(models.mlp(seed=5), tmp_path, "mlp.onnx")  # other weights than those that were locked
    service = serve({"m": locked})
    good, reason = service.ready()
    assert not good
    assert "mlp.lock" in reason
    assert "model" in reason
    with pytest.raises(ServingError, match=r"is not served: .*mlp\.lock") as caught:
        service.infer(ask("m", {"x": X}))
    assert caught.value.code is Status.UNAVAILABLE
    assert service.index()[0]["state"] == "UNAVAILABLE"


def test_a_fixed_shape_needs_a_lock_of_that_shape(
    locked: dict[str, Any], mlp: Path, serve: Serve, tmp_path: Path
) -> None:
    fixed = {"max_batch_size": 4, "shapes": "fixed"}
    lock = tmp_path / "fixed.lock"
    policy = {"execution": {"engine": "onnxruntime", "device": "cpu", "static_batch": 4}}
    xrt.lock(mlp, policy, lock)
    service = serve({"other": {**locked, "batching": fixed}, "fixed": {**locked, "lock": str(lock), "batching": fixed}})
    assert "was made with execution.static_batch: None" in service.model_ready("other")[1]
    assert service.model_ready("fixed") == (True, "")
    assert service.infer(ask("fixed", {"x": X})).result(WAIT).outputs[0].shape == (1, 64)


def test_a_report_is_taken_where_it_is_asked_for(mlp: Path, serve: Serve) -> None:
    service = serve({"m": {"source": str(mlp), "evidence": True}})
    evidence = service.evidence("m", "evidence")
    assert evidence["report"]["units"]
    assert evidence["report_note"] is None


class Drifting(FaultyEngine):
    """ONNX Runtime whose results are multiplied by `by`."""

    def __init__(self) -> None:
        super().__init__()
        self.by = 1.0

    def load(self, *given: Any) -> Any:
        loaded = super().load(*given)
        run = loaded.run

        def off(feeds: Any, stream: Any = None) -> dict[str, Any]:
            return {name: np.asarray(value * np.float32(self.by)) for name, value in run(feeds, stream).items()}

        loaded.run = off  # type: ignore[method-assign]
        loaded.runner = lambda: off  # type: ignore[method-assign]
        return loaded


def settled(service: Models, name: str = "m") -> dict[str, Any]:
    """Return what canary and shadow found, once they have run all samples."""
    version = service.slots[name].version()
    assert version.drain(WAIT)
    for watcher in version._watchers:
        assert watcher.settle(WAIT)
    return version.watched()


def asked(service: Models, count: int) -> None:
    for i in range(count):
        service.infer(ask("m", {"x": np.random.default_rng(i).standard_normal((2, 64)).astype(np.float32)})).result(
            WAIT
        )
        for watcher in service.slots["m"].version()._watchers:
            watcher.settle(WAIT)


def test_a_canary_in_tolerance(mlp: Path, serve: Serve) -> None:
    service = serve(
        {"m": {"source": str(mlp), "canary": {"every": 2}, "batching": {"max_batch_size": 4}}},
    )
    assert service.evidence("m", "evidence")["canary"]["runs"] == 1, "it is answered before the model is ready"
    asked(service, 6)
    canary = settled(service)["canary"]
    assert (canary["runs"], canary["out_of_tolerance"], canary["errors"]) == (4, 0, 0)
    assert canary["drift"] < 1e-4
    assert service.ready() == (True, "")


def test_a_canary_out_of_tolerance_makes_the_model_not_ready(mlp: Path, serve: Serve) -> None:
    engine = Drifting()
    service = serve({"m": {"source": str(mlp), "canary": {"every": 1}}}, registry=engine.registry())
    assert service.ready() == (True, "")
    engine.by = 1.5
    asked(service, 1)
    good, reason = service.ready()
    assert not good
    assert "the last canary is out of tolerance: output 'y'" in reason
    engine.by = 1.0
    asked(service, 1)
    assert service.ready() == (True, "")
    canary = settled(service)["canary"]
    assert canary["out_of_tolerance"] == 1
    assert canary["worst_drift"] == pytest.approx(0.5, rel=0.1)


def test_a_canary_against_the_request_alone_is_bitwise_under_a_fixed_shape(mlp: Path, serve: Serve) -> None:
    batching = {"max_batch_size": 4, "shapes": "fixed"}
    service = serve({"m": {"source": str(mlp), "canary": {"every": 1, "against": "self"}, "batching": batching}})
    asked(service, 5)
    canary = settled(service)["canary"]
    assert canary["bitwise_equal"] == canary["runs"] == 6


def test_the_reference_of_an_artifact_is_refused(mlp: Path, serve: Serve, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    xrt.compile_model(mlp, tmp_path / "m.xrt", engine="openvino", device="cpu")
    service = serve({"m": {"source": str(tmp_path / "m.xrt"), "canary": {}}})
    assert "state against: self" in service.ready()[1]


@pytest.fixture
def other_policy(tmp_path: Path) -> str:
    pytest.importorskip("openvino")
    path = tmp_path / "next.yaml"
    path.write_text("execution: {engine: openvino, device: cpu}\n")
    return str(path)


def test_a_shadow_compares_outputs_and_times(mlp: Path, serve: Serve, other_policy: str) -> None:
    service = serve({"m": {"source": str(mlp), "shadow": {"policy": other_policy, "share": "50%"}}})
    asked(service, 40)
    found = settled(service)["shadow"]
    assert found["engine"] == "openvino@cpu"
    assert (found["runs"], found["out_of_tolerance"], found["errors"]) == (20, 0, 0)
    assert found["rounds"] >= 9
    assert found["next_look"] is not None
    time = found["time"]
    assert time["verdict"] in ("faster", "slower", "tied", "inconclusive")
    assert 0 < time["low"] <= time["ratio"] <= time["high"]
    assert service.ready() == (True, "")


def test_a_shadow_that_is_slower_is_called_so(mlp: Path, serve: Serve, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "next.yaml"
    path.write_text("execution: {engine: onnxruntime, device: cpu}\n")
    service = serve({"m": {"source": str(mlp), "shadow": {"policy": str(path), "share": "100%"}}})
    (shadow,) = service.slots["m"].version()._watchers
    run = shadow._run
    monkeypatch.setattr(
        shadow,
        "_run",
        lambda session, *more: (run(session, *more)[0], 2e-3 if session is shadow._other else 1e-3),
    )
    asked(service, 30)
    time = settled(service)["shadow"]["time"]
    assert time["verdict"] == "slower"
    assert time["ratio"] == pytest.approx(2.0)
    assert time["confidence"] == 0.99


def test_a_shadow_whose_policy_fails_does_not_load(mlp: Path, serve: Serve, tmp_path: Path) -> None:
    service = serve({"m": {"source": str(mlp), "shadow": {"policy": str(tmp_path / "none.yaml")}}})
    assert "none.yaml" in service.ready()[1]


CURVE = [
    BatchTime(rows=rows, median_us=median_us, longest_us=longest_us, runs=21)
    for rows, median_us, longest_us in ((1, 2000, 3000), (2, 3000, 4000), (4, 5000, 6000), (8, 9000, 12000))
]


@pytest.mark.parametrize(
    ("p99", "size", "delay", "met"),
    [
        (0.001, 1, 0, False),
        (0.006, 1, 0, True),
        (0.008, 2, 0, True),
        (0.0105, 2, 2500, True),
        (0.012, 4, 0, True),
        (0.020, 4, 5000, True),
        (0.024, 8, 0, True),
        (1.0, 8, 9000, True),
    ],
)
def test_batches_chosen_for_a_latency(p99: float, size: int, delay: int, met: bool) -> None:
    limits = choose_limits(CURVE, p99)
    assert (limits.max_batch_size, limits.met) == (size, met)
    assert limits.max_queue_delay_us == pytest.approx(delay, abs=1)


def test_a_latency_is_asked_for(mlp: Path, serve: Serve) -> None:
    given = {"source": str(mlp), "slo": {"p99": "60s"}, "batching": {"max_batch_size": 8}}
    hopeless = {**given, "slo": {"p99": "2us"}}
    service = serve({"m": given, "hopeless": hopeless})
    evidence = service.evidence("m", "evidence")
    assert [one["batch_size"] for one in evidence["slo"]["curve"]] == [1, 2, 4, 8]
    assert evidence["slo"]["met"]
    assert evidence["slo"]["max_batch_size"] == 8
    assert service.model_config("m")["max_batch_size"] == 8
    assert service.model_config("m")["dynamic_batching"]["max_queue_delay_microseconds"] > 0
    assert '"p99_us":60000000' in service.model_config("m")["parameters"]["xrt_slo"]["string_value"]
    assert service.infer(ask("m", {"x": rows_of(1, 20)})).result(WAIT).outputs[0].shape == (20, 64)
    assert service.evidence("hopeless", "evidence")["slo"]["p99_us"] == 2
