# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Known silent errors of engines: operators that a version computes otherwise than ONNX defines them, without an error.

The rows are data, in ``known_errors.json`` beside each engine's adapter; tests run each row's model on the installed
version and fail where the row and the version no longer agree.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from xpuruntime.engines.model.external import inline_functions
from xpuruntime.engines.model.graph import inferred, normal_domain, subgraphs
from xpuruntime.engines.quantization.judge import saturates_on, saturating_nodes
from xpuruntime.evidence.records import Control

if TYPE_CHECKING:
    import onnx

    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.runtime.machine import EngineFacts

#: The key under which plans and reports name such nodes; it is in no policy file.
KEY = "execution.operators"
_NAMED = 4
_ELSEWHERE = "take another engine (execution: {engine: onnxruntime, device: cpu})"
#: Operators that make sizes, and those that keep elements.
_OF_SIZES, _MOVING = ("Shape", "Size"), ("Identity", "Reshape", "Squeeze", "Unsqueeze")
#: ONNX's codes of float and integers, the elements of a constant that is looked into, and integers before fp32's gaps.
_NUMBERS, _FEW, _EXACT = (1, 2, 3, 4, 5, 6, 7, 12, 13), 1024, (1 - 2**24, 2**24 - 1)


class KnownError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One silent error, and the nodes that it concerns.

    Attributes
    ----------
    id : str
    ops : tuple of str
        Operators: those of another domain than the standard's with it, such as ``"com.microsoft.QLinearAdd"``.
    wrong : str
        What the engine computes, as the end of a sentence that opens with the node.
    first, last : str
        Versions that are known to be wrong, both included; ``"2026.4"`` stands for all of 2026.4.
    devices : tuple of str
        Kinds of devices; empty: all.
    opsets : (int, int) or None
        First and last version of the ONNX standard.
    attributes : dict of str to list
        Attributes and the values with which they are wrong, all where none is listed; one that is left out of a node
        is the operator's default.
    other_than : dict of str to int
        Attributes of which one must be there with an element other than this.
    inputs, outputs : tuple of int
        Optional inputs and outputs that must be there.
    constant, variable : tuple of int
        Inputs that must be constants, and those that must not.
    rank : int
        The least rank of its first input.
    right_within : dict of int to (int, int)
        Inputs and bounds, both included: it is right where each is a constant between them and no size of the first
        input is open.
    right_of_fractions : tuple of int
        Inputs: it is right where each is a constant that is no integer.
    lengths_differ : bool
        Whether the sizes of its first two inputs along their axis before the last must not be known to be equal.
    last_window : {"", "partial", "outside"}
        Where the last window of a pooling with ``ceil_mode`` must be, along one axis: ``"partial"`` begins within the
        input and its padding, and ends beyond; ``"outside"`` begins behind the input.
    inner_axis : bool
        Whether the attribute ``axis``, which defaults to 1, must be another one than the last of at least three.
    where : {"anywhere", "subgraph"}
        ``"subgraph"``: in the main graph the adapter avoids it.
    dequantized : bool
        Whether its first input must be what a DequantizeLinear makes: the engine computes it in integers.
    types : tuple of str
        Element types of the first input, such as ``"int8"``; empty: all.
    open, fixed : bool
        Whether the first input must have a size that the graph leaves open; or must not, as far as is known.
    empty : tuple of int
        Inputs that must have a size of 0.
    sized : dict of int to int
        Inputs and an axis of each along which its size must be fixed.
    large : bool
        Whether only values beyond 2**24 are wrong. Values computed of sizes and small constants alone are below.
    compares : bool
        Whether `large` values are wrong only where no operand is known to be small.
    values : {"", "nan", "empty"}
        What an input of the model must hold to be computed wrongly: a NaN, or no element at all. No plan knows that,
        so sessions look at their inputs, see `inputs_with_errors`.
    simulator : bool
        Whether it was seen on the engine's simulator alone, and no device was run: there it is only reported.
    saturates : bool
        Whether it is about 8-bit products of a processor that cuts their sums off, see `saturating_nodes`.
    reference : str
        An issue of the engine's tracker, or the case of the ONNX backend tests that shows it.
    elsewhere : bool
        Whether ONNX Runtime takes such a node; else `instead` is all that helps.
    instead : str
        What makes it right on this engine, as the end of a list of things to do; empty where nothing does.
    """

    id: str
    ops: tuple[str, ...]
    wrong: str
    first: str
    last: str
    reference: str
    devices: tuple[str, ...] = ()
    opsets: tuple[int, int] | None = None
    attributes: dict[str, list[int | str]] = {}
    other_than: dict[str, int] = {}
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    constant: tuple[int, ...] = ()
    variable: tuple[int, ...] = ()
    rank: int = 0
    right_within: dict[int, tuple[int, int]] = {}
    right_of_fractions: tuple[int, ...] = ()
    lengths_differ: bool = False
    last_window: Literal["", "partial", "outside"] = ""
    inner_axis: bool = False
    where: Literal["anywhere", "subgraph"] = "anywhere"
    dequantized: bool = False
    types: tuple[str, ...] = ()
    open: bool = False
    fixed: bool = False
    empty: tuple[int, ...] = ()
    sized: dict[int, int] = {}
    large: bool = False
    compares: bool = False
    values: Literal["", "nan", "empty"] = ""
    simulator: bool = False
    saturates: bool = False
    elsewhere: bool = True
    instead: str = ""


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rows of an engine, and the versions whose every operator was compared with ONNX Runtime to make them."""

    swept: tuple[str, ...] = ()
    rows: tuple[KnownError, ...] = ()


