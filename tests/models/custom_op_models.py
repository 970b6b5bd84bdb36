# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Models of one operator of the domain `xpuruntime`, sessions that have it, and what it should give."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from xpuruntime import KernelPolicy, Policy, _core
from xpuruntime.ops.call_context import compile_rules, prepare

ort.set_default_logger_severity(4)

ELEMENTS = {
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
    "fp64": TensorProto.DOUBLE,
    "bool": TensorProto.BOOL,
}
NUMPY: dict[str, Any] = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp64": np.float64,
    "bool": np.bool_,
}
#: Relative to the largest value: a rounding of the result, and of sums that are kept in fp32. In fp64 what counts is
#: that attributes, such as epsilon and scale, are fp32.
TOLERANCE = {"fp32": 2e-5, "fp16": 2e-3, "bf16": 1.6e-2, "fp64": 2e-7}


class Normal:
    """Draws float32 arrays from the standard normal distribution."""

    def __init__(self, seed: int) -> None:
        self.restart(seed)

    def restart(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def __call__(self, *shape: int) -> Any:
        return self._generator.standard_normal(shape).astype(np.float32)


def name_rules(mode: str = "strict", **policy: Any) -> _core.OnnxRuntimeRules:
    """Name the rules of ``KernelPolicy(**policy)``."""
    return _core.OnnxRuntimeRules(compile_rules(Policy(kernels=KernelPolicy(**policy), mode=mode)))


def node(op: str, inputs: list[str], outputs: list[str], rules: _core.OnnxRuntimeRules, **attributes: Any) -> Any:
    name = attributes.pop("name", f"{op}_{outputs[0]}")
    given = {"rules": rules.key, "node": f"source/{name}", **attributes}
    return helper.make_node(op, inputs, outputs, name=name, domain="xpuruntime", **given)


def model(
    nodes: list[Any],
    inputs: dict[str, tuple[str, Any]],
    outputs: dict[str, str],
    weights: dict[str, np.ndarray[Any, Any]] | None = None,
) -> bytes:
    """Return a model; `inputs` are ``name: (dtype, shape or None)``, `outputs` ``name: dtype``."""
    graph = helper.make_graph(
        nodes,
        "custom",
        [helper.make_tensor_value_info(name, ELEMENTS[dtype], shape) for name, (dtype, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, ELEMENTS[dtype], None) for name, dtype in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()],
    )
    opsets = [
        helper.make_opsetid("", 20),
        helper.make_opsetid("xpuruntime", 1),
        helper.make_opsetid("com.microsoft", 1),
    ]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def open_session(source: bytes, providers: Any = ("CPUExecutionProvider",), **options: Any) -> ort.InferenceSession:
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = 1
    settings.log_severity_level = 4
    for key, value in options.items():
        setattr(settings, key, value)
    settings.register_custom_ops_library(_core.__file__)
    if "CPUExecutionProvider" not in providers:
        settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    return ort.InferenceSession(source, settings, providers=list(providers), enable_fallback=0)


def one_op(
    op: str,
    dtype: str,
    operands: dict[str, np.ndarray[Any, Any]],
    rules: _core.OnnxRuntimeRules,
    providers: Any = ("CPUExecutionProvider",),
    constant: tuple[str, ...] = (),
    **attributes: Any,
) -> np.ndarray[Any, Any]:
    """Run one operator on operands in fp32 (or bool) that the graph casts to `dtype`, and give its result in fp64.

    Operands whose name is in `constant` become initializers of `dtype`; names that end in ``_fp32`` are not cast.
    """
    nodes, inputs, names, weights = [], {}, [], {}
    for name, value in operands.items():
        kind = "bool" if value.dtype == np.bool_ else ("fp32" if name.endswith("_fp32") else dtype)
        if name in constant:
            weights[name] = value.astype(NUMPY[kind])
            names.append(name)
        elif kind in ("bool", "fp32"):
            inputs[name] = (kind, [f"{name}{i}" for i in range(value.ndim)])
            names.append(name)
        else:
            inputs[name] = ("fp32", [f"{name}{i}" for i in range(value.ndim)])
            nodes.append(helper.make_node("Cast", [name], [f"{name}_cast"], to=ELEMENTS[dtype]))
            names.append(f"{name}_cast")
    nodes.append(node(op, names, ["y"], rules, **attributes))
    nodes.append(helper.make_node("Cast", ["y"], ["z"], to=ELEMENTS["fp32" if dtype != "fp64" else "fp64"]))
    session = open_session(model(nodes, inputs, {"z": "fp64" if dtype == "fp64" else "fp32"}, weights), providers)
    feeds = {name: value for name, value in operands.items() if name not in constant}
    (result,) = session.run(None, feeds)
    return np.asarray(result, np.float64)


def rounded(value: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Return the values in fp64 as `dtype` holds them."""
    return value.astype(NUMPY[dtype]).astype(np.float64)


def activate(x: np.ndarray[Any, Any], activation: str) -> np.ndarray[Any, Any]:
    if activation == "relu":
        return np.maximum(x, 0)
    if activation == "silu":
        return np.asarray(x / (1 + np.exp(-x)))
    if activation == "gelu":
        return np.asarray(0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2))))
    if activation == "gelu_tanh":
        return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))
    return x


def attention(
    q: np.ndarray[Any, Any],
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    mask: np.ndarray[Any, Any] | None = None,
    causal: int = 0,
    scale: float | None = None,
) -> np.ndarray[Any, Any]:
    """Return attention over [batch, heads, length, head_dim]; a row that sees nothing is 0."""
    groups = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, groups, 1), np.repeat(v, groups, 1)
    scores = q @ k.swapaxes(-1, -2) * (scale if scale is not None else 1 / np.sqrt(q.shape[-1]))
    rows, columns = scores.shape[-2:]
    if causal:
        shift = columns - rows if causal == 2 else 0
        scores = np.where(np.tri(rows, columns, shift, dtype=bool), scores, -np.inf)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == np.bool_ else scores + mask
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(-1, keepdims=True)
    return np.asarray(weights / np.where(total == 0, 1, total) @ v)


def normalize(
    x: np.ndarray[Any, Any],
    scale: np.ndarray[Any, Any],
    bias: np.ndarray[Any, Any] | None = None,
    axis: int = -1,
    epsilon: float = 1e-5,
    *,
    rms: bool = False,
) -> np.ndarray[Any, Any]:
    axes = tuple(range(axis % x.ndim, x.ndim))
    centred = x if rms else x - x.mean(axes, keepdims=True)
    result = centred / np.sqrt((centred**2).mean(axes, keepdims=True) + epsilon) * scale
    return np.asarray(result if bias is None else result + bias)


def stock_conv(operands: dict[str, Any], dtype: str, attributes: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return what ONNX Runtime's own operator gives on the CPU, in float32, for operands rounded to `dtype`."""
    stated = dict(attributes)
    activation = stated.pop("activation", "none")
    stock = helper.make_node("Conv", list(operands), ["y"], **stated)
    session = open_session(model([stock], {n: ("fp32", v.shape) for n, v in operands.items()}, {"y": "fp32"}))
    values = {n: rounded(v, dtype).astype(np.float32) for n, v in operands.items()}
    return activate(session.run(None, values)[0].astype(np.float64), activation)


def heads_first(x: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Return [batch, length, heads * head_dim] as [batch, heads, length, head_dim]."""
    return x.reshape(x.shape[0], x.shape[1], heads, -1).swapaxes(1, 2)


def assert_close(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], dtype: str) -> None:
    assert found.shape == wanted.shape
    if wanted.size:
        largest = max(float(np.abs(wanted).max()), 1e-3)
        error = float(np.abs(found - wanted).max()) / largest
        assert error <= TOLERANCE[dtype], f"off by {error:.2e} of the largest value"


def decisions_of(name: str) -> list[dict[str, Any]]:
    """Return the decisions for the node that `node` gave this name."""
    return [d for d in _core.Dispatcher.instance().decisions() if d["node"] == f"source/{name}"]


prepare()
