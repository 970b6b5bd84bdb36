# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Compare every operator that an engine takes with ONNX Runtime, and the differences with the engine's known errors.

``python tools/engine_sweep.py openvino`` makes its models of the single-node test cases of the `onnx` package and of
`RECURRENT`: each with every element type that the operator's schema allows, in every version of the operator from opset
13 on, with static and open sizes, with operands that are inputs or constants, and with the case's own and with edge
values. Those of `contrib_operators` have one type and version, and static and open sizes.

It fails on a difference that no row of the engine's ``known_errors.json`` is about, and on a row that no case
shows. Cases run in processes of their own, so that one which ends its process costs only itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter, defaultdict
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx
import onnx.reference
from contrib_operators import UNITS as CONTRIB_UNITS
from contrib_operators import operators
from onnx import defs, helper, numpy_helper
from onnx_backend_suite import DEVICES, cases, directly, load, version

from xpuruntime.engines.known_errors import applies_to, known_errors, nodes_with_errors
from xpuruntime.engines.model import inspect_bytes
from xpuruntime.errors import ModelError
from xpuruntime.runtime.telemetry import log_step

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

OLDEST = 13
#: Recurrent operators and their gates.
RECURRENT = {"LSTM": 4, "GRU": 3, "RNN": 1}
TYPES = {
    f"tensor({name})": np.dtype(kind)
    for name, kind in (
        ("float", "float32"),
        ("double", "float64"),
        *((name, name) for name in ("float16", "bfloat16", "bool")),
        *((f"{sign}int{bits}",) * 2 for sign in ("", "u") for bits in (8, 16, 32, 64)),
    )
}
#: Types of 16 bits, and by how much results may be off in them.
HALVES = {np.dtype("float16"): 2e-2, np.dtype(ml_dtypes.bfloat16): 1e-1}
#: Edge values, without NaN, of which OpenVINO makes numbers, as its page says. Those of 64 bits and of uint32 fit into
#: int32, in which it computes them, as its page says too.
EDGES = {
    "f": [0.5, -0.0, 1.5, -2.5, 2.5, -1e-3, 33.0, -88.5, 3.0, -1.0, 1e4, -7.25],
    "i8": [-127, 127, -7, 5, 100, -100, 3, -1, 0, 64, -64, 2],
    "u8": [255, 7, 200, 3, 128, 0, 129, 1, 64, 250, 5, 2],
    "i16": [-32767, 32767, -7, 300, 181, -200, 3, -1, 0, 2, 30000, 5],
    "u16": [65535, 7, 300, 40000, 256, 0, 3, 1, 255, 2, 60000, 5],
    "i32": [2**24 + 1, -(2**24) - 3, 777777777, -7, 1900000000, 4099, 3, -1, 0, -999999999, 2**31 - 1, 5],
    "u32": [2**24 + 1, 7, 777777777, 2**31 - 1, 4099, 0, 3, 1, 46341, 2, 1900000000, 5],
}
#: What an edge value becomes in an operand that has a domain: operator to the operand and the change.
DOMAINS: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "Div": (1, lambda x: np.where((x == 0) | (x == -1), 3, x)),
    "Mod": (1, lambda x: np.where((x == 0) | (x == -1), 3, x)),
    "Pow": (1, lambda x: np.abs(x.astype(np.float64)) % 4),
    "BitShift": (1, lambda x: x % (8 * x.itemsize)),
    "NonMaxSuppression": (3, lambda x: np.clip(x, 0, 1)),
}
#: Operators whose operands are sizes, places or scales, which edge values would only make invalid or huge, or whose
#: results no rounding could be compared of: a softmax of scores in the thousands, a gate of terms that cancel out.
NO_EDGES = {
    *("Attention", "ConstantOfShape", "DequantizeLinear", "GroupNormalization", "NegativeLogLikelihoodLoss", "OneHot"),
    *("QuantizeLinear", "Range", "Resize", "RoiAlign", "SoftmaxCrossEntropyLoss", *RECURRENT),
}
#: Results that are rounded to an integer: one unit apart, they are equal.
UNITS = {"DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "QuantizeLinear", "Resize", *CONTRIB_UNITS}
#: Of a float outside of the range of an integer, ONNX does not define the cast.
CASTS = {"Cast", "CastLike"}
#: ONNX's reference ignores their input sequence_lens: it computes only what ONNX Runtime refuses.
SIMPLIFIED = set(RECURRENT)
#: ONNX's reference interpolates integers with integer weights.
WITHOUT_REFERENCE = {"GridSample", "Resize"}
#: Made of random numbers, or of more than their inputs.
UNCOMPARED = {"RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial", "Dropout"}
#: Engines that take no open sizes, and engines without infinities and NaN.
STATIC, FINITE = {"qnn"}, {"qnn"}
#: Seconds of a case, after which its process ends, and cases of a process: QNN's simulator hangs after thousands.
_LONGEST, _BATCH = 120, 400


class Base(NamedTuple):
    """A model of one node, and its inputs by name."""

    model: Any
    feeds: dict[str, Any]


class Case(NamedTuple):
    """A variant of a base."""

    name: str
    model: Any
    feeds: dict[str, Any]


@cache
def bases() -> list[Base]:
    """Return a base for each operator, attributes, and ranks of inputs that the test cases of `onnx` have."""
    found: dict[str, Base] = {}
    for case in cases():
        if case.kind != "node" or len(case.model.graph.node) != 1 or case.model.graph.node[0].domain:
            continue
        node = case.model.graph.node[0]
        if not node.input or node.op_type in UNCOMPARED or any(a.type in (5, 10) for a in node.attribute):
            continue
        _, sets = load(case)
        values = sets[0][0]
        if not all(isinstance(one, np.ndarray) and one.dtype in TYPES.values() for one in values):
            continue
        ranks = [one.ndim for one in values], [bool(name) for name in node.input]
        key = repr((node.op_type, sorted(map(str, node.attribute)), ranks))
        names = [value.name for value in case.model.graph.input]
        found.setdefault(key, Base(case.model, dict(zip(names, values, strict=False))))
    return [*found.values(), *_recurrent(), _pooling(), _remainder(), _suppression(), *_shifts(), *_comparisons()]


def _recurrent() -> Iterator[Base]:
    random = np.random.default_rng(0)
    for op, gates in RECURRENT.items():
        for direction in ("forward", "reverse", "bidirectional"):
            ways = 1 + (direction == "bidirectional")
            shapes = {"x": (6, 3, 4), "w": (ways, gates * 8, 4), "r": (ways, gates * 8, 8)}
            feeds: dict[str, Any] = {k: random.standard_normal(v).astype(np.float32) for k, v in shapes.items()}
            feeds["lengths"] = np.array([6, 2, 4], np.int32)
            inputs = ["x", "w", "r", "", "lengths"]
            made = ["y", "last"]
            for more in ({}, {"input_forget": 1}) if op == "LSTM" else ({},):
                yield _base(op, inputs, made, feeds, hidden_size=8, direction=direction, **more)


def _pooling() -> Base:
    """Return a base whose last windows begin within the padding and end beyond."""
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 2, 6, 6)).astype(np.float32)}
    sizes = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    return _base("AveragePool", ["x"], ["y"], feeds, ceil_mode=1, count_include_pad=1, **sizes)