@cache
def _table(engine: str) -> _Table:
    path = Path(__file__).parent / engine / "known_errors.json"
    if not engine.isidentifier() or not path.is_file():
        return _Table()
    return msgspec.json.decode(path.read_bytes(), type=_Table)


def known_errors(engine: str) -> tuple[KnownError, ...]:
    """Return the rows of an engine; empty for one without a table."""
    return _table(engine).rows


def not_swept(engine: str, version: str | None) -> str | None:
    """Say that nobody compared the operators of an engine's version; ``None`` where somebody did, or has no table."""
    swept = _table(engine).swept
    if (
        not swept
        or version is None
        or any(_numbers(version)[: len(_numbers(rule))] == _numbers(rule) for rule in swept)
    ):
        return None
    return (
        f"{engine} {version} was not swept for silent errors: the known ones are of {', '.join(swept)}. "
        "See xrt compare for whether it computes this model right"
    )


def applies_to(error: KnownError, version: str | None, device: str) -> bool:
    """Whether a row is about a version of its engine and a device. A version that is not known may be any."""
    if error.devices and device.partition(":")[0] not in error.devices:
        return False
    if version is None:
        return True
    here = _numbers(version)
    first, last = _numbers(error.first), _numbers(error.last)
    return first <= here and here[: len(last)] <= last


def nodes_with_errors(
    model: ModelInfo, errors: tuple[KnownError, ...], features: Collection[str] = ()
) -> list[tuple[str, KnownError]]:
    """Return the nodes of a model that rows are about, by name, with their row."""
    ops = {name.replace(":", ".") for name in model.ops}
    saturating = [error for error in errors if error.saturates] if saturates_on(features) else []
    saturated = [(name, error) for error in saturating for name in saturating_nodes(model)]
    wanted = [error for error in errors if not (error.saturates or error.values)]
    wanted = [error for error in wanted if model.functions or ops.intersection(error.ops)]
    if not wanted:
        return saturated
    proto = model.named_proto()
    if proto.functions:
        proto = inline_functions(proto, model.path)
    opset = next((int(o.version) for o in proto.opset_import if normal_domain(o.domain) == ""), 1)
    graph = inferred(proto, keep=8 * _FEW).graph
    values = _stated(graph)
    for name in {weight.name for weight in proto.graph.initializer} - {value.name for value in proto.graph.input}:
        # Large ones are inputs of `graph`.
        values[name] = msgspec.structs.replace(values.get(name, _UNKNOWN), constant=True)
    nodes = list(_nodes(graph, ChainMap(values)))
    integers = {name for node, _, _ in nodes if node.op_type == "DequantizeLinear" for name in node.output}
    return saturated + [
        (str(node.name), error)
        for node, inside, values in nodes
        for error in wanted
        if _operator(node) in error.ops and _concerns(error, node, opset, values, inside)
        if not error.dequantized or node.input[0] in integers
    ]


