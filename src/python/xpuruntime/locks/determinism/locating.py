# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`locate`: the first node of a model whose tensors differ when a test of determinism fails.

The failing test runs once more on a copy of the model that returns the tensors inside of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from xpuruntime.error_text import error_line
from xpuruntime.errors import XpuRuntimeError
from xpuruntime.evidence.sections.determinism import FirstDifference
from xpuruntime.locks.determinism.bits import differing, ulp_distance

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from xpuruntime.engines.model import ModelInfo, NodeInfo
    from xpuruntime.locks.determinism.grades import Mismatch

    #: Repeats the failing test with the tensors of these names; ``None`` where it passes.
    Repeat = Callable[[Sequence[str]], Mismatch | None]

__all__ = ["locate"]


def locate(info: ModelInfo, mismatch: Mismatch, repeat: Repeat, compared: Collection[str] | None) -> FirstDifference:
    """Find the first node whose tensors differ."""
    name = differing(mismatch.want, mismatch.got)[0]
    output = FirstDifference(unit=None, tensor=name, ulp_max=ulp_distance(mismatch.want[name], mismatch.got[name]))
    makers = {
        tensor: node
        for node in info.nodes
        if not node.graph and node.op != "Constant"
        for tensor in node.outputs
        if tensor
    }
    if not makers:
        return msgspec.structs.replace(output, note="the model shows no nodes")
    search = _Search(repeat)
    found = search.first(list(makers))
    if found is None:
        why = search.refused or (
            "no tensor inside differs while all are outputs too, which keeps the engine from fusing nodes: the "
            "difference is in nodes that it fuses"
        )
        return msgspec.structs.replace(output, note=why)
    tensor, ulp = found
    node, note = makers[tensor], f"some tensors were not seen: {search.refused}" if search.refused else ""
    hidden = None if compared is None else _first_hidden(info, tensor, makers, compared)
    if hidden is not None:
        note = (
            f"from there on tensors have no rows that could be compared; the first that does and differs is {tensor!r} "
            f"of {node.name} ({node.op})"
        )
        node = hidden
    return FirstDifference(unit=node.name, op=node.op, tensor=tensor, ulp_max=ulp, note=note)


def _first_hidden(
    info: ModelInfo, tensor: str, makers: Mapping[str, NodeInfo], rows: Collection[str]
) -> NodeInfo | None:
    """Return the first node between the tensors with rows and `tensor` whose results have no rows.

    A node that reads no tensor with rows, such as one that prepares a weight, is none of them.
    """
    entries: list[NodeInfo] = []
    waiting, done = list(makers[tensor].inputs), set[str]()
    while waiting:
        name = waiting.pop()
        if name in rows or name in done or name not in makers:
            continue
        done.add(name)
        if any(one in rows for one in makers[name].inputs):
            entries.append(makers[name])
        waiting.extend(makers[name].inputs)
    order = {node.name: place for place, node in enumerate(info.nodes)}
    return min(entries, key=lambda node: order[node.name], default=None)


class _Search:
    def __init__(self, repeat: Repeat) -> None:
        self.repeat = repeat
        self.refused = ""

    def first(self, names: Sequence[str]) -> tuple[str, int | None] | None:
        """Return the first of some tensors that differs; where an engine refuses them together, those of each half."""
        try:
            found = self.repeat(names)
        except XpuRuntimeError as error:
            if len(names) == 1:
                self.refused = self.refused or error_line(error)
                return None
            middle = len(names) // 2
            return self.first(names[:middle]) or self.first(names[middle:])
        if found is None:
            return None
        wrong = set(differing(found.want, found.got))
        name = next((name for name in names if name in wrong), None)
        return None if name is None else (name, ulp_distance(found.want[name], found.got[name]))