def _remainder() -> Base:
    """Return a base whose dividends are near multiples of their divisors."""
    feeds = {"x": np.array([1, 2, 6], np.float32), "y": np.array([0.2, 0.4, 0.2], np.float32)}
    return _base("Mod", ["x", "y"], ["z"], feeds, fmod=1)


def _suppression() -> Base:
    """Return a base of boxes that do not overlap, without a threshold."""
    boxes = np.array([[[0, 0, 2, 2], [4, 4, 5, 5], [7, 7, 8, 8]]], np.float32)
    feeds = {"boxes": boxes, "scores": np.array([[[0.9, 0.8, 0.7]]], np.float32), "most": np.array([3], np.int64)}
    return _base("NonMaxSuppression", ["boxes", "scores", "most"], ["y"], feeds)


def _shifts() -> Iterator[Base]:
    """Yield bases of so many elements that edge values meet every number of bits."""
    feeds = {"x": np.arange(128, 256, dtype=np.uint8), "y": np.arange(128, dtype=np.uint8) % 8}
    for direction in ("LEFT", "RIGHT"):
        yield _base("BitShift", ["x", "y"], ["z"], feeds, direction=direction)


def _comparisons() -> Iterator[Base]:
    """Yield bases of integers that are equal in fp32."""
    for op in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"):
        x = np.array([2**24, 2**24 + 1], np.int32)
        yield _base(op, ["x", "y"], ["z"], {"x": x, "y": x[::-1].copy()})


