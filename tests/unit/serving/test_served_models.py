# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Requests of served models: batches, padding, rows, wrong requests, and what the protocol says of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from serving_models import WAIT, Gate, ask, eventually, rows_of, serve_gated, serve_hooked, tokens

import xpuruntime as xrt
from xpuruntime.serving.messages import ServingError, Status
from xpuruntime.serving.models.service import memory_usage_of
from xpuruntime.testing import models

if TYPE_CHECKING:
    from pathlib import Path


Serve = "Callable[..., Models]"


def test_one_request(mlp: Path, serve: Serve) -> None:
    service = serve({"mlp": {"source": str(mlp)}})
    assert service.ready() == (True, "")
    response = service.infer(ask("mlp", {"x": rows_of(1, 3)}, id="7")).result(WAIT)
    assert (response.model, response.version, response.id, response.parameters) == ("mlp", "1", "7", {})
    (y,) = response.outputs
    assert (y.name, y.datatype, y.shape) == ("y", "FP32", (3, 64))
    with xrt.InferenceSession(mlp) as session:
        np.testing.assert_array_equal(y.data, session.run({"x": rows_of(1, 3)})["y"])


def test_requests_that_come_while_the_model_is_busy_run_together(mlp: Path, serve: Serve) -> None:
    gate = Gate()
    service, engine = serve_hooked(serve, {"mlp": {"source": str(mlp), "batching": {"max_batch_size": 8}}}, gate)
    first = service.infer(ask("mlp", {"x": rows_of(0)}))
    assert gate.come.wait(WAIT)
    sent = [np.random.default_rng(i).standard_normal((1 + i % 3, 64)).astype(np.float32) for i in range(4)]
    futures = [service.infer(ask("mlp", {"x": x}, parameters={"xrt_evidence": True})) for x in sent]
    gate.open.set()
    first.result(WAIT)
    with xrt.InferenceSession(mlp) as session:
        for x, future in zip(sent, futures, strict=True):
            response = future.result(WAIT)
            np.testing.assert_allclose(response.outputs[0].data, session.run({"x": x})["y"], rtol=1e-5, atol=1e-6)
            assert response.outputs[0].data.flags.c_contiguous
            assert response.parameters["xrt_batch_size"] == 7
            assert response.parameters["xrt_dispatch"] == "idle"
            assert response.parameters["xrt_queue_us"] > 0
            assert response.parameters["xrt_compute_us"] > 0
            assert response.parameters["xrt_lock"] == ""
    assert [one["x"] for one in engine.seen] == [(1, 64), (7, 64)]
    (stats,) = service.statistics("mlp")["model_stats"]
    assert (stats["inference_count"], stats["execution_count"]) == (8, 2)
    assert stats["inference_stats"]["success"]["count"] == 5
    assert [stat["batch_size"] for stat in stats["batch_stats"]] == [1, 7]


@pytest.fixture
def tokens_path(tmp_path: Path) -> Path:
    return models.save(tokens(), tmp_path, "tokens.onnx")


X = rows_of(1)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (ask("mlp", {"xx": X}), "no input 'xx'; did you mean 'x'?"),
        (ask("mlp", {}), "input 'x' is missing"),
        (ask("mlp", {"x": X.astype(np.float64)}), "has datatype FP64, and the model takes FP32"),
        (ask("mlp", {"x": X[:, :63]}), "dimension 1 is 63, and the model takes [-1, 64]"),
        (ask("mlp", {"x": X[0]}), "has 1 dimensions, and the model takes [-1, 64]"),
        (ask("mlp", {"x": X[:0]}), "has no rows"),
        (ask("mlp", {"x": X}, outputs=["z"]), "no output 'z'. Valid outputs: y."),
        (ask("mlp", {"x": X}, outputs=["y", "y"]), "asked for twice"),
        (ask("mlp", {"x": X}, priority=2), "model 'mlp' has no levels"),
    ],
)
def test_wrong_requests_are_refused_at_once(mlp: Path, serve: Serve, request_: Any, said: str) -> None:
    service = serve({"mlp": {"source": str(mlp), "batching": {"max_batch_size": 4}}})
    with pytest.raises(ServingError) as caught:
        service.infer(request_)
    assert caught.value.code is Status.INVALID_ARGUMENT
    assert said in str(caught.value)
    assert service.statistics("mlp")["model_stats"][0]["inference_stats"]["fail"]["count"] == 1
    assert service.infer(ask("mlp", {"x": X})).result(WAIT).outputs[0].shape == (1, 64)


