# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Checks with tritonclient, run by an interpreter that has it: ``python tritonclient_checks.py HTTP GRPC``.

Prints a JSON object of the checks, each with an empty string or what went wrong. The server has the models of
`served_models`.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import traceback
from collections.abc import Callable

import ml_dtypes
import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

HTTP, GRPC = sys.argv[1:]
CHECKS: dict[str, Callable[[], None]] = {}
KINDS = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
    "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "FP16": np.float16,
    "FP32": np.float32, "FP64": np.float64, "BYTES": np.object_,
}  # fmt: skip


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def example(datatype: str) -> np.ndarray:
    kind = np.dtype(KINDS[datatype])
    if datatype == "BYTES":
        return np.array([[b"", b"a\xff\0", "날씨".encode()]], object)
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        return np.array([[limits.min, 1, limits.max]], kind)
    return np.array([[0, 1, 0.5]]).astype(kind)


def made(module, datatype: str, array: np.ndarray, **how):
    tensor = module.InferInput(datatype, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, **how)
    return tensor


def same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found is not None
    assert found.shape == expected.shape
    assert found.tolist() == expected.tolist(), (found, expected)


def refused(call: Callable[[], object], status: str, match: str) -> None:
    reason: InferenceServerException | None = None
    try:
        call()
    except InferenceServerException as error:
        reason = error
    assert reason is not None, "it was not refused"
    assert status in str(reason.status()), reason.status()
    assert match in str(reason.message()), reason.message()


def http() -> tritonclient.http.InferenceServerClient:
    return tritonclient.http.InferenceServerClient(HTTP, concurrency=4)


def grpc() -> tritonclient.grpc.InferenceServerClient:
    return tritonclient.grpc.InferenceServerClient(GRPC)


for _name in KINDS:
    assert _name == "BYTES" or np_to_triton_dtype(np.dtype(KINDS[_name])) == _name

    def _binary(datatype: str = _name) -> None:
        array = example(datatype)
        for client, module in ((http(), tritonclient.http), (grpc(), tritonclient.grpc)):
            answer = client.infer("echo", [made(module, datatype, array)], request_id="a id")
            same(answer.as_numpy(datatype), array)
            outputs = [module.InferRequestedOutput(datatype)]
            same(client.infer("echo", [made(module, datatype, array)], outputs=outputs).as_numpy(datatype), array)

    def _json(datatype: str = _name) -> None:
        array = np.array([[b"", "날씨".encode()]], object) if datatype == "BYTES" else example(datatype)
        tensor = made(tritonclient.http, datatype, array, binary_data=False)
        outputs = [tritonclient.http.InferRequestedOutput(datatype, binary_data=False)]
        found = http().infer("echo", [tensor], outputs=outputs).as_numpy(datatype)
        same(found, np.array([["", "날씨"]], object) if datatype == "BYTES" else array)

    CHECKS[f"binary_{_name}"] = _binary
    if _name != "FP16":
        CHECKS[f"json_{_name}"] = _json


@check
def bf16() -> None:
    array = np.array([[0.5, -1.0]], ml_dtypes.bfloat16)
    for client, module in ((http(), tritonclient.http), (grpc(), tritonclient.grpc)):
        same(client.infer("echo", [made(module, "BF16", array)]).as_numpy("BF16"), array)


@check
def empty_tensors() -> None:
    for client, module in ((http(), tritonclient.http), (grpc(), tritonclient.grpc)):
        for datatype in ("FP32", "BYTES"):
            array = np.empty((0, 3), KINDS[datatype])
            same(client.infer("echo", [made(module, datatype, array)]).as_numpy(datatype), array)


@check
def several_inputs() -> None:
    arrays = {name: example(name) for name in ("INT8", "BYTES", "FP64")}
    for client, module in ((http(), tritonclient.http), (grpc(), tritonclient.grpc)):
        answer = client.infer("echo", [made(module, name, array) for name, array in arrays.items()])
        for name, array in arrays.items():
            same(answer.as_numpy(name), array)


@check
def compression() -> None:
    array = np.zeros((100, 100), np.float32)
    tensor = made(tritonclient.http, "FP32", array)
    for algorithm in ("gzip", "deflate"):
        answer = http().infer(
            "echo", [tensor], request_compression_algorithm=algorithm, response_compression_algorithm=algorithm
        )
        same(answer.as_numpy("FP32"), array)
        answer = grpc().infer("echo", [made(tritonclient.grpc, "FP32", array)], compression_algorithm=algorithm)
        same(answer.as_numpy("FP32"), array)


