# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Ray: replicas of Ray Serve on a local cluster, and batches of Ray Data.

What needs a cluster is skipped where there is no Ray, or not the parts of it that serve and read data.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime.demo import demo_images, demo_model_path
from xpuruntime.serving.messages import InferRequest, InferTensor
from xpuruntime.serving.models.service import Models
from xpuruntime.serving.models.settings import ServeSettings
from xpuruntime.serving.protocol.grpc_messages import decode, encode
from xpuruntime.serving.protocol.infer_messages import read_infer_response, write_infer_request
from xpuruntime.serving.ray import GrpcMethods, Predictor, check_replica, deployment

CPU = {"execution": {"engine": "onnxruntime", "device": "cpu"}}
IMAGES = demo_images()[0]
#: Ray's own use of other packages warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def with_ray() -> None:
    """Skip where Ray is not installed, or without the parts of it that serve and read data."""
    for part in ("ray.serve", "ray.data"):
        pytest.importorskip(part, reason="pip install 'ray[serve,data]'", exc_type=ImportError)


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    with xrt.InferenceSession(demo_model_path(), policy=CPU) as session:
        return np.concatenate([np.asarray(session.run({"image": one[None]})["logits"]) for one in IMAGES[:16]])


def test_a_batch_of_read_only_views() -> None:
    """Ray Data hands out views of shared memory."""
    predict = Predictor(demo_model_path(), CPU, columns={"image": "pixels"}, keep=["id"])
    pixels = IMAGES[:4].copy()
    pixels.setflags(write=False)
    outputs = predict({"pixels": pixels, "id": np.arange(4), "other": np.zeros(4)})
    assert set(outputs) == {"id", "logits"}
    with xrt.InferenceSession(demo_model_path(), policy=CPU) as session:
        assert np.array_equal(outputs["logits"], session.run({"image": IMAGES[:4]})["logits"])


@pytest.mark.parametrize(
    ("options", "batch", "match"),
    [
        ({}, {"pixels": IMAGES[:1]}, r"no column 'image'; it has pixels\. Fix: .*columns="),
        ({"keep": ["id"]}, {"image": IMAGES[:1]}, "no column 'id'"),
        ({"columns": {"imagee": "image"}}, None, "columns: the model has no input 'imagee'; its inputs are image"),
        ({"keep": ["logits"]}, None, "'logits' is an output of the model"),
        ({}, {"image": IMAGES[:1].astype(np.float16)}, "image"),
        ({}, {}, "no column 'image'; it has none"),
        ({}, {3: IMAGES[:1]}, "no column 'image'; it has 3"),
        ({}, [1], 'the batch is a list, and no mapping. Fix: batch_format="numpy"'),
    ],
)
def test_columns_that_do_not_fit(options: dict[str, Any], batch: Any, match: str) -> None:
    with pytest.raises(xrt.InputError, match=match):
        Predictor(demo_model_path(), {"mode": "strict", **CPU}, **options)(batch)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: Predictor("m.onnx", keep="id"), "keep is a list of names, got 'id' of type str"),  # not 'i' and 'd'
        (lambda: Predictor("m.onnx", columns={"image": 3}), "columns is a mapping of input to the name of a column"),  # type: ignore[dict-item]
        (lambda: deployment(3), "source is a path"),  # type: ignore[arg-type]
        (lambda: deployment("m.onnx", {"execution": {}}), "policy is a path"),  # type: ignore[arg-type]
        (lambda: deployment("m.onnx", lock=b"a"), "lock is a path"),  # type: ignore[arg-type]
        (lambda: deployment("m.onnx", name=["a"]), "name is text"),  # type: ignore[arg-type]
        (lambda: deployment("m.onnx", batching="full"), "batching is a mapping"),  # type: ignore[arg-type]
        (lambda: deployment("m.onnx", ""), "policy is an empty path. Fix"),
    ],
)
def test_wrong_arguments_are_named_before_ray_is_asked(call: Any, match: str) -> None:
    with pytest.raises((TypeError, xrt.InputError), match=match):
        call()


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(xrt.EngineUnavailable, match=r"pip install .*ray"):
        deployment("model.onnx")


def test_what_a_replica_has_of_serve_yaml() -> None:
    given: dict[str, Any] = {"schema": "xpuruntime.serve/1", "models": {"m": {"source": "m.onnx"}}}
    check_replica(ServeSettings.coerce(given))
    for section, match in (
        ({"admin": {"repository": True}}, r"in one replica, .* Fix: leave it out"),
        ({"models": {}}, "names no model"),
    ):
        with pytest.raises(xrt.InputError, match=match):
            check_replica(ServeSettings.coerce({**given, **section}))