def test_unknown_models_and_versions(mlp: Path, serve: Serve) -> None:
    service = serve({"mlp": {"source": str(mlp)}})
    for asked, said in (
        (ask("mlq", {"x": X}), "did you mean 'mlp'"),
        (ask("mlp", {"x": X}, version="2"), "has no version"),
    ):
        with pytest.raises(ServingError, match=said) as caught:
            service.infer(asked)
        assert caught.value.code is Status.NOT_FOUND


def test_what_the_protocol_says_of_a_model(tokens_path: Path, serve: Serve) -> None:
    batching = {"max_batch_size": 4, "preferred_batch_size": [2], "max_queue_delay_us": 100, "timeout_us": 10**7}
    service = serve({"t": {"source": str(tokens_path), "batching": batching, "instances": 2}})
    assert service.model_metadata("t") == {
        "name": "t",
        "versions": ["1"],
        "platform": "xpuruntime_onnxruntime",
        "inputs": [{"name": name, "datatype": "INT64", "shape": [-1, -1]} for name in ("ids", "mask")],
        "outputs": [
            {"name": "tokens", "datatype": "FP32", "shape": [-1, -1]},
            {"name": "total", "datatype": "FP32", "shape": [-1]},
        ],
    }
    config = service.model_config("t")
    assert config["max_batch_size"] == 4
    assert config["input"][0] == {"name": "ids", "data_type": "TYPE_INT64", "dims": [-1], "optional": False}
    assert config["output"][1]["dims"] == []
    assert config["instance_group"][0] == {"name": "t", "kind": "KIND_CPU", "count": 2, "gpus": []}
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 100
    assert config["dynamic_batching"]["default_queue_policy"]["default_timeout_microseconds"] == 10**7
    assert service.index() == [{"name": "t", "version": "1", "state": "READY", "reason": ""}]
    (used,) = service.statistics("t")["model_stats"][0]["memory_usage"]
    assert used == {"type": "CPU", "id": 0, "byte_size": service.evidence("t", "evidence")["memory"]["bytes"]}
    assert memory_usage_of("cuda:1", 5) == {"type": "GPU", "id": 1, "byte_size": 5}
    assert service.evidence("t", "plan")["engine"] == "onnxruntime"
    evidence = service.evidence("t", "evidence")
    assert evidence["warmup"][0]["source"] == "probe"
    assert evidence["report"] is None
    assert "unobservable" in evidence["report_note"]
    with pytest.raises(ServingError, match="served without a lock"):
        service.evidence("t", "lock")
    with pytest.raises(ServingError, match="did you mean 'plan'"):
        service.evidence("t", "plam")


def test_a_deadline_fires_while_the_model_is_busy(mlp: Path, serve: Serve) -> None:
    import time

    service, gate = serve_gated(serve, {"mlp": {"source": str(mlp), "batching": {"max_batch_size": 4}}})
    running = service.infer(ask("mlp", {"x": X}, deadline=time.monotonic() + 1.0))
    assert gate.come.wait(WAIT)
    waiting = service.infer(ask("mlp", {"x": X}, deadline=time.monotonic() + 0.3))
    for future, where in ((waiting, "in the queue"), (running, "while it ran")):
        with pytest.raises(ServingError, match=where) as caught:
            future.result(WAIT)
        assert caught.value.code is Status.DEADLINE_EXCEEDED
    assert not gate.open.is_set()
    gate.open.set()
    assert service.infer(ask("mlp", {"x": X})).result(WAIT)
    with pytest.raises(ServingError, match="had passed when the request arrived"):
        service.infer(ask("mlp", {"x": X}, deadline=time.monotonic() - 1))