@check
def facts() -> None:
    for client, plain in ((http(), lambda one: one), (grpc(), None)):
        how = {} if plain else {"as_json": True}
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("digits")
        assert not client.is_model_ready("broken")
        assert "statistics" in client.get_server_metadata(**how)["extensions"]
        assert client.get_model_metadata("digits", **how)["inputs"][0]["shape"][1:] in ([1, 8, 8], ["1", "8", "8"])
        config = client.get_model_config("digits", **how)
        assert config.get("config", config)["max_batch_size"] == 8
        stats = client.get_inference_statistics("digits", **how)["model_stats"][0]
        assert str(stats["inference_count"]) == "3"
        assert str(stats["inference_stats"]["success"]["ns"]) == "1000000"
        index = client.get_model_repository_index(**how)
        assert len(index["models"] if isinstance(index, dict) else index) == 6
        client.load_model("echo")
        client.unload_model("echo")


@check
def digits() -> None:
    image = np.linspace(0, 1, 64, dtype=np.float32).reshape(1, 1, 8, 8)
    found = []
    for client, module in ((http(), tritonclient.http), (grpc(), tritonclient.grpc)):
        tensor = module.InferInput("image", [1, 1, 8, 8], "FP32")
        tensor.set_data_from_numpy(image)
        answer = client.infer("digits", [tensor], model_version="1", priority=1, timeout=5_000_000)
        found.append(answer.as_numpy("logits"))
    assert found[0].shape == (1, 10)
    same(found[0], found[1])


@check
def errors() -> None:
    array = np.ones((1,), np.float32)
    for client, module, words in (
        (http(), tritonclient.http, ("404", "429", "500", "400", "504", "501")),
        (
            grpc(),
            tritonclient.grpc,
            ("NOT_FOUND", "RESOURCE_EXHAUSTED", "INTERNAL", "INVALID_ARGUMENT", "DEADLINE", "UNIMPLEMENTED"),
        ),
    ):
        x = module.InferInput("x", [1], "FP32")
        x.set_data_from_numpy(array)
        twice = [x, x]
        nothing = [module.InferRequestedOutput("nothing")]
        refused(lambda c=client, t=x: c.infer("none", [t]), words[0], "there is no model 'none'")
        refused(lambda c=client, t=x: c.infer("full", [t]), words[1], "the queue is full")
        refused(lambda c=client, t=x: c.infer("broken", [t]), words[2], "RuntimeError")
        refused(lambda c=client, t=twice: c.infer("echo", t), words[3], "given twice")
        refused(lambda c=client, t=x, o=nothing: c.infer("echo", [t], outputs=o), words[3], "no output 'nothing'")
        refused(lambda c=client, t=x: c.infer("slow", [t], timeout=20_000), words[4], "the deadline is over")
        refused(
            lambda c=client, t=x: c.infer("echo", [t], sequence_id=7, sequence_start=True), words[5], "for sequences"
        )
        refused(lambda c=client: c.get_model_metadata("none"), words[0], "there is no model")


@check
def shared_memory_is_not_served() -> None:
    refused(lambda: http().get_system_shared_memory_status(), "501", "does not have the extension")
    refused(lambda: grpc().get_system_shared_memory_status(), "UNIMPLEMENTED", "shared memory")


@check
def asynchronous_http() -> None:
    array = example("INT32")
    client = http()
    asked = [client.async_infer("echo", [made(tritonclient.http, "INT32", array)]) for _ in range(50)]
    for one in asked:
        same(one.get_result().as_numpy("INT32"), array)


@check
def asynchronous_grpc() -> None:
    array = example("INT32")
    answers: queue.Queue = queue.Queue()
    client = grpc()
    for _ in range(50):
        client.async_infer(
            "echo", [made(tritonclient.grpc, "INT32", array)], lambda result, error: answers.put((result, error))
        )
    for _ in range(50):
        result, error = answers.get(timeout=30)
        assert error is None
        same(result.as_numpy("INT32"), array)


@check
def streams() -> None:
    array = example("INT32")
    answers: queue.Queue = queue.Queue()
    client = grpc()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for at in range(20):
        client.async_stream_infer("echo", [made(tritonclient.grpc, "INT32", array)], request_id=str(at))
    client.async_stream_infer("none", [made(tritonclient.grpc, "INT32", array)])
    found = [answers.get(timeout=30) for _ in range(21)]
    client.stop_stream()
    assert [result.get_response().id for result, error in found[:20] if error is None] == [str(at) for at in range(20)]
    assert "there is no model" in str(found[20][1])


@check
def coroutines() -> None:
    array = example("BYTES")

    async def both() -> None:
        for module, address in ((tritonclient.http.aio, HTTP), (tritonclient.grpc.aio, GRPC)):
            async with module.InferenceServerClient(address) as client:
                tensor = module.InferInput("BYTES", list(array.shape), "BYTES")
                tensor.set_data_from_numpy(array)
                answers = await asyncio.gather(*(client.infer("echo", [tensor]) for _ in range(20)))
                for answer in answers:
                    same(answer.as_numpy("BYTES"), array)

    asyncio.run(both())


def main() -> None:
    texts = {}
    for name, function in CHECKS.items():
        try:
            function()
            texts[name] = ""
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    sys.stdout.write(json.dumps(texts))


main()
