# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The graph that OpenVINO executes: its nodes, their names, and loops that were flattened into it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.openvino.native_worker import graph_facts

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo, NodeInfo

_WORDS = {
    "f64": "fp64", "f32": "fp32", "f16": "fp16", "bf16": "bf16", "i8": "int8", "u8": "uint8", "i16": "int16",
    "u16": "uint16", "i32": "int32", "u32": "uint32", "i64": "int64", "u64": "uint64", "boolean": "bool",
}  # fmt: skip
_SPATIAL = frozenset(
    {"Convolution", "BinaryConvolution", "DeformableConvolution", "Deconvolution", "Pooling", "Interpolate"}
)
_LAYOUTS = {"abcd": "nchw", "acdb": "nhwc", "abcde": "ncdhw", "acdeb": "ndhwc"}
#: Nodes that stand for inputs, outputs and constants, and compute nothing.
_STILL = frozenset({"Const", "Input", "Output", "Parameter", "Result", "Constant"})


@dataclass(frozen=True, slots=True)
class Executed:
    """One node of the executed graph."""

    name: str
    kind: str
    mentioned: tuple[Mention, ...]
    kernel: str | None
    precision: str | None
    node_precision: str | None
    reads: str | None
    writes: str | None
    layout: str | None
    size: int | None
    output_bytes: int | None
    time_us: int | None
    still: bool
    above: tuple[str, ...]


def read_graph(compiled: Any) -> list[Executed]:
    """Return the executed nodes of a compiled model in order; times only where it was compiled with ``PERF_COUNT``."""
    return executed_nodes(graph_facts(compiled))


def executed_nodes(operations: Sequence[Mapping[str, Any]]) -> list[Executed]:
    """Return the executed nodes of what `graph_facts` read."""
    nodes: list[Executed] = []
    types: dict[str, str | None] = {}
    for operation in operations:
        facts = operation["info"]
        above = tuple(operation["above"])
        kind = facts["layerType"] or operation["type"]
        name = operation["name"]
        writes = _WORDS.get(facts["outputPrecisions"].partition(",")[0])
        types[name] = writes
        kernel = facts["primitiveType"]
        named = bool(kernel) and not kernel.startswith("unknown")
        own = _WORDS.get(facts["runtimePrecision"])
        time = facts["execTimeMcs"]
        nodes.append(
            Executed(
                name=name,
                kind=kind,
                mentioned=tuple(mentions(facts["originalLayersNames"])),
                kernel=kernel if named else None,
                precision=(_of_kernel(kernel) if named else None) or own,
                node_precision=own,
                reads=types.get(above[0]) if above else None,
                writes=writes,
                layout=_layout(facts["outputLayouts"]) if kind in _SPATIAL else None,
                size=_size(operation["sizes"][:1]),
                output_bytes=_size(operation["sizes"]),
                time_us=int(time) if time.isdigit() else None,
                still=kind in _STILL,
                above=above,
            )
        )
    return nodes


def _of_kernel(kernel: str) -> str | None:
    """Return the precision in the name of a kernel, such as ``brgconv_avx512_I8``."""
    last = kernel.rpartition("_")[2].lower()
    return _WORDS.get(last)


def _layout(text: str) -> str | None:
    first = text.partition(",")[0]
    if first in _LAYOUTS:
        return _LAYOUTS[first]
    blocked = re.fullmatch(r"aBcde?(\d+)b", first)
    return f"nchw{blocked[1]}c" if blocked else first or None


def _size(sizes: Sequence[int | None]) -> int | None:
    return None if not sizes or None in sizes else sum(size or 0 for size in sizes)


_OPEN = "xrt"
#: Group 1 is the number, group 2 says whether the operation makes the node's own output or is a step on the way.
_MENTION = re.compile(rf"(?:^|,){_OPEN}(\d+)([=~]):")
_MARK = re.compile(rf"{_OPEN}\d+[=~]:")
_NOT_OURS = re.compile(r"[,\s]")

#: Operators that OpenVINO leaves out when it reads a model: what made their input gets the names of their outputs.
_PASSING = frozenset({"Identity", "Dropout"})