#: Operators behind which there is no NaN, or no empty tensor, any more.
_ENDS = {"nan": ("IsNaN", "Shape", "Size"), "empty": ("Concat", "Shape", "Size")}
#: Operators of conditions.
_LOGICAL = ("And", "Cast", "Identity", "Not", "Or")


def inputs_with_errors(model: ModelInfo, error: KnownError) -> dict[str, str]:
    """Return inputs of a model whose values reach nodes that a row with `values` is about, each with such a node.

    A NaN that the model itself looks for and replaces reaches nothing.
    """
    if model.functions or any(node.graph and node.op in error.ops for node in model.nodes):
        return {value.name: "a function or subgraph" for value in model.inputs}
    nodes = [node for node in model.nodes if not node.graph]
    replaced, reached = set[str](), dict[str, str]()
    for node in nodes:
        if node.op == "IsNaN" or (node.op in _LOGICAL and replaced.intersection(node.inputs)):
            replaced.update(node.outputs)
    for node in reversed(nodes):
        if not node.domain and node.op in error.ops:  # the inputs of an attention after the fourth are its past
            inputs = node.inputs[:4] if node.op == "Attention" else node.inputs
            reached |= dict.fromkeys(inputs, f"{node.op} {node.name!r}")
        elif node.op not in _ENDS[error.values] and not (node.op == "Where" and node.inputs[0] in replaced):
            behind = next((reached[output] for output in node.outputs if output in reached), None)
            reached |= dict.fromkeys(node.inputs, behind) if behind is not None else {}
    return {value.name: reached[value.name] for value in model.inputs if value.name in reached}


def control_of(engine: EngineFacts, device: str, model: ModelInfo, features: Collection[str]) -> Control | None:
    """Return what a plan says of nodes that the engine is known to compute wrongly; ``None`` where there are none."""
    errors = _known_wrong(engine, device, model, features, simulator=False)
    if engine.simulated:
        errors += _known_wrong(engine, device, model, features, simulator=True)
    if not errors:
        return None
    ways = [_ELSEWHERE] if all(error.elsewhere for _, error in errors) else []
    ways += dict.fromkeys(error.instead for _, error in errors if error.instead)
    return Control(
        key=KEY,
        requested="as ONNX defines them",
        resolved="-",
        enforceability="unsupported",
        reason=f"{_release(engine)} is known to compute some nodes wrongly, and without an error: {_listed(errors)}",
        fix=", or ".join(ways),
    )


def seen_on_simulator(engine: EngineFacts, device: str, model: ModelInfo) -> str | None:
    """Name nodes that the engine's simulator computes wrongly, for a plan on a device; ``None``: there are none."""
    errors = [] if engine.simulated else _known_wrong(engine, device, model, (), simulator=True)
    if not errors:
        return None
    return (
        f"{_release(engine)} is known to compute some nodes wrongly on its simulator; they were not executed on a "
        f"device: {_listed(errors)}. See xrt compare for whether this device does"
    )


def _known_wrong(
    engine: EngineFacts, device: str, model: ModelInfo, features: Collection[str], *, simulator: bool
) -> list[tuple[str, KnownError]]:
    rows = (row for row in known_errors(engine.name) if row.simulator == simulator)
    return nodes_with_errors(model, tuple(row for row in rows if applies_to(row, engine.version, device)), features)


def _release(engine: EngineFacts) -> str:
    return engine.name if engine.version is None else f"{engine.name} {engine.version}"


def _listed(errors: Sequence[tuple[str, KnownError]]) -> str:
    named = "; ".join(f"{name!r} {error.wrong} ({error.reference})" for name, error in errors[:_NAMED])
    return named + (f"; and {len(errors) - _NAMED} more" if len(errors) > _NAMED else "")


