# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Policies and small models for the tests of QNN."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

import xpuruntime as xrt
from xpuruntime.testing import models

if TYPE_CHECKING:
    from pathlib import Path

#: The chip of this process; another one goes to a worker.
SOC = "sm8650"


def chip(soc: str = SOC, **execution: Any) -> dict[str, Any]:
    """Return a policy for one chip."""
    options = {"soc": soc, **execution.pop("options", {})}
    return {"execution": {"provider_options": {"qnn": options}, **execution}}


def open_on(path: Path, soc: str = SOC, **execution: Any) -> xrt.InferenceSession:
    return xrt.InferenceSession(path, device="npu", engine="qnn", policy=chip(soc, **execution))


def unary(op: str, folder: Path, dtype: int = TensorProto.FLOAT) -> Path:
    """Write ``y = relu(op(x @ w))`` with nodes mm, op, relu; for types without products, ``y = op(x)``."""
    weight = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32) / 4
    if dtype == TensorProto.FLOAT:
        nodes = [
            helper.make_node("MatMul", ["x", "w"], ["h"], name="mm"),
            helper.make_node(op, ["h"], ["c"], name=op.lower()),
            helper.make_node("Relu", ["c"], ["y"], name="relu"),
        ]
        weights = [numpy_helper.from_array(weight, "w")]
    else:
        nodes, weights = [helper.make_node(op, ["x"], ["y"], name=op.lower())], []
    value = helper.make_tensor_value_info
    shape: list[Any] = [None] if op == "Unique" else [4, 16]
    graph = helper.make_graph(nodes, op, [value("x", dtype, [4, 16])], [value("y", dtype, shape)], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return models.save(model, folder, f"{op}.onnx")


def calibration(name: str, shape: tuple[int, ...], count: int = 8) -> list[dict[str, Any]]:
    return [{name: array(shape, seed)} for seed in range(100, 100 + count)]


def array(shape: tuple[int, ...], seed: int = 1) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def wrong_in_threads(session: xrt.InferenceSession) -> list[int]:
    """Return the seeds of inputs whose answer was another one while sixteen threads asked."""
    feeds = {seed: {"x": array((4, 64), seed)} for seed in range(16)}
    want = {seed: session.run(inputs)["y"].tobytes() for seed, inputs in feeds.items()}
    wrong: list[int] = []

    def work(seed: int) -> None:
        wrong.extend(seed for _ in range(10) if session.run(feeds[seed])["y"].tobytes() != want[seed])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in feeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong
