# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""One call of tritonclient, by an interpreter that has it: ``python triton_infer.py HTTP GRPC``, with the call as JSON.

``inputs`` are ``{name: [datatype, shape, flat values]}``, with text for BYTES; ``times`` sends so many at once.
"""

from __future__ import annotations

import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

_WORKERS = 16


def tensors(module: Any, inputs: dict[str, Any]) -> list[Any]:
    results = []
    for name, (datatype, shape, data) in inputs.items():
        if datatype == "BYTES":
            data = [one.encode("latin-1") for one in data]
        array = np.array(data, triton_to_np_dtype(datatype)).reshape(shape)
        results.append(module.InferInput(name, shape, datatype))
        results[-1].set_data_from_numpy(array)
    return results


def plain(array: np.ndarray) -> list[Any]:
    flat = [one.decode("latin-1") if isinstance(one, bytes) else one for one in array.reshape(-1).tolist()]
    return [list(array.shape), flat]


def answers(call: dict[str, Any]) -> list[Any]:
    module = getattr(tritonclient, call["transport"])
    address = sys.argv[1] if call["transport"] == "http" else sys.argv[2]
    client = module.InferenceServerClient(address, **({"concurrency": _WORKERS} if address == sys.argv[1] else {}))
    inputs, times = tensors(module, call["inputs"]), call.get("times", 1)
    outputs = [module.InferRequestedOutput(name) for name in call.get("outputs", ())] or None
    if times == 1:
        return [client.infer(call["model"], inputs, outputs=outputs)]
    if call["transport"] == "http":
        sent = [client.async_infer(call["model"], inputs, outputs=outputs) for _ in range(times)]
        return [one.get_result() for one in sent]
    got: queue.Queue = queue.Queue()
    for _ in range(times):
        client.async_infer(call["model"], inputs, lambda result, error: got.put(error or result), outputs=outputs)
    results = [got.get(timeout=60) for _ in range(times)]
    for one in results:
        if isinstance(one, Exception):
            raise one
    return results


def main() -> None:
    try:
        found = answers(json.load(sys.stdin))
    except InferenceServerException as error:
        json.dump({"status": str(error.status()), "message": error.message()}, sys.stdout)
        return
    outputs = []
    for answer in found:
        facts = answer.get_response(as_json=True) if "grpc" in type(answer).__module__ else answer.get_response()
        outputs.append({output["name"]: plain(answer.as_numpy(output["name"])) for output in facts["outputs"]})
    assert all(output == outputs[0] for output in outputs), "the answers to the same request differ"
    json.dump({"outputs": outputs[0], "answers": len(outputs)}, sys.stdout)


main()