def _concerns(error: KnownError, node: onnx.NodeProto, opset: int, values: Mapping[str, _Value], inside: bool) -> bool:
    """Whether a node has the opset, place, attributes and inputs with which a row is wrong."""
    first = values.get(node.input[0], _UNKNOWN) if node.input else _UNKNOWN
    if error.types and first.kind not in error.types:
        return False
    fixed = first.dims is not None and all(isinstance(dim, int) for dim in first.dims)
    if (error.open and fixed) or (error.fixed and _is_open(node, values)):
        return False
    if not all(0 in (values.get(node.input[index], _UNKNOWN).dims or ()) for index in error.empty):
        return False
    sized = ((values.get(node.input[index], _UNKNOWN).dims, axis) for index, axis in error.sized.items())
    if not all(dims is None or isinstance(dims[axis], int) for dims, axis in sized):
        return False
    small = [values.get(name, _UNKNOWN).lies_in(_EXACT) for name in node.input if name]
    if error.large and (any(small) if error.compares else all(small)):
        return False
    bounds = error.right_within
    if (
        fixed
        and bounds
        and all(
            _there(node.input, k) and values.get(node.input[k], _UNKNOWN).lies_in(both) for k, both in bounds.items()
        )
    ):
        return False
    fractions = [values.get(node.input[k], _UNKNOWN) for k in error.right_of_fractions if _there(node.input, k)]
    if fractions and all(value.constant and value.span is None for value in fractions):
        return False
    if error.where == "subgraph" and not inside:
        return False
    if error.opsets is not None and not error.opsets[0] <= opset <= error.opsets[1]:
        return False
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if node.op_type == "CastLike":
        attributes["to"] = _target(values.get(node.input[1], _UNKNOWN).kind)
    for name, wrong in error.attributes.items():
        value = _value(attributes[name]) if name in attributes else _default(node, name) if wrong else None
        if value is None or (wrong and value not in wrong):
            return False
    right = error.other_than
    if right and not any(
        value != right[name]
        for name in right.keys() & attributes
        for value in attributes[name].ints or [_value(attributes[name])]
    ):
        return False
    if error.last_window and not _ends_with(error.last_window, attributes, first.dims):
        return False
    if not all(_there(node.input, index) for index in error.inputs):
        return False
    if not all(_there(node.output, index) for index in error.outputs):
        return False
    if any(values.get(node.input[index], _UNKNOWN).constant for index in error.variable):
        return False
    if not all(values.get(node.input[index], _UNKNOWN).constant for index in error.constant):
        return False
    if first.dims is not None and len(first.dims) < error.rank:
        return False
    if error.lengths_differ:
        lengths = [dims[-2] for name in node.input[:2] if (dims := values.get(name, _UNKNOWN).dims)]
        if len(lengths) == 2 and None not in lengths and lengths[0] == lengths[1]:
            return False
    if error.inner_axis:
        rank = None if first.dims is None else len(first.dims)
        axis = int(attributes["axis"].i) if "axis" in attributes else 1
        return rank is None or (rank > 2 and axis % rank != rank - 1)
    return True


def _target(kind: str) -> onnx.AttributeProto:
    from onnx import TensorProto, helper

    return helper.make_attribute("to", TensorProto.DataType.Value(kind.upper() or "UNDEFINED"))


def _ends_with(wanted: str, attributes: Mapping[str, onnx.AttributeProto], dims: _Dims | None) -> bool:
    """Whether the last window along an axis is `wanted`, or may be for an axis whose size is open."""
    if "auto_pad" in attributes and attributes["auto_pad"].s not in (b"", b"NOTSET", b"VALID"):
        return False
    kernel = list(attributes["kernel_shape"].ints)
    of = {name: list(attribute.ints) for name, attribute in attributes.items()}
    ones, rank = [1] * len(kernel), len(kernel)
    pads = of.get("pads") or [0] * 2 * rank
    sizes = dims[2:] if dims is not None else (None,) * rank
    for size, width, stride, dilation, before, after in zip(
        sizes, kernel, of.get("strides") or ones, of.get("dilations") or ones, pads[:rank], pads[rank:], strict=False
    ):
        covered = (width - 1) * dilation + 1
        rests = [(size + before + after - covered) % stride] if isinstance(size, int) else range(1, stride)
        if any(rest and (wanted == "outside") == (rest <= stride + after - covered) for rest in rests):
            return True
    return False


def _is_open(node: onnx.NodeProto, values: Mapping[str, _Value]) -> bool:
    """Whether the first input of a node that is no scalar is known to have an open size."""
    sizes = (values.get(name, _UNKNOWN).dims for name in node.input)
    dims = next((shape for shape in sizes if shape != ()), ())
    return dims is not None and not all(isinstance(dim, int) for dim in dims)