def _base(op: str, inputs: list[str], outputs: list[str], feeds: dict[str, Any], **attributes: Any) -> Base:
    node = helper.make_node(op, inputs, outputs, **attributes)
    values = [helper.make_tensor_value_info(k, _code(v.dtype), v.shape) for k, v in feeds.items()]
    graph = helper.make_graph([node], "g", values, [onnx.ValueInfoProto(name=name) for name in outputs])
    return Base(helper.make_model(graph), feeds)


def variants(ops: Collection[str] = (), *, static: bool = False) -> Iterator[Case]:
    """Yield each case, or those of some operators, in an unchanging order."""
    for base in bases():
        node = base.model.graph.node[0]
        opsets = _opsets(node.op_type)
        if not opsets or (ops and node.op_type not in ops):
            continue
        newest = defs.get_schema(node.op_type, opsets[-1])
        taken = max((opset for opset in opsets if opset <= _newest()), default=opsets[-1])
        for opset in opsets:
            kinds = _types(node, newest) if opset in (taken, opsets[-1]) else [("", None)]
            for variable, kind in kinds:
                for edge in (False, True) if node.op_type not in NO_EDGES else (False,):
                    feeds = _feeds(node, newest, base.feeds, variable, kind, edge=edge)
                    if feeds is None:
                        continue
                    for fixed in (False, True) if len(feeds) > 1 else (False,):
                        for opened in (False,) if static else (False, True):
                            model = _model(node, opset, feeds, fixed=fixed, opened=opened)
                            if model is not None:
                                feeds_ = {value.name: feeds[value.name] for value in model.graph.input}
                                words = [node.op_type, f"opset {opset}", _signature(model, feeds)]
                                words += ["constants"] * fixed + ["open"] * opened + ["edge values"] * edge
                                words += [_text(one) for one in node.attribute]
                                yield Case(" | ".join(words), model, feeds_)
    for operator in operators():
        if not ops or operator.name in ops:
            yield from _contrib(operator, static=static)


def _contrib(operator: Any, *, static: bool) -> Iterator[Case]:
    """Yield an operator of another domain with fixed and open sizes."""
    feeds = {name: np.asarray(value) for name, value in operator.feeds.items() if value is not None}
    names = [name if name in feeds else "" for name in operator.feeds]
    node = helper.make_node(operator.op, names, operator.outputs, "node", domain=operator.domain)
    node.attribute.extend(helper.make_attribute(*both) for both in sorted(operator.attributes.items()))
    types = ", ".join(str(feeds[name].dtype) for name in names if name)
    tensors = [numpy_helper.from_array(feeds.pop(name), name) for name in operator.constants]
    outputs = [onnx.ValueInfoProto(name=name) for name in operator.outputs if name]
    imports = [helper.make_opsetid("", _newest()), helper.make_opsetid(operator.domain, 1)]
    for opened in (False,) if static else (False, True):
        opens = {name: opened and name not in operator.kept for name in feeds}
        inputs = [
            helper.make_tensor_value_info(k, _code(v.dtype), _sizes(k, v.shape, opened=opens[k]))
            for k, v in feeds.items()
        ]
        graph = helper.make_graph([node], "g", inputs, outputs, tensors)
        words = [operator.name, "opset 1", types, *["open"] * opened, *map(_text, node.attribute)]
        yield Case(" | ".join(words), helper.make_model(graph, opset_imports=imports, ir_version=10), feeds)


def _signature(model: Any, feeds: dict[str, Any]) -> str:
    return ", ".join(str(feeds[name].dtype) if name in feeds else "-" for name in model.graph.node[0].input)


