# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The engine suite on PyTorch: its ONNX models, computed by modules and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from xpuruntime.inference import InferenceSession
from xpuruntime.testing import EngineSuite

torch = pytest.importorskip("torch")


class Computed(torch.nn.Module):
    """Computes an ONNX graph node by node."""

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__()
        self.nodes = [(n.op_type, list(n.input), list(n.output)) for n in model.graph.node]
        self.results = [o.name for o in model.graph.output]
        for weight in model.graph.initializer:
            self.register_buffer(weight.name, torch.from_numpy(numpy_helper.to_array(weight).copy()))
        self.pads = {n.output[0]: 1 for n in model.graph.node if n.op_type == "Conv"}

    def compute(self, **inputs: Any) -> dict[str, Any]:
        values = {**dict(self.named_buffers()), **inputs}
        for op, names, (output,) in self.nodes:
            given = [values[name] for name in names]
            values[output] = {
                "MatMul": lambda a, b: a @ b,
                "Gemm": lambda a, b: a @ b,
                "Relu": torch.relu,
                "Add": torch.add,
                "Mul": torch.mul,
                "Identity": torch.clone,
                "Conv": lambda a, b: torch.conv2d(a, b, padding=1),
                "GlobalAveragePool": lambda a: a.mean((2, 3), keepdim=True),
                "Flatten": lambda a: a.flatten(1),
            }[op](*given)
        return {name: values[name] for name in self.results}


class OfOne(Computed):
    def forward(self, x: Any) -> dict[str, Any]:
        return self.compute(x=x)


class OfTwo(Computed):
    def forward(self, a: Any, b: Any) -> dict[str, Any]:
        return self.compute(a=a, b=b)


class TestTorchCpu(EngineSuite):
    engine = "torch"
    device = "cpu"
    symbol = r"[ax]\.0"
    unsupported = {  # noqa: RUF012 - overrides a ClassVar
        "external_data": "a program is one archive, with its weights in it",
        "nameless_nodes": "export names every node",
    }

    @pytest.fixture
    def mlp(self, tmp_path: Path) -> Path:
        from xpuruntime.testing import models

        return exported(models.save(models.mlp(), tmp_path))

    def open(self, path: Path, **options: Any) -> InferenceSession:
        return super().open(exported(path), **options)


def exported(path: Path) -> Path:
    """Return the program that computes an ONNX file, written beside it."""
    if path.suffix == ".pt2":
        return path
    model = onnx.load(path)
    size = torch.export.Dim("N", min=0)
    example, dynamic = {}, {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        example[value.name] = torch.from_numpy(np.ones([d.dim_value or 3 for d in dims], dtype))
        dynamic[value.name] = {i: size for i, d in enumerate(dims) if d.dim_param}
    free = dynamic if any(dynamic.values()) else None
    module = (OfOne if len(example) == 1 else OfTwo)(model).eval()
    program = torch.export.export(module, (), example, dynamic_shapes=free)
    target = path.with_suffix(".pt2")
    torch.export.save(program, target)
    return target