@pytest.mark.usefixtures("with_ray")
def test_settings_are_checked_before_anything_is_deployed(tmp_path: Path) -> None:
    with pytest.raises(xrt.PolicyError, match="max_batch_sizes"):
        deployment("model.onnx", batching={"max_batch_sizes": 8})
    (tmp_path / "serve.yaml").write_text("schema: xpuruntime.serve/1\nmodels: {digits: {source: digits.onnx}}\n")
    with pytest.raises(xrt.InputError, match="lock describes one model"):
        deployment(tmp_path / "serve.yaml", lock="model.lock")
    (tmp_path / "shut.yaml").write_text(
        "schema: xpuruntime.serve/1\nhttp: {listen: '0.0.0.0:1'}\ngrpc: {max_message: 1MiB}\n"
        "models: {digits: {source: digits.onnx}}\n"
    )
    with pytest.warns(xrt.XpuRuntimeWarning, match=r"^http\.listen, grpc\.max_message: Ray's proxies listen"):
        deployment(tmp_path / "shut.yaml")
    made = deployment(tmp_path / "serve.yaml")
    assert (made.name, made.max_ongoing_requests) == ("digits", 16)
    assert deployment("m.onnx", batching={"max_batch_size": 64}).max_ongoing_requests == 128
    assert deployment("m.onnx", max_ongoing_requests=3, name="mine").max_ongoing_requests == 3


class Cluster(int):
    """The HTTP port of Ray Serve, with that of gRPC."""

    grpc: int


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def cluster(with_ray: None) -> Iterator[Cluster]:
    """A cluster of this machine, with the ports of Ray Serve."""
    import ray
    from ray import serve
    from ray.serve.config import gRPCOptions

    port = Cluster(free_port())
    port.grpc = free_port()
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    register = "xpuruntime.serving.ray.add_GRPCInferenceServiceServicer_to_server"
    serve.start(
        http_options={"host": "127.0.0.1", "port": port},
        grpc_options=gRPCOptions(port=port.grpc, grpc_servicer_functions=[register]),
    )
    yield port
    serve.shutdown()
    ray.shutdown()


def call(port: int, path: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=data), timeout=60
        ) as r:
            return r.status, json.loads(r.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def image(index: int) -> dict[str, Any]:
    tensor = {"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8], "data": IMAGES[index].ravel().tolist()}
    return {"inputs": [tensor]}


@pytest.mark.parametrize("prefix", ["/", "/under"])
def test_replicas_answer_in_batches(
    cluster: int, expected: np.ndarray, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray import serve

    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray sets it in its workers
    xrt.lock(demo_model_path(), CPU, tmp_path / "digits.lock")
    made = deployment(
        demo_model_path(),
        lock=tmp_path / "digits.lock",
        batching={"max_batch_size": 8, "max_queue_delay_us": 20000},
        ray_actor_options={"num_cpus": 0.5},
    )
    serve.run(made.bind(), route_prefix=prefix, name="digits")
    root = prefix.rstrip("/")
    assert call(cluster, f"{root}/v2/health/ready")[0] == 200
    assert call(cluster, f"{root}/v2/models/digits")[1]["inputs"][0]["shape"] == [-1, 1, 8, 8]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda index: call(cluster, f"{root}/v2/models/digits/infer", image(index)), range(16)))
    assert [status for status, _ in answers] == [200] * 16
    array = np.array([body["outputs"][0]["data"] for _, body in answers], np.float32)
    np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-5)
    (stats,) = call(cluster, f"{root}/v2/models/digits/stats")[1]["model_stats"]
    assert stats["inference_count"] == 16
    assert stats["execution_count"] < 16
    status, body = call(cluster, f"{root}/v2/models/nope/infer", image(0))
    assert (status, "nope" in body["error"]) == (404, True)
    assert call(cluster, f"{root}/v2/models/digits/infer", {"inputs": []})[0] == 400
    serve.delete("digits")


class CallOfRay:
    """What Ray's proxy gives a replica beside the message of a call."""

    code = None

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def set_code(self, code: Any) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details


def test_calls_of_the_service_are_answered_without_a_cluster(expected: np.ndarray) -> None:
    async def ask(name: str, message: bytes) -> bytes:
        reply = await getattr(replica, name)(message, call)
        return bytes(reply.SerializeToString())

    replica, call = GrpcMethods(), CallOfRay()
    image = InferTensor("image", "FP32", (1, 1, 8, 8), IMAGES[:1])
    with xrt.InferenceSession(demo_model_path(), policy=CPU) as session, Models(sessions={"digits": session}) as models:
        replica.models = models
        asked = encode("ModelReadyRequest", {"name": "digits"})
        assert decode("ModelReadyResponse", asyncio.run(ask("ModelReady", asked))) == {"ready": True}
        message = write_infer_request(InferRequest("digits", [image]))
        answer = read_infer_response(asyncio.run(ask("ModelInfer", message)))
        np.testing.assert_allclose(answer.outputs[0].data, expected[:1], rtol=1e-4, atol=1e-5)
        with pytest.raises(Exception, match="no model 'nope'"):
            asyncio.run(ask("ModelInfer", write_infer_request(InferRequest("nope", [image]))))
    assert call.code is not None
    assert (call.code.name, "nope" in call.details) == ("NOT_FOUND", True)


