# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Models and kernels that break exactly one grade of determinism, each at a known node."""

from __future__ import annotations

import threading

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

WIDTH = 16

_runs = 0
_in_flight = 0
_lock = threading.Lock()


def model(nodes: list[onnx.NodeProto], *, outputs: tuple[str, ...] = ("y",), batch: int | str = "N") -> onnx.ModelProto:
    """Return ``h = x @ w`` at the node ``mm``, and then `nodes`."""
    weight = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32)
    first = helper.make_node("MatMul", ["x", "w"], ["h"], name="mm")
    graph = helper.make_graph(
        [first, *nodes],
        "planted",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, WIDTH])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(weight, "w")],
    )
    return onnx.shape_inference.infer_shapes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    )


def noisy() -> onnx.ModelProto:
    """Return a model with noise of its own: no two runs are the same."""
    return model(
        [
            helper.make_node("Relu", ["h"], ["r"], name="relu"),
            helper.make_node("RandomNormalLike", ["r"], ["noise"], name="noise"),
            helper.make_node("Add", ["r", "noise"], ["s"], name="add"),
            helper.make_node("Tanh", ["s"], ["y"], name="tanh"),
        ]
    )


def centred() -> onnx.ModelProto:
    """Return a model that subtracts the mean over the batch: each row depends on the others."""
    return model(
        [
            helper.make_node("Relu", ["h"], ["r"], name="relu"),
            helper.make_node("ReduceMean", ["r"], ["mean"], name="mean", axes=[0], keepdims=1),
            helper.make_node("Sub", ["r", "mean"], ["y"], name="centre"),
        ]
    )


def summed() -> onnx.ModelProto:
    """Return a model with one output without a batch dimension beside one with it."""
    return model(
        [
            helper.make_node("Relu", ["h"], ["y"], name="relu"),
            helper.make_node("ReduceMean", ["h"], ["total"], name="total", keepdims=0),
        ],
        outputs=("y", "total"),
    )


def by_size() -> onnx.ModelProto:
    """Return a model that divides by the size of the batch: rows change with the size, and not with their place."""
    return model(
        [
            helper.make_node("Shape", ["h"], ["size"], name="size", start=0, end=1),
            helper.make_node("Cast", ["size"], ["count"], name="count", to=TensorProto.FLOAT),
            helper.make_node("Div", ["h", "count"], ["y"], name="divide"),
        ]
    )


@torch.library.custom_op("xpuruntime_planted::run_counter", mutates_args=())
def run_counter(x: torch.Tensor) -> torch.Tensor:
    """Change the last bit of one element in every fifth run."""
    global _runs
    _runs += 1
    out = x.clone()
    if _runs % 5 == 0:
        out[0, 0] = torch.nextafter(out[0, 0], torch.tensor(float("inf")))
    return out


@torch.library.custom_op("xpuruntime_planted::in_flight", mutates_args=())
def in_flight(x: torch.Tensor) -> torch.Tensor:
    """Give other bits while another thread is in it too, as a kernel that shares its scratch memory does."""
    global _in_flight
    with _lock:
        _in_flight += 1
    try:
        out = x.clone()
        threading.Event().wait(0.002)
        if _in_flight > 1:
            out += 1.0
        return out
    finally:
        with _lock:
            _in_flight -= 1


@torch.library.custom_op("xpuruntime_planted::hash_seed", mutates_args=())
def hash_seed(x: torch.Tensor) -> torch.Tensor:
    """Add what Python's hash of a text is in this process."""
    return x + float(hash("planted") % 100_003)


@torch.library.custom_op("xpuruntime_planted::first_row", mutates_args=())
def first_row(x: torch.Tensor) -> torch.Tensor:
    """Change the last bit of the first row of every batch, as a kernel with a special first tile does."""
    out = x.clone()
    out[0] = torch.nextafter(out[0], torch.full_like(out[0], float("inf")))
    return out


for _op in (run_counter, in_flight, hash_seed, first_row):
    _op.register_fake(torch.empty_like)


class Planted(torch.nn.Module):
    """``relu(planted(x @ w))``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.planted = getattr(torch.ops.xpuruntime_planted, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute it."""
        return torch.relu(self.planted(self.linear(x)))


class BatchNorm(torch.nn.Module):
    """A linear layer and a batch normalization with the statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute it."""
        return torch.nn.functional.batch_norm(self.linear(x), None, None, training=True)


def exported(module: torch.nn.Module, *, rows: int = 4) -> torch.export.ExportedProgram:
    """Return a program with an open batch."""
    sizes = ({0: torch.export.Dim("N", min=1, max=64)},)
    return torch.export.export(module.eval(), (torch.randn(rows, WIDTH),), dynamic_shapes=sizes)