#: Number of a source node, and whether it is its last operation.
Mention = tuple[int, bool]


def mentions(names: str) -> list[Mention]:
    """Return the source nodes in a list of original names, in order and without repeats."""
    mentioned: dict[int, bool] = {}
    for number, end in _MENTION.findall(names):
        mentioned[int(number)] = mentioned.get(int(number), False) or end == "="
    return list(mentioned.items())


def name_without_numbers(name: str) -> str:
    """Return a name without the numbers in it, for people."""
    return _MARK.sub("", name)


def name_operations(graph: Any, nodes: Sequence[NodeInfo]) -> None:
    """Name the operations of an ``openvino.Model`` after `nodes`, in place.

    An operation belongs to the first source node that makes one of its tensors: later ones of the same tensor passed it
    on. One without such a tensor is a step of the node that reads it.
    """
    makers = _makers(nodes)
    owners: dict[str, int] = {}
    for operation in reversed(list(graph.get_ordered_ops())):
        kind = operation.get_type_name()
        if kind in ("Parameter", "Result"):
            continue
        numbers = [makers[name] for port in operation.outputs() for name in port.get_names() if name in makers]
        if numbers:
            number = min(numbers)
        elif kind == "Constant":
            continue
        else:
            readers = [
                owners[reader]
                for port in operation.outputs()
                for target in port.get_target_inputs()
                if (reader := target.get_node().get_friendly_name()) in owners
            ]
            if not readers:
                continue
            number = min(readers)
        plain = _NOT_OURS.sub("_", f"{nodes[number].name}:{operation.get_friendly_name()}")
        name = f"{_OPEN}{number}{'=' if numbers else '~'}:{plain}"
        operation.set_friendly_name(name)
        owners[name] = number


def _makers(nodes: Sequence[NodeInfo]) -> dict[str, int]:
    makers: dict[str, int] = {}
    for number, node in enumerate(nodes):
        if node.graph:
            continue
        passed = makers.get(node.inputs[0]) if node.op in _PASSING and node.inputs else None
        for position, name in enumerate(node.outputs):
            if name:
                makers[name] = passed if passed is not None and position == 0 else number
    return makers


_OPSETS = (11, 12)


def flatten_softmax(graph: Any, info: ModelInfo) -> list[str]:
    """Replace every such Softmax of an ``openvino.Model``, in place. Return the source nodes by name."""
    if info.opsets.get("", 0) not in _OPSETS or "Softmax" not in info.ops:
        return []
    makers = {node.outputs[0]: node.name for node in info.nodes if node.op == "Softmax" and not node.graph}
    done = []
    for operation in list(graph.get_ordered_ops()):
        if operation.get_type_name() != "Softmax":
            continue
        source = next((makers[name] for name in operation.output(0).get_names() if name in makers), None)
        rank = operation.input_value(0).get_partial_shape().rank
        if source is None or rank.is_dynamic or len(rank) < 3:
            continue
        axis = int(operation.get_attributes()["axis"]) % len(rank)
        if axis != len(rank) - 1:
            _replace(operation, axis)
            done.append(source)
    return done


def _replace(operation: Any, axis: int) -> None:
    import numpy as np
    from openvino import opset8 as opset

    data = operation.input_value(0)
    shape, rows = opset.shape_of(data, "i64"), opset.constant(np.array([1], np.int64))
    if axis:
        zero = opset.constant(np.int64(0))
        leading = opset.gather(shape, opset.constant(np.arange(axis, dtype=np.int64)), zero)
        rows = opset.reduce_prod(leading, zero, keep_dims=True)
    matrix = opset.reshape(data, opset.concat([rows, opset.constant(np.array([-1], np.int64))], 0), False)
    result = opset.reshape(opset.softmax(matrix, 1), shape, False)
    old = operation.output(0)
    readers, names = list(old.get_target_inputs()), set(old.get_names())
    old.get_tensor().set_names(set())
    result.output(0).get_tensor().set_names(names)
    result.set_friendly_name(operation.get_friendly_name())
    for reader in readers:
        reader.replace_source_output(result.output(0))
