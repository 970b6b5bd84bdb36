# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Executed`: one node of the graph that OpenVINO runs, read from its runtime model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.openvino.naming import Mention, mentions
from xpuruntime.engines.openvino.native_worker import graph_facts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Executed", "executed_nodes", "read_graph"]

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
    made: int | None
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
                made=_size(operation["sizes"]),
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
    """Return the bytes of outputs together; ``None`` where there are none, or a shape is not fixed."""
    return None if not sizes or None in sizes else sum(size or 0 for size in sizes)