def _default(node: onnx.NodeProto, name: str) -> int | float | str | None:
    import onnx

    with contextlib.suppress(onnx.defs.SchemaError):
        attributes = onnx.defs.get_schema(node.op_type, normal_domain(node.domain)).attributes
        if name in attributes and attributes[name].default_value.type:
            return _value(attributes[name].default_value)
    return None


def _operator(node: onnx.NodeProto) -> str:
    domain = normal_domain(node.domain)
    return f"{domain}.{node.op_type}" if domain else node.op_type


def _there(names: Sequence[str], index: int) -> bool:
    return index < len(names) and bool(names[index])


def _value(attribute: onnx.AttributeProto) -> int | float | str:
    if attribute.type == attribute.FLOAT:
        return float(attribute.f)
    return attribute.s.decode("utf-8", "replace") if attribute.s else int(attribute.i)


#: A size that is open is its name, or ``None``.
_Dims = tuple[int | str | None, ...]


class _Value(msgspec.Struct, frozen=True):
    """A tensor: its element type, its dimensions, bounds of its elements as far as they are known, and its origin."""

    # What is computed of sizes and of constants below 2**24 alone is taken to be below it as well.

    kind: str = ""
    dims: _Dims | None = None
    span: tuple[int, int] | None = None
    constant: bool = False

    def lies_in(self, bounds: tuple[int, int]) -> bool:
        return self.span is not None and bounds[0] <= self.span[0] and self.span[1] <= bounds[1]


_UNKNOWN = _Value()


def _nodes(
    graph: onnx.GraphProto, values: ChainMap[str, _Value], *, inside: bool = False
) -> Iterator[tuple[onnx.NodeProto, bool, ChainMap[str, _Value]]]:
    for node in graph.node:
        yield node, inside, values
        for _, inner in subgraphs(node):
            yield from _nodes(inner, values.new_child(_stated(inner)), inside=True)
        read = [values.get(name, _UNKNOWN) for name in node.input if name]
        small = node.op_type in _OF_SIZES or (bool(read) and all(value.lies_in(_EXACT) for value in read))
        span = read[0].span if node.op_type in _MOVING and read else _EXACT if small else None
        constant = node.op_type == "Constant" or (bool(read) and all(value.constant for value in read))
        for tensor in (
            attribute.t for attribute in node.attribute if node.op_type == "Constant" and attribute.name == "value"
        ):
            span = _span(tensor)
        for name in filter(None, node.output):
            # Inference does not know operators of vendors: nearly all make what they read.
            known = values.get(name) or (_Value(read[0].kind) if read else _UNKNOWN)
            values[name] = msgspec.structs.replace(known, span=span, constant=constant)


def _stated(graph: onnx.GraphProto) -> dict[str, _Value]:
    from onnx import TensorProto

    values_by_name = {}
    for value in (*graph.input, *graph.output, *graph.value_info):
        tensor = value.type.tensor_type
        if value.type.HasField("tensor_type") and tensor.elem_type:
            dims = tuple(
                dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in tensor.shape.dim
            )
            kind = TensorProto.DataType.Name(tensor.elem_type).lower()
            values_by_name[value.name] = _Value(kind, dims if tensor.HasField("shape") else None)
    for weight in graph.initializer:
        kind = TensorProto.DataType.Name(weight.data_type).lower()
        constant = weight.name not in values_by_name
        values_by_name[weight.name] = _Value(kind, tuple(weight.dims), _span(weight), constant)
    return values_by_name


def _span(tensor: onnx.TensorProto) -> tuple[int, int] | None:
    import numpy
    from onnx import numpy_helper

    count = math.prod(tensor.dims)
    if tensor.data_type not in _NUMBERS or tensor.data_location == tensor.EXTERNAL or not 0 < count <= _FEW:
        return None
    elements = numpy_helper.to_array(tensor)
    integers = numpy.isfinite(elements).all() and (elements % 1 == 0).all()
    return (int(elements.min()), int(elements.max())) if integers else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"\d+(?:\.\d+)*", version)[0].split("."))  # type: ignore[index]
