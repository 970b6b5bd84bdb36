# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Cases of `engine_sweep`: models of one node, with each type, opset, static and open sizes, and edge values."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx
from contrib_operators import operators
from onnx import defs, helper, numpy_helper
from onnx_backend_suite import cases, directly, load

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
#: Edge values. Those of 64 bits and of uint32 fit into int32, in which OpenVINO computes them, as its page says.
EDGES = {
    "nan": [0.5, float("nan"), 1.5, -2.5, float("nan"), -1.0],
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
#: Made of random numbers, or of more than their inputs.
UNCOMPARED = {"RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial", "Dropout"}


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
    values = [helper.make_tensor_value_info(k, type_code(v.dtype), v.shape) for k, v in feeds.items()]
    graph = helper.make_graph([node], "g", values, [onnx.ValueInfoProto(name=name) for name in outputs])
    return Base(helper.make_model(graph), feeds)


def variants(ops: Collection[str] = (), *, static: bool = False) -> Iterator[Case]:
    """Yield each case, or those of some operators, in an unchanging order."""
    for base in bases():
        node = base.model.graph.node[0]
        opsets = opsets_of(node.op_type)
        if not opsets or (ops and node.op_type not in ops):
            continue
        newest = defs.get_schema(node.op_type, opsets[-1])
        taken = max((opset for opset in opsets if opset <= _newest()), default=opsets[-1])
        for opset in opsets:
            kinds = _types(node, newest) if opset in (taken, opsets[-1]) else [("", None)]
            for variable, kind in kinds:
                for edge in ("", "edge values") if node.op_type not in NO_EDGES else ("",):
                    feeds = _feeds(node, newest, base.feeds, variable, kind, edge)
                    if feeds is not None:
                        yield from _cases(node, opset, feeds, edge, static=static)
            if opset == taken and not static:
                feeds = _feeds(node, newest, base.feeds, "", None, "NaN")
                if feeds is not None and any(floating(v.dtype) and np.isnan(v).any() for v in feeds.values()):
                    yield from _cases(node, opset, feeds, "NaN", static=False)
                for feeds in _without_elements(node, base.feeds):
                    yield from _cases(node, opset, feeds, "no elements", static=False)
    for operator in operators():
        if not ops or operator.name in ops:
            yield from _contrib(operator, static=static)


def _cases(node: Any, opset: int, feeds: dict[str, Any], values: str, *, static: bool) -> Iterator[Case]:
    """Yield a variant with operands that are inputs or constants, and static and open sizes."""
    for fixed in (False, True) if len(feeds) > 1 and values in ("", "edge values") else (False,):
        for opened in (False,) if static else (False, True):
            model = _model(node, opset, feeds, fixed=fixed, opened=opened)
            if model is not None:
                feeds_ = {value.name: feeds[value.name] for value in model.graph.input}
                words = [node.op_type, f"opset {opset}", _signature(model, feeds)]
                words += ["constants"] * fixed + ["open"] * opened + [values] * bool(values)
                yield Case(" | ".join([*words, *map(_text, node.attribute)]), model, feeds_)


def _without_elements(node: Any, feeds: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield inputs of which one size of the first is 0, everywhere."""
    first = feeds.get(node.input[0])
    for size in sorted({*first.shape} - {0}) if first is not None else ():
        yield {
            name: value[tuple(slice(0) if length == size else slice(None) for length in value.shape)]
            for name, value in feeds.items()
        }


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
            helper.make_tensor_value_info(k, type_code(v.dtype), _sizes(k, v.shape, opened=opens[k]))
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
def opsets_of(op: str) -> list[int]:
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
            kinds = [TYPES[name] for name in sorted(constraint.allowed_type_strs) if name in TYPES]
            types += [(constraint.type_param_str, kind) for kind in kinds]
    return types


def _formal(schema: Any, place: int) -> Any:
    return schema.inputs[min(place, len(schema.inputs) - 1)]


def _feeds(node: Any, schema: Any, own: dict[str, Any], variable: str, kind: Any, edge: str) -> dict[str, Any] | None:
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
            edges = np.array(EDGES["nan"]) if edge == "NaN" and floating(value.dtype) else _edges(value.dtype)
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
    if kind.kind in "iu" and floating(value.dtype):
        value = np.nan_to_num(np.round(value * 3))
    with np.errstate(invalid="ignore", over="ignore"):
        return (np.abs(value.astype(np.float64)) if kind.kind == "u" else value).astype(kind)


def floating(kind: Any) -> bool:
    """Whether values of a NumPy type are floats, those of 16 bits included."""
    return kind.kind == "f" or kind in HALVES


def _edges(kind: Any) -> Any:
    if floating(kind):
        return np.array(EDGES["f"])
    if kind.kind in "iu":
        return np.array(EDGES[f"{kind.kind}{min(32, 8 * kind.itemsize)}"], np.int64)
    return None


def type_code(kind: Any) -> int:
    """Return ONNX's number of a NumPy type."""
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
    if any(attribute.name not in schema.attributes for attribute in inner.attribute):
        return None
    if inner.op_type == "Mod" and floating(feeds[inner.input[0]].dtype) and not any(a.i for a in inner.attribute):
        return None  # ONNX wants fmod for floats
    used = list(dict.fromkeys(name for name in inner.input if name))
    constants = used[1:] if fixed else []
    if fixed and not constants:
        return None
    inputs = [
        helper.make_tensor_value_info(
            name, type_code(feeds[name].dtype), _sizes(name, feeds[name].shape, opened=opened)
        )
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
            value.name: value.type
            for value in onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True).graph.output
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