def _text(attribute: Any) -> str:
    value = helper.get_attribute_value(attribute)
    return f"{attribute.name}={value.decode() if isinstance(value, bytes) else value}"


@cache
def _newest() -> int:
    """Return the newest opset that ONNX Runtime takes: onnx may have newer ones, which few engines take."""
    value = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    graph = helper.make_graph([], "g", [value], [value])
    for opset in range(defs.onnx_opset_version(), OLDEST, -1):
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
        with contextlib.suppress(Exception):
            directly("onnxruntime", model)
            return opset
    return OLDEST


@cache
def _opsets(op: str) -> list[int]:
    """Return an opset for each version of an operator from `OLDEST` on."""
    found = {
        max(OLDEST, schema.since_version)
        for schema in defs.get_all_schemas_with_history()
        if (schema.name, schema.domain) == (op, "")
    }
    return sorted(opset for opset in found if not defs.get_schema(op, opset).deprecated)


def _types(node: Any, schema: Any) -> list[tuple[str, Any]]:
    """Return type variables of a schema and the types that they can have; first none, for the base's own."""
    variables = {_formal(schema, place).type_str for place, name in enumerate(node.input) if name}
    types: list[tuple[str, Any]] = [("", None)]
    for constraint in schema.type_constraints:
        if constraint.type_param_str in variables:
            kinds = [TYPES[one] for one in sorted(constraint.allowed_type_strs) if one in TYPES]
            types += [(constraint.type_param_str, kind) for kind in kinds]
    return types


def _formal(schema: Any, place: int) -> Any:
    return schema.inputs[min(place, len(schema.inputs) - 1)]


def _feeds(
    node: Any, schema: Any, own: dict[str, Any], variable: str, kind: Any, *, edge: bool
) -> dict[str, Any] | None:
    """Return the inputs with the types and values of a variant; ``None`` where it is no other than an earlier one."""
    feeds = dict(own)
    shapes = [value.shape for value in own.values()]
    named = repr((node.op_type, sorted(map(_text, node.attribute)), shapes, variable, str(kind)))
    random = np.random.default_rng(zlib.crc32(named.encode()))  # whatever else is swept
    places = {name: place for place, name in enumerate(node.input) if name in own}
    first = _formal(schema, 0).type_str
    for name, place in places.items():
        value, formal = own[name], _formal(schema, place).type_str
        if variable and formal == variable:
            value = _cast(value, kind)
        if edge and formal == first:
            edges = _edges(value.dtype)
            if edges is not None:
                picked = random.choice(edges, value.shape).astype(value.dtype)
                operand, change = DOMAINS.get(node.op_type, (-1, None))
                value = change(picked).astype(value.dtype) if change is not None and operand == place else picked
        feeds[name] = value
    same = all(
        feeds[name] is own[name] or (feeds[name].dtype == own[name].dtype and np.array_equal(feeds[name], own[name]))
        for name in own
    )
    return None if same and (variable or edge) else feeds


def _cast(value: Any, kind: Any) -> Any:
    if value.dtype == kind:
        return value
    if kind.kind in "iu" and _floating(value.dtype):
        value = np.nan_to_num(np.round(value * 3))
    with np.errstate(invalid="ignore", over="ignore"):
        return (np.abs(value.astype(np.float64)) if kind.kind == "u" else value).astype(kind)


def _floating(kind: Any) -> bool:
    return kind.kind == "f" or kind in HALVES


def _edges(kind: Any) -> Any:
    if _floating(kind):
        return np.array(EDGES["f"])
    if kind.kind in "iu":
        return np.array(EDGES[f"{kind.kind}{min(32, 8 * kind.itemsize)}"], np.int64)
    return None


def _code(kind: Any) -> int:
    return int(helper.np_dtype_to_tensor_dtype(kind))


