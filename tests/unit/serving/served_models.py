# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A service to test transports with: the demo model on a session, and models that wait, fail or give back."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import xpuruntime as xrt
from xpuruntime.serving.messages import InferRequest, InferResponse, InferTensor, ServingError, Status
from xpuruntime.serving.protocol.datatypes import DATATYPES


def facts(name: str, inputs: list[dict], outputs: list[dict]) -> dict[str, Any]:
    return {"name": name, "versions": ["1"], "platform": "test", "inputs": inputs, "outputs": outputs}


DIGITS = facts(
    "digits",
    [{"name": "image", "datatype": "FP32", "shape": [-1, 1, 8, 8]}],
    [{"name": "logits", "datatype": "FP32", "shape": [-1, 10]}],
)
ECHO = facts(
    "echo",
    [{"name": name, "datatype": name, "shape": [-1]} for name in DATATYPES],
    [{"name": name, "datatype": name, "shape": [-1]} for name in DATATYPES],
)
ONE = [{"name": "x", "datatype": "FP32", "shape": [-1]}]


class Service:
    """`digits` runs the demo model; `echo` gives back what it gets; `slow` waits until `release`; others fail."""

    def __init__(self) -> None:
        self.models = {"digits": DIGITS, "echo": ECHO}
        self.models |= {name: facts(name, ONE, ONE) for name in ("slow", "broken", "full", "two.words-x_1")}
        self.session = xrt.InferenceSession(xrt.demo_model_path(), device="cpu")
        self.release = threading.Event()
        self.pool = ThreadPoolExecutor(4)
        self.waiting: list[Future[InferResponse]] = []
        self.answered = 0
        self.requests: list[InferRequest] = []
        self.why_not_ready = ""
        self.loaded: list[tuple[str, str, Any]] = []

    def close(self) -> None:
        self.release.set()
        self.pool.shutdown()
        self.session.close()

    def infer(self, request: InferRequest) -> Future[InferResponse]:
        self.known(request.model, request.version)
        self.requests.append(request)
        future: Future[InferResponse] = Future()
        if request.model == "full":
            raise ServingError(Status.RESOURCE_EXHAUSTED, "the queue is full. Fix: wait", retry_after=1.5)
        if request.model == "broken":
            raise RuntimeError("a secret")
        if request.model == "slow":
            self.waiting.append(future)
            self.pool.submit(self._wait, future, request)
        elif request.model == "digits":
            if any(output.name != "logits" for output in request.outputs):
                raise ServingError(Status.INVALID_ARGUMENT, "there is one output, logits. Fix: ask for it")
            return self.pool.submit(self._run, request)
        else:
            future.set_result(self._echo(request))
        return future

    def _wait(self, future: Future[InferResponse], request: InferRequest) -> None:
        while not self.release.wait(0.005):
            if future.cancelled():
                return
            if request.deadline is not None and time.monotonic() > request.deadline:
                future.set_exception(
                    ServingError(Status.DEADLINE_EXCEEDED, "the deadline is over. Fix: give more time")
                )
                return
        if future.set_running_or_notify_cancel():
            self.answered += 1
            future.set_result(self._echo(request))

    def _run(self, request: InferRequest) -> InferResponse:
        (image,) = request.inputs
        logits = self.session.run({image.name: image.data.copy()})["logits"]
        return InferResponse("digits", "1", [InferTensor("logits", "FP32", logits.shape, logits)], request.id)

    def _echo(self, request: InferRequest) -> InferResponse:
        wanted = [output.name for output in request.outputs] or [input_.name for input_ in request.inputs]
        inputs = {input_.name: input_ for input_ in request.inputs}
        if missing := [name for name in wanted if name not in inputs]:
            raise ServingError(Status.INVALID_ARGUMENT, f"there is no output {missing[0]!r}. Fix: ask for another")
        outputs = [
            InferTensor(name, inputs[name].datatype, inputs[name].shape, inputs[name].data.copy()) for name in wanted
        ]
        return InferResponse(request.model, "1", outputs, request.id)

    def known(self, model: str, version: str = "") -> None:
        if model not in self.models or version not in ("", "1"):
            raise ServingError(Status.NOT_FOUND, f"there is no model {model!r} {version}. Fix: name one that is served")

    def live(self) -> bool:
        return True

    def ready(self) -> tuple[bool, str]:
        return not self.why_not_ready, self.why_not_ready

    def model_ready(self, model: str, version: str = "") -> tuple[bool, str]:
        self.known(model, version)
        return (False, "it never ends") if model == "broken" else (True, "")

    def server_metadata(self) -> dict[str, Any]:
        return {"name": "xpuruntime", "version": "0", "extensions": ["binary_tensor_data", "statistics"]}

    def model_metadata(self, model: str, version: str = "") -> dict[str, Any]:
        self.known(model, version)
        return self.models[model]

    def model_config(self, model: str, version: str = "") -> dict[str, Any]:
        self.known(model, version)
        tensors = {
            side: [
                {"name": one["name"], "data_type": f"TYPE_{one['datatype'].replace('BYTES', 'STRING')}",
                 "dims": one["shape"][1:] if model == "digits" else one["shape"]}
                for one in self.models[model][f"{side}s"]
            ]
            for side in ("input", "output")
        }  # fmt: skip
        return {"name": model, "platform": "test", "max_batch_size": 8 if model == "digits" else 0, **tensors}

    def statistics(self, model: str = "", version: str = "") -> dict[str, Any]:
        if model:
            self.known(model, version)
        names = [model] if model else list(self.models)
        duration = {"count": 3, "ns": 1_000_000}
        stats = {"success": duration, "fail": duration, "queue": duration, "compute_infer": duration}
        return {
            "model_stats": [
                {"name": name, "version": "1", "inference_count": 3, "execution_count": 2, "inference_stats": stats}
                for name in names
            ]
        }

    def evidence(self, model: str, kind: str, version: str = "") -> dict[str, Any]:
        self.known(model, version)
        if model != "digits":
            raise ServingError(Status.NOT_FOUND, f"{model!r} has no {kind}. Fix: ask another model")
        return {"kind": kind, **(self.session.plan.to_dict() if kind == "plan" else {})}

    def index(self, ready_only: bool = False) -> list[dict[str, Any]]:
        return [
            {"name": name, "version": "1", "state": "READY", "reason": ""}
            for name in self.models
            if not ready_only or name != "broken"
        ]

    def load(self, model: str, parameters: Any) -> None:
        self.known(model)
        self.loaded.append(("load", model, dict(parameters)))

    def unload(self, model: str, parameters: Any) -> None:
        self.known(model)
        self.loaded.append(("unload", model, dict(parameters)))
