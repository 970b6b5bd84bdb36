# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Names that survive compiling: every operation of OpenVINO's graph is named after the source node it stands for.

OpenVINO renames operations to the tensors they end in, splits source nodes into several, and joins the names of what it
fuses with commas. So each is given a name that opens with the number of its source node, and such names are found again
in the compiled graph, whatever OpenVINO adds to them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpuruntime.engines.model import NodeInfo

__all__ = ["Mention", "mentions", "name_operations", "name_without_numbers"]

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
    found: dict[int, bool] = {}
    for number, end in _MENTION.findall(names):
        found[int(number)] = found.get(int(number), False) or end == "="
    return list(found.items())


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
        made = [makers[name] for port in operation.outputs() for name in port.get_names() if name in makers]
        if made:
            number = min(made)
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
        name = f"{_OPEN}{number}{'=' if made else '~'}:{plain}"
        operation.set_friendly_name(name)
        owners[name] = number


def _makers(nodes: Sequence[NodeInfo]) -> dict[str, int]:
    """Return tensor to the node that computes it: not one that passes on what another computes."""
    makers: dict[str, int] = {}
    for number, node in enumerate(nodes):
        if node.graph:
            continue
        passed = makers.get(node.inputs[0]) if node.op in _PASSING and node.inputs else None
        for position, name in enumerate(node.outputs):
            if name:
                makers[name] = passed if passed is not None and position == 0 else number
    return makers