def _model(node: Any, opset: int, feeds: dict[str, Any], *, fixed: bool, opened: bool) -> Any:
    """Return a model of a node in an opset; ``None`` where the opset does not have it."""
    schema = defs.get_schema(node.op_type, opset)
    newest = defs.get_schema(node.op_type)
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    inner.name = "node"
    while len(inner.input) > schema.max_input:  # such as axes, which were an attribute
        name, formal = inner.input.pop(), _formal(newest, len(inner.input)).name
        if name and (formal not in schema.attributes or name not in feeds or not feeds[name].size):
            return None
        if name:
            inner.attribute.append(helper.make_attribute(formal, feeds[name].tolist()))
    if any(one.name not in schema.attributes for one in inner.attribute):
        return None
    if inner.op_type == "Mod" and _floating(feeds[inner.input[0]].dtype) and not any(a.i for a in inner.attribute):
        return None  # ONNX wants fmod for floats
    used = list(dict.fromkeys(name for name in inner.input if name))
    constants = used[1:] if fixed else []
    if fixed and not constants:
        return None
    inputs = [
        helper.make_tensor_value_info(name, _code(feeds[name].dtype), _sizes(name, feeds[name].shape, opened=opened))
        for name in used
        if name not in constants
    ]
    if opened and not any(feeds[value.name].ndim for value in inputs):
        return None
    outputs = [onnx.ValueInfoProto(name=name) for name in inner.output if name]
    tensors = [numpy_helper.from_array(feeds[name], name) for name in constants]
    graph = helper.make_graph([inner], "g", inputs, outputs, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    try:
        kinds = {
            one.name: one.type
            for one in onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True).graph.output
        }
        for value in model.graph.output:
            value.type.CopyFrom(kinds[value.name])
    except Exception:  # inference has errors of many types
        return None
    return model


def _sizes(name: str, shape: tuple[int, ...], *, opened: bool) -> list[int | str]:
    """Return the sizes of an input: open are all, but for the last of several, which weights often fix."""
    keep = len(shape) - 1 if len(shape) > 1 else -1
    return [f"{name}_{at}" if opened and at != keep else size for at, size in enumerate(shape)]


def truths(case: Case) -> Iterator[list[Any]]:
    """Yield what ONNX Runtime computes, ONNX's reference, and ONNX Runtime in fp32: an engine may follow each."""
    wide = _widened(case)
    ways: list[Callable[[], list[Any]]] = [
        lambda: directly("onnxruntime", case.model)(list(case.feeds.values())),
        lambda: onnx.reference.ReferenceEvaluator(case.model).run(None, case.feeds),
        lambda: directly("onnxruntime", wide.model)(list(wide.feeds.values())),
    ]
    node = case.model.graph.node[0]
    first = case.feeds.get(node.input[0])
    weights = node.op_type in WITHOUT_REFERENCE and first is not None and not _floating(first.dtype)
    if weights or (node.op_type in SIMPLIFIED and node.input[4:5] > [""]):
        del ways[1]
    for compute in ways if node.op_type not in CASTS else ways[:2]:
        with contextlib.suppress(Exception):
            yield [np.asarray(result) for result in compute()]


