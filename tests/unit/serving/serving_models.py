# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Models, requests and an engine with faults for the tests of serving."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from disguised_engine import DisguisedEngine

from xpuruntime.serving.batching.layout import DATATYPE_OF
from xpuruntime.serving.messages import InferRequest, InferTensor, RequestedOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import onnx

    from xpuruntime.engines.base import Judgement, LoadedModel, Request
    from xpuruntime.runtime.machine import Machine

WAIT = 60.0


def ask(
    model: str, arrays: Mapping[str, np.ndarray], *, outputs: Sequence[str] = (), datatypes: Any = None, **more: Any
) -> InferRequest:
    """Return a request of arrays."""
    tensors = [
        InferTensor(name, (datatypes or {}).get(name) or DATATYPE_OF[array.dtype.name], array.shape, array)
        for name, array in arrays.items()
    ]
    return InferRequest(model, tensors, outputs=[RequestedOutput(name) for name in outputs], **more)


def rows_of(value: float, rows: int = 1, width: int = 64) -> np.ndarray:
    return np.full((rows, width), value, np.float32)


def tokens(opset: int = 17) -> onnx.ModelProto:
    """Return a model of `ids` and `mask` int64 [N, L]: `tokens` float [N, L] is ids * mask, `total` [N] its sum."""
    from onnx import TensorProto, helper, numpy_helper

    nodes = [
        helper.make_node("Mul", ["ids", "mask"], ["kept"], name="mul"),
        helper.make_node("Cast", ["kept"], ["tokens"], name="cast", to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["tokens", "axes"], ["total"], name="sum", keepdims=0),
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["N", "L"]) for name in ("ids", "mask")]
    outputs = [
        helper.make_tensor_value_info("tokens", TensorProto.FLOAT, ["N", "L"]),
        helper.make_tensor_value_info("total", TensorProto.FLOAT, ["N"]),
    ]
    axes = [numpy_helper.from_array(np.array([1], np.int64), "axes")]
    graph = helper.make_graph(nodes, "tokens", inputs, outputs, axes)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


class FaultyEngine(DisguisedEngine):
    """ONNX Runtime with a hook before each run: it may raise, wait, or note what came."""

    name: ClassVar[str] = "faulty"

    def __init__(self, before: Callable[[dict[str, Any]], None] = lambda feeds: None) -> None:
        self.before = before
        self.armed = True
        self.seen: list[dict[str, tuple[int, ...]]] = []

    def load(self, request: Request, judgement: Judgement, machine: Machine) -> LoadedModel:
        loaded = super().load(request, judgement, machine)
        run = loaded.run

        def hooked(feeds: Any, stream: Any = None) -> dict[str, Any]:
            if self.armed:
                self.seen.append({name: array.shape for name, array in feeds.items()})
                self.before(dict(feeds))
            return run(feeds, stream)

        loaded.run = hooked  # type: ignore[method-assign]
        loaded.runner = lambda: hooked  # type: ignore[method-assign]
        return loaded


class Gate:
    """Lets runs through when it is open, and says when one has come."""

    def __init__(self) -> None:
        self.come, self.open = threading.Event(), threading.Event()

    def __call__(self, feeds: dict[str, Any]) -> None:
        self.come.set()
        assert self.open.wait(WAIT)


def serve_hooked(
    serve: Callable[..., Any], models: dict[str, Any], before: Callable[[dict[str, Any]], None]
) -> tuple[Any, FaultyEngine]:
    """Serve models with a hook before each run, once they are loaded."""
    engine = FaultyEngine(before)
    engine.armed = False
    service = serve(models, registry=engine.registry())
    engine.armed = True
    return service, engine


def serve_gated(serve: Callable[..., Any], models: dict[str, Any]) -> tuple[Any, Gate]:
    """Serve models whose runs wait for a gate, once they are loaded."""
    gate = Gate()
    return serve_hooked(serve, models, gate)[0], gate


def eventually(true: Callable[[], Any], timeout: float = WAIT) -> Any:
    """Wait until something is true and return it."""
    end = time.monotonic() + timeout
    while not (found := true()):
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.002)
    return found
