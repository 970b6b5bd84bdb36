# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Small graphs for the tests of rewriting, and what one asks of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import numpy_helper, parser

import xpuruntime as xrt
from xpuruntime.engines.model import inspect_model
from xpuruntime.engines.onnxruntime.rewriting.graph import Terms
from xpuruntime.engines.onnxruntime.rewriting.graph_edit import find_rewrites
from xpuruntime.engines.onnxruntime.rewriting.rules import FoundRewrites, RuleQuery
from xpuruntime.engines.written_out import written_out

if TYPE_CHECKING:
    from pathlib import Path

#: Every operation by a kernel that the CPU has.
ALL = {
    "matmul": "cpu.blas",
    "attention": "cpu.reference",
    "layer_norm": "cpu.vectorised",
    "rms_norm": "cpu.vectorised",
    "conv": "cpu.gemm_conv",
}


def graph(
    inputs: str, outputs: str, body: str, weights: dict[str, Any] | None = None, *, opset: int = 21, domains: str = ""
) -> onnx.ModelProto:
    """Return a model from ONNX's own text form, with constants; nodes are named after what they make."""
    head = f'<ir_version: 10, opset_import: ["" : {opset}{domains}]>'
    model = parser.parse_model(f"{head}\ng ({inputs}) => ({outputs}) {{\n{body}\n}}")
    for node in model.graph.node:
        node.name = node.name or f"{node.op_type}_{node.output[0]}"
    for name, value in (weights or {}).items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    return model


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Any:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def found(
    model: onnx.ModelProto, kernels: Any = None, *, device: str = "cpu", tune: bool = False, **terms: Any
) -> FoundRewrites:
    policy = xrt.KernelPolicy(**(kernels or ALL))
    capability = (9, 0) if device.startswith("cuda") else None
    arch = "sm90" if capability else None
    named = onnx.ModelProto()
    named.CopyFrom(model)
    return find_rewrites(named, RuleQuery(policy, device, arch), Terms(device, **terms), capability, tune=tune)


def only(model: onnx.ModelProto, kernels: Any = None) -> Any:
    """Return the one rewrite of a model."""
    result = found(model, kernels)
    assert not result.left, [str(one) for one in result.left]
    assert len(result.rewrites) == 1
    return result.rewrites[0]


def refused(model: onnx.ModelProto, kernels: Any = None) -> str:
    """Return why the one candidate of a model is left."""
    result = found(model, kernels)
    assert not result.rewrites, [str(rewrite) for rewrite in result.rewrites]
    assert len(result.left) == 1
    return result.left[0].reason


def save(model: onnx.ModelProto, folder: Path, name: str = "model.onnx") -> Path:
    path = folder / name
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def present(path: Path, kernels: dict[str, str] = ALL) -> dict[str, str]:
    """Return the keys for operations that a model has: strict refuses those that choose nothing."""
    here = written_out(inspect_model(path).nodes)
    return {op: word for op, word in kernels.items() if op in here}


def session(model: onnx.ModelProto | Path, folder: Path, **policy: Any) -> xrt.InferenceSession:
    path = save(model, folder) if isinstance(model, onnx.ModelProto) else model
    policy.setdefault("mode", "strict")
    policy.setdefault("kernels", present(path))
    return xrt.InferenceSession(path, engine="onnxruntime", device="cpu", policy=policy)


def stock(model: onnx.ModelProto, feeds: dict[str, Any]) -> dict[str, Any]:
    """Return what ONNX Runtime alone makes of it."""
    import onnxruntime as ort

    plain = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in plain.get_outputs()]
    return dict(zip(names, plain.run(names, feeds), strict=True))


def close(got: Any, wanted: Any, rtol: float = 2e-5) -> None:
    scale = float(np.abs(wanted).max(initial=1e-6))
    assert got.shape == wanted.shape
    assert np.abs(np.asarray(got, np.float64) - np.asarray(wanted, np.float64)).max(initial=0.0) <= rtol * scale


def accounted(opened: xrt.InferenceSession, report: Any) -> None:
    """Every source node stands in exactly one unit."""
    nodes = sorted(name for unit in report.units for name in unit.source_nodes)
    assert nodes == sorted(node.name for node in opened.model.nodes)