def _widened(case: Case) -> Case:
    """Return a case with its floats in fp32, of which ONNX Runtime takes all operators."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    floats = {*map(_code, HALVES), onnx.TensorProto.DOUBLE}
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type in floats:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    for tensor in model.graph.initializer:
        if tensor.data_type in floats:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
    feeds = {
        name: value.astype(np.float32) if _code(value.dtype) in floats else value for name, value in case.feeds.items()
    }
    return Case(case.name, model, feeds)


def difference(want: Any, got: Any, step: float, unit: int = 0) -> str:
    """Say where two results differ: integers by more than a unit, but for those outside of int32. Empty: nowhere."""
    if want.dtype not in TYPES.values():
        return ""
    if want.shape != got.shape:
        return f"shape {list(got.shape)} instead of {list(want.shape)}"
    exact, near = want.astype(np.float64), got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        if _floating(want.dtype):
            if want.dtype == np.float64:  # which a plan says is computed in fp32
                step = max(step, 1e-6)
            top = 1e30 if step < min(HALVES.values()) else 6e4
            scale = np.abs(exact[np.isfinite(exact)]).max(initial=0)
            same = np.isclose(near, exact, rtol=step, atol=step / 10 * (1 + scale), equal_nan=True) | (
                np.abs(exact) > top
            )
        else:
            apart = np.abs(near - exact) <= unit if unit else want == got.astype(want.dtype)
            same = apart | (exact >= 2**31) | (exact < -(2**31))
    return "" if same.all() else f"{got[~same][:3].tolist()} instead of {want[~same][:3].tolist()}"


def wrong(engine: str, case: Case) -> str | None:
    """Return how an engine's results differ from ONNX's; empty where they do not, ``None`` where nothing is known.

    That is where the engine refuses the model, or nothing else computes it.
    """
    used = [*case.feeds.values(), *map(numpy_helper.to_array, case.model.graph.initializer)]
    if engine in FINITE and any(_floating(value.dtype) and (np.abs(value) > 6e4).any() for value in used):
        return None  # they overflow
    step = max(HALVES.get(value.dtype, 1e-3) for value in used)
    if engine == "qnn":
        step = max(step, 2e-2)
    elif case.model.graph.node[0].op_type in CASTS:
        step = 0
    try:
        got = [np.asarray(result) for result in directly(engine, case.model)(list(case.feeds.values()))]
    except Exception:
        return None
    found = None
    for want in truths(case):
        pairs = list(zip(*_defined(case, want, got), strict=False))
        if engine in FINITE:
            pairs = [_finite(*pair) for pair in pairs]
        unit = int(case.name.split(" | ")[0] in UNITS)
        said = next((text for value, result in pairs if (text := difference(value, result, step, unit))), "")
        if not said:
            return ""
        found = found or said
    return found


def _finite(want: Any, got: Any) -> tuple[Any, Any]:
    if not _floating(want.dtype) or want.shape != got.shape:
        return want, got
    finite = np.isfinite(want)
    return want[finite], got[finite]


def _defined(case: Case, want: list[Any], got: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return what ONNX defines of results: neither casts out of range, nor places of the largest of equal values."""
    op = case.model.graph.node[0].op_type
    if op == "MaxPool":
        return want[:1], got[:1]
    if op in CASTS and want[0].dtype.kind in "iub" and want[0].shape == got[0].shape:
        (source, *_) = (value for name, value in case.feeds.items() if name == case.model.graph.node[0].input[0])
        if _floating(source.dtype):
            limits = np.iinfo(want[0].dtype) if want[0].dtype.kind != "b" else np.finfo(np.float16)
            inside = (source > float(limits.min)) & (source < float(limits.max))
            return [want[0][inside]], [got[0][inside]]
    return want, got


def work(engine: str, batch: Sequence[Case], out: Path) -> None:
    """Write a line of JSON for each case of a batch."""
    warnings.simplefilter("ignore")
    rows = known_errors(engine)
    with out.open("w", encoding="utf-8") as file:
        for case in batch:
            differs = wrong(engine, case)
            named = []
            with contextlib.suppress(ModelError):
                named = [row.id for _, row in nodes_with_errors(inspect_bytes(case.model), rows)]
            file.write(json.dumps({"case": case.name, "wrong": differs, "rows": named}) + "\n")
            file.flush()