def test_a_full_queue_and_cancelled_requests(mlp: Path, serve: Serve) -> None:
    gate = Gate()
    batching = {"max_batch_size": 4, "max_queue_size": 2}
    service, engine = serve_hooked(serve, {"mlp": {"source": str(mlp), "batching": batching}}, gate)
    running = service.infer(ask("mlp", {"x": X}))
    assert gate.come.wait(WAIT)
    queued = [service.infer(ask("mlp", {"x": X})) for _ in range(2)]
    with pytest.raises(ServingError) as caught:
        service.infer(ask("mlp", {"x": X}))
    assert caught.value.code is Status.RESOURCE_EXHAUSTED
    assert caught.value.retry_after is not None
    assert caught.value.retry_after > 0
    assert queued[0].cancel()
    another = service.infer(ask("mlp", {"x": X}))
    gate.open.set()
    for future in (running, queued[1], another):
        assert future.result(WAIT).outputs[0].shape == (1, 64)
    assert [one["x"][0] for one in engine.seen] == [1, 2]
    version = service.slots["mlp"].version()
    eventually(lambda: version.statistics.snapshot().failures["CANCELED"] == 1)
    assert version.statistics.snapshot().failures["REJECTED"] == 1


def test_strings(tmp_path: Path, serve: Serve) -> None:
    path = models.save(models.identity("string"), tmp_path, "text.onnx")
    with xrt.InferenceSession(path) as session:
        name, output = session.inputs[0].name, session.outputs[0].name
        shape = tuple(2 if not isinstance(one, int) else one for one in session.inputs[0].shape or ())
    service = serve({"text": {"source": str(path)}})
    sent = np.full(shape, "grüße".encode(), object)
    request = ask("text", {name: sent}, datatypes={name: "BYTES"})
    got = service.infer(request).result(WAIT).outputs[0]
    assert (got.name, got.datatype) == (output, "BYTES")
    assert set(got.data.ravel()) == {"grüße".encode()}
    bad = ask("text", {name: np.full(shape, b"\xff", object)}, datatypes={name: "BYTES"})
    with pytest.raises(ServingError, match="not UTF-8 text") as caught:
        service.infer(bad).result(WAIT)
    assert caught.value.code is Status.INVALID_ARGUMENT


def test_bfloat16(tmp_path: Path, serve: Serve) -> None:
    path = models.save(models.identity("bfloat16"), tmp_path, "half.onnx")
    service = serve({"half": {"source": str(path)}})
    good, reason = service.ready()
    assert good, reason
    (info,) = service.model_metadata("half")["inputs"]
    shape = tuple(2 if one < 0 else one for one in info["shape"])
    bits = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape) + 0x3F80
    got = service.infer(ask("half", {info["name"]: bits}, datatypes={info["name"]: "BF16"})).result(WAIT).outputs[0]
    assert got.datatype == "BF16"
    np.testing.assert_array_equal(got.data, bits)