def test_grpc(cluster: Cluster, expected: np.ndarray) -> None:
    """Calls of the service reach the replica's own models: answers, batches, streams, and errors with their status."""
    grpc = pytest.importorskip("grpc")
    from ray import serve

    made = deployment(demo_model_path(), batching={"max_batch_size": 8}, ray_actor_options={"num_cpus": 0.5})
    serve.run(made.bind(), route_prefix="/rpc", name="rpc")
    with grpc.insecure_channel(f"127.0.0.1:{cluster.grpc}") as channel:

        def ask(name: str, asked: dict[str, Any], **more: Any) -> dict[str, Any]:
            method = channel.unary_unary(f"/inference.GRPCInferenceService/{name}")
            sent = method(encode(f"{name}Request", asked), timeout=60, **more)
            return decode(f"{name}Response", sent)

        def infer(index: int, model: str = "digits") -> InferRequest:
            one = IMAGES[index][None]
            return InferRequest(model, [InferTensor("image", "FP32", one.shape, one)], id=str(index))

        assert ask("ServerReady", {})["ready"] is True
        assert ask("ModelMetadata", {"name": "digits"})["inputs"][0]["shape"] == [-1, 1, 8, 8]
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        futures = [call.future(write_infer_request(infer(index)), timeout=60) for index in range(16)]
        answers = [read_infer_response(future.result()) for future in futures]
        assert [answer.id for answer in answers] == [str(index) for index in range(16)]
        found = np.concatenate([answer.outputs[0].data for answer in answers])
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        messages = list(stream(iter([write_infer_request(infer(index)) for index in range(4)]), timeout=60))
        assert len(messages) == 4
        for raised, code, words in (
            (lambda: call(write_infer_request(infer(0, "nope")), timeout=60), "NOT_FOUND", "no model 'nope'"),
            (lambda: call(b"\xff\xff", timeout=60), "INVALID_ARGUMENT", ""),
            (lambda: ask("RepositoryIndex", {}), "PERMISSION_DENIED", "closed to clients"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                raised()
            assert caught.value.code().name == code, caught.value.details()
            assert words in caught.value.details()
    serve.delete("rpc")


def test_a_replica_whose_model_does_not_load(cluster: int, tmp_path: Path) -> None:
    from ray import serve

    (tmp_path / "bad.onnx").write_bytes(b"no model")
    made = deployment(tmp_path / "bad.onnx", ray_actor_options={"num_cpus": 0.5}, max_constructor_retry_count=1)
    with pytest.raises(RuntimeError, match="Deploying application bad failed"):
        serve.run(made.bind(), name="bad", route_prefix="/bad")
    assert "bad.onnx" in serve.status().applications["bad"].deployments["bad"].message
    serve.delete("bad")


def test_map_batches(cluster: int) -> None:
    import ray

    rows = [{"id": index, "image": IMAGES[index]} for index in range(20)]
    batches = ray.data.from_items(rows).map_batches(
        Predictor,
        fn_constructor_kwargs={"model": str(demo_model_path()), "policy": CPU, "keep": ["id"]},
        compute=ray.data.ActorPoolStrategy(size=1),
        batch_size=8,
        batch_format="numpy",
        num_cpus=0.5,
    )
    by_id = {row["id"]: row["logits"] for row in batches.take_all()}
    with xrt.InferenceSession(demo_model_path(), policy=CPU) as session:
        expected = session.run({"image": IMAGES[:20]})["logits"]
    np.testing.assert_allclose(np.stack([by_id[index] for index in range(20)]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"model": "/none/m.onnx"},
            r"ModelError: on the node [\d.]+/[0-9a-f]{8}: cannot use the model '/none/m\.onnx'",
        ),
        ({"policy": {"mode": "x"}}, r"PolicyError: on the node .*: policy: mode: 'x' is not a valid value"),
    ],
)
def test_an_actor_that_cannot_open_its_session_says_why(cluster: int, given: dict[str, Any], words: str) -> None:
    """Ray would start an actor that raises in its constructor again, and show the stack of that each time."""
    import ray

    batches = ray.data.from_items([{"image": IMAGES[0]}] * 2).map_batches(
        Predictor,
        fn_constructor_kwargs={"model": str(demo_model_path()), **given},
        compute=ray.data.ActorPoolStrategy(size=1),
        batch_format="numpy",
        num_cpus=0.5,
    )
    with pytest.raises(ray.exceptions.RayTaskError, match=words):
        batches.take_all()