def sweep(engine: str, processes: int, ops: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield what came of each case: how it differs, ``None`` where it was not compared, and the rows about it."""
    left = variants(ops, static=engine in STATIC)
    with tempfile.TemporaryDirectory() as folder:
        running = [_Batch(engine, batch, Path(folder) / f"{place}.jsonl") for place, batch in _batches(left, processes)]
        while running:
            time.sleep(0.1)
            for batch in [*running]:
                if batch.ended():
                    yield from batch.rows()
                    cases_ = batch.left or list(islice(left, _BATCH))
                    running.remove(batch)
                    running += [_Batch(engine, cases_, batch.out)] if cases_ else []


def _batches(left: Iterator[Case], number: int) -> Iterator[tuple[int, list[Case]]]:
    return ((place, cases_) for place in range(number) if (cases_ := list(islice(left, _BATCH))))


class _Batch:
    """Cases in a process of their own, which ends with them, or with a case that takes longer than `_LONGEST`."""

    def __init__(self, engine: str, batch: list[Case], out: Path) -> None:
        out.write_text("", encoding="utf-8")
        self.out, self.batch, self.left = out, batch, list[Case]()
        self._process = multiprocessing.get_context("fork").Process(target=_quietly, args=(engine, batch, out))
        self._process.start()

    def ended(self) -> bool:
        if time.time() - self.out.stat().st_mtime > _LONGEST:
            self._process.kill()
            self._process.join()
        return not self._process.is_alive()

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the cases that ended, and of the case that ended the process; `left` are the others."""
        rows = [json.loads(line) for line in self.out.read_text(encoding="utf-8").splitlines()]
        at, status = len(rows), self._process.exitcode
        if at == len(self.batch):
            return rows
        if status == 1:
            raise SystemExit(f"{self.batch[at].name}: an error of the sweep itself")
        alone = at == 0  # else an earlier case may be the cause: it runs again, alone
        self.left = self.batch[at + alone :]
        return [*rows, {"ended": self.batch[at].name, "alone": alone, "status": status}]


def _quietly(engine: str, batch: Sequence[Case], out: Path) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    os.environ["OMP_NUM_THREADS"] = "1"
    work(engine, batch, out)


def main(arguments: Sequence[str]) -> int:
    """Sweep engines, print what differs, and fail where that is not what their tables say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", nargs="+")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write what came of each case, a line each")
    parser.add_argument("--ops", nargs="*", default=[], help="operators, where not all")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("xpuruntime.steps").setLevel(logging.INFO)
    known = {base.model.graph.node[0].op_type for base in bases()}
    ops = {op for op in known if _opsets(op)} | {operator.name for operator in operators()}
    ops = ops.intersection(options.ops or ops)
    failed = False
    with Path(options.json or os.devnull).open("w", encoding="utf-8") as file:
        for engine in options.engines:
            rows, begun = [], set[str]()
            for row in sweep(engine, options.jobs, options.ops):
                rows.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()
                op = str(row.get("case") or row["ended"]).split(" | ")[0]
                if op not in begun:
                    begun.add(op)
                    log_step(f"{engine}: {op}", len(begun), len(ops))
            failed |= not report(engine, rows, options.ops)
    return int(failed)


def report(engine: str, found: list[dict[str, Any]], ops: Collection[str] = ()) -> bool:
    """Print the outcome of a sweep; whether it is what the engine's table says."""
    here = version(engine)
    number, device = here.rpartition(" ")[2], DEVICES.get(engine, "cpu")
    rows = {row.id: row for row in known_errors(engine) if applies_to(row, number, device)}
    shown = Counter(one for row in found if row.get("wrong") for one in row["rows"])
    compared = [row for row in found if row.get("wrong") is not None]
    about = Counter(one for row in compared for one in row["rows"])
    new: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in compared:
        if row["wrong"] and not rows.keys() & row["rows"]:
            op, _, types, *_ = row["case"].split(" | ")
            new[op, types].append(row)
    gone = [name for name, row in rows.items() if not shown[name] and _swept(row, ops)]
    print(f"{here}: {len(new)} differences without a row, {len(gone)} rows without a difference")
    taken = {row["case"].split(" | ")[0] for row in compared}
    print(f"  {len(compared)} of {len(found)} cases compared, of {len(taken)} operators")
    print(f"  {'row':40} {'cases':>6} {'differ':>7}")
    for name in sorted(about.keys() & rows.keys() | set(gone)):
        print(f"  {name:40} {about[name]:6} {shown[name]:7}{'   gone' if name in gone else ''}")
    for (op, types), cases_ in sorted(new.items()):
        print(f"  new: {op} ({types}), {len(cases_)} cases, such as {cases_[0]['case']}: {cases_[0]['wrong']}")
    for row in found:
        if "ended" in row:
            print(f"  ended its process with {row['status']}, {'' if row['alone'] else 'not '}alone: {row['ended']}")
    return not new and not gone


def _swept(row: Any, ops: Collection[str]) -> bool:
    """Whether a model of a single node can show a row, and all of its operators are swept."""
    alone = not (row.saturates or row.dequantized or row.where == "subgraph")
    return alone and (not ops or set(row.ops) <= set(ops))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