def test_an_input_of_rank_0_beside_a_batch(tmp_path: Path, serve: Serve) -> None:
    from onnx import parser

    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[N, 4] x, int64 rate) => (float[N, 4] y) { r = Cast<to = 1>(rate) y = Mul(x, r) }"""
    path = models.save(parser.parse_model(text), tmp_path, "voice.onnx")
    service = serve(
        {
            "alone": {"source": str(path)},
            "batched": {"source": str(path), "batching": {"max_batch_size": 4}},
        }
    )
    assert service.ready() == (True, "")
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    requests = [ask(name, {"x": x, "rate": np.array(rate)}) for name in ("alone", "batched") for rate in (2, 3)]
    for request, future in [(one, service.infer(one)) for one in requests]:
        np.testing.assert_array_equal(future.result(WAIT).outputs[0].data, x * request.inputs[1].data)


def test_an_open_session_is_served_and_not_closed(mlp: Path) -> None:
    from xpuruntime.serving.models.service import Models

    with xrt.InferenceSession(mlp) as session:
        with Models(sessions={"mlp": session}) as service:
            assert service.infer(ask("mlp", {"x": X})).result(WAIT).outputs[0].shape == (1, 64)
            with pytest.raises(ServingError, match="given as an open session"):
                service.load("mlp", {})
        assert session.run({"x": X})["y"].shape == (1, 64)
        with pytest.raises(ServingError, match="the server is being stopped"):
            service.infer(ask("mlp", {"x": X}))


@pytest.mark.parametrize(
    "engine", ["onnxruntime", pytest.param("openvino", marks=pytest.mark.needs_module("openvino"))]
)
def test_instances_of_each_engine_side_by_side(mlp: Path, serve: Serve, tmp_path: Path, engine: str) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"execution: {{engine: {engine}, device: cpu}}\n")
    batching = {"max_batch_size": 4}
    service = serve({"m": {"source": str(mlp), "policy": str(policy), "instances": 3, "batching": batching}})
    sent = [np.random.default_rng(i).standard_normal((1 + i % 2, 64)).astype(np.float32) for i in range(120)]
    futures = [service.infer(ask("m", {"x": x})) for x in sent]
    with xrt.InferenceSession(mlp, device="cpu", engine="onnxruntime") as session:
        for x, future in zip(sent, futures, strict=True):
            got = future.result(WAIT).outputs[0].data
            np.testing.assert_allclose(got, session.run({"x": x})["y"], rtol=1e-4, atol=1e-5)
    assert service.model_metadata("m")["platform"] == f"xpuruntime_{engine}"


@pytest.mark.needs_module("torch")
def test_programs_of_pytorch_and_two_that_cannot_be_in_one_process(tmp_path: Path, serve: Serve) -> None:
    import torch

    program = torch.export.export(
        torch.nn.Linear(8, 3).eval(), (torch.zeros(2, 8),), dynamic_shapes=({0: torch.export.Dim("n", min=1)},)
    )
    torch.export.save(program, tmp_path / "linear.pt2")
    for threads in (1, 2):
        (tmp_path / f"{threads}.yaml").write_text(f"execution: {{engine: torch, device: cpu, threads: {threads}}}\n")
    given = {"source": str(tmp_path / "linear.pt2"), "trust": True, "batching": {"max_batch_size": 4}}
    service = serve(
        {
            "one": {**given, "policy": str(tmp_path / "1.yaml")},
            "two": {**given, "policy": str(tmp_path / "2.yaml")},
        }
    )
    (info,) = service.model_metadata("one")["inputs"]
    (output,) = service.model_metadata("one")["outputs"]
    assert info["shape"] == [-1, 8]
    x = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    found = {one.name: one.data for one in service.infer(ask("one", {info["name"]: x})).result(WAIT).outputs}
    want = program.module()(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(found[output["name"]], want, rtol=1e-5, atol=1e-6)
    assert service.model_ready("one") == (True, "")
    assert "num_threads is one for the whole process" in service.model_ready("two")[1]
    assert "use a process of its own" in service.model_ready("two")[1]


def test_each_device_runs_a_batch_of_its_own(mlp: Path, serve: Serve) -> None:
    gate = Gate()
    model = {"source": str(mlp), "devices": ["cpu", "cpu"], "evidence": True}
    service, engine = serve_hooked(serve, {"m": model}, gate)
    x = rows_of(2)
    futures = [service.infer(ask("m", {"x": x[row : row + 1]}, parameters={"xrt_evidence": True})) for row in range(2)]
    eventually(lambda: len(engine.seen) == 2)  # neither waits for the other
    gate.open.set()
    for future in futures:
        assert future.result(WAIT).parameters["xrt_engine"] == "faulty@cpu"
    devices = service.evidence("m", "evidence")["devices"]
    assert [(one["device"], one["executions"], one["rows"]) for one in devices] == [("cpu", 1, 1)] * 2
    assert all(one["report"] is not None for one in devices)
    assert service.model_config("m")["instance_group"][0]["count"] == 1


def test_devices_and_what_they_exclude(mlp: Path, serve: Serve) -> None:
    model = {"source": str(mlp), "devices": ["cpu", "cpu"]}
    with pytest.raises(xrt.PolicyError, match="leave one of them out"):
        serve({"m": {**model, "device": "cpu"}})
    with pytest.raises(xrt.PolicyError, match="a list of devices"):
        serve({"m": {**model, "devices": "cpu"}})
    service = serve({"m": model}, memory={"budget": {"cpu": "8GiB"}})
    assert "state a model for each device" in service.ready()[1]
