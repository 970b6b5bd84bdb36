# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Models for the tests of the page: one of many nodes, and one whose names are markup."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["HOSTILE", "deep_model", "hostile_model"]

#: What must do nothing: it ends a script, a style, an attribute and a comment, and would say so in `window.hit`.
HOSTILE = (
    "</script></style>--><img src=x onerror=\"window.hit='img'\">"
    "<svg onload=\"window.hit='svg'\">'\"&amp;\u2028{{data}}"
)


def deep_model(path: Path, nodes: int) -> Path:
    """Write residual blocks of eight nodes, with names of paths as exporters give them."""
    protos: list[onnx.NodeProto] = []

    def add(op: str, inputs: list[str], name: str, **attributes: int) -> str:
        full = f"/model/blocks.{len(protos) // 8}/{name}"
        protos.append(helper.make_node(op, inputs, [f"{full}_output_0"], full, **attributes))
        return protos[-1].output[0]

    flow = "x"
    while len(protos) + 8 <= nodes:
        normal = add("LayerNormalization", [flow, "scale"], "norm/LayerNormalization", axis=-1)
        left = add("MatMul", [normal, "weight"], "attn/q/MatMul")
        right = add("MatMul", [normal, "weight"], "attn/k/MatMul")
        both = add("Add", [left, right], "attn/Add")
        soft = add("Softmax", [both], "attn/Softmax", axis=-1)
        up = add("MatMul", [soft, "weight"], "mlp/up/MatMul")
        active = add("Relu", [up], "mlp/act/Relu")
        flow = add("Add", [flow, active], "Add")
    while len(protos) < nodes - 1:
        flow = add("Sigmoid", [flow], f"tail/Sigmoid_{len(protos)}")
    if len(protos) < nodes:
        add("Tanh", [flow], "Tanh")
    weights = [
        numpy_helper.from_array(np.eye(32, dtype=np.float32), "weight"),
        numpy_helper.from_array(np.ones(32, np.float32), "scale"),
    ]
    return _save(path, protos, [8, 32], weights)


def hostile_model(path: Path) -> Path:
    """Write three nodes whose names and tensors are markup."""
    nodes = [
        helper.make_node("Relu", ["x"], [f"a{HOSTILE}"], f"one{HOSTILE}"),
        helper.make_node("Sin", [f"a{HOSTILE}"], [f"b{HOSTILE}"], f"two/{HOSTILE}"),
        helper.make_node("Add", [f"b{HOSTILE}", f"a{HOSTILE}"], ["y"], "three"),
    ]
    return _save(path, nodes, [2, 3], [])


def long_named_model(path: Path) -> Path:
    """Write two nodes with names of thousands of letters, in which nothing invites a line to break."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a" * 5000], "n" * 5000),
        helper.make_node("Sin", ["a" * 5000], ["y"], "\u5c42" * 5000),
    ]
    return _save(path, nodes, [2, 3], [])


def _save(path: Path, nodes: list[onnx.NodeProto], shape: list[int], weights: list[onnx.TensorProto]) -> Path:
    output = nodes[-1].output[0]
    graph = helper.make_graph(
        nodes,
        path.stem,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)],
        weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path
