# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Live memory of an executed graph around each of its nodes, from the sizes in the profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.evidence.live_bytes import UnitMemory, live_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.engines.onnxruntime.observing.graph import GraphView, NodeView
    from xpuruntime.engines.onnxruntime.observing.profile import NodeEvent
    from xpuruntime.evidence.sections.memory_over_time import LiveBytes

__all__ = ["live_of"]

#: Bits of an element, by ONNX Runtime's names of types.
_BITS = {
    "float": 32, "float32": 32, "double": 64, "float64": 64, "float16": 16, "bfloat16": 16, "int8": 8, "uint8": 8,
    "int16": 16, "uint16": 16, "int32": 32, "uint32": 32, "int64": 64, "uint64": 64, "bool": 8, "int4": 4, "uint4": 4,
    "float8e4m3fn": 8, "float8e4m3fnuz": 8, "float8e5m2": 8, "float8e5m2fnuz": 8, "complex64": 64, "complex128": 128,
}  # fmt: skip
#: Operators that ONNX Runtime runs in the memory of their first input.
_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout"})


def live_of(graph: GraphView, seen: Mapping[int, NodeEvent], ids: Mapping[int, str]) -> tuple[LiveBytes, ...]:
    """Return what is live around each node of the main graph that ran; nodes inside of control flow are its own."""
    ran = [node for node in graph.nodes if node.position in seen and not node.scope]
    ran.sort(key=lambda node: seen[node.position].order)
    return live_bytes([_step(node, seen[node.position], ids[node.position]) for node in ran], graph.outputs)


def _step(node: NodeView, event: NodeEvent, unit: str) -> UnitMemory:
    outputs = [name for name in node.outputs if name]
    reads = tuple(name for name in node.inputs if name)
    sizes = [_bytes(one.dtype, one.elements) for one in event.outputs]
    if node.op in _VIEWS and not node.domain and reads and outputs:
        rest = dict(zip(outputs[1:], sizes[1:], strict=False))
        return UnitMemory(unit=unit, reads=reads, makes=rest, views={outputs[0]: reads[0]})
    if len(sizes) != len(outputs):  # what is left out cannot be distinguished: all of it counts as the first
        sizes = [event.output_bytes] + [0] * (len(outputs) - 1)
    return UnitMemory(unit=unit, reads=reads, makes=dict(zip(outputs, sizes, strict=False)))


def _bytes(dtype: str, elements: int) -> int:
    return (elements * _BITS.get(dtype, 0) + 7) // 8
