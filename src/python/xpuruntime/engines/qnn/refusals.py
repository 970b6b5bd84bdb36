# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""QNN's reasons for refusing a node, from the trace it writes and from the lines of its log."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import msgspec

from xpuruntime.errors import EngineFailed, UnsupportedOperationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpuruntime.errors import XpuRuntimeError

__all__ = ["RejectedNode", "faults_in_log", "plain_name", "refusal", "rejected_in_log", "rejected_in_trace"]

_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+ \[(?P<level>[A-Z]):[^\]]*\]\s*(?P<text>.*)$")
_FAILED = re.compile(
    r"Validation FAILED for \d+ nodes? in [^\n]*\n(?P<nodes>(?:\s+Operator type: [^\n]*\n)+)"
    r"\s+REASON : (?P<reason>[^\n]*)"
)
_NODE = re.compile(r"Operator type: (?P<op>.*?) Node name: (?P<name>.*?) Node index: \d+")
_UNSUPPORTED = re.compile(r"\{ name: (?P<name>.*?), type: (?P<op>.*?) \}")
_TAIL = re.compile(r"\.?[^\s.]+ node `[^`]*` will not be assigned to QNN EP\.?$")
#: Text that says nothing beyond that it failed, or that repeats another line.
_EMPTY = ("fallback to CPU EP has been explicitly disabled", "Unsupported nodes in QNN EP", "OrtEp::GetCapability()")
_SHAPE = "Cannot get shape"
_NAMED = 8


class RejectedNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node that QNN does not take: its name in the source model, operator, and the reason."""

    name: str
    op: str
    reason: str


def plain_name(name: str) -> str:
    """Return a node's name without what a change of layout added to it."""
    return re.sub(r"(_token_\d+|/duplicated)+$", "", name)


def rejected_in_trace(text: str) -> list[RejectedNode]:
    """Return the nodes that ``qnn_op_trace.json`` lists as not supported; none when it is missing or cut off."""
    try:
        listed = json.loads(text).get("unsupported_nodes", [])
        found = [RejectedNode(name=n["node_name"], op=n["op_type"], reason=_clean(n.get("reason", ""))) for n in listed]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
    return _distinct(found)


def rejected_in_log(text: str) -> list[RejectedNode]:
    """Return the nodes that a verbose log says failed validation, with its reasons."""
    text = _COLOUR.sub("", text)
    found = [
        RejectedNode(name=node["name"], op=node["op"], reason=_clean(match["reason"]))
        for match in _FAILED.finditer(text)
        for node in _NODE.finditer(match["nodes"])
    ]
    seen = {one.name for one in found}
    for line in text.splitlines():
        if "Unsupported nodes in QNN EP" in line:
            found += [
                RejectedNode(name=node["name"], op=node["op"], reason="QNN gives no reason")
                for node in _UNSUPPORTED.finditer(line)
                if node["name"] not in seen
            ]
    return _distinct(found)


def faults_in_log(text: str) -> list[str]:
    """Return what a log says at level ERROR or FATAL, without repeats and without lines that name no cause."""
    found = []
    for line in _COLOUR.sub("", text).splitlines():
        match = _STAMP.match(line)
        if match is None or match["level"] not in "EF":
            continue
        said = re.sub(r"^\S+\.cc:\d+ \S+\s+", "", match["text"]).strip()
        if said and not any(empty in said for empty in _EMPTY):
            found.append(said)
    return list(dict.fromkeys(found))


def refusal(
    rejected: Sequence[RejectedNode], faults: Sequence[str], *, label: str, where: str, composing: bool = False
) -> XpuRuntimeError:
    """Return the error of a model that QNN does not take as a whole."""
    if not rejected:
        said = "; ".join(faults) or "QNN gave no reason, not even in its verbose log"
        msg = f"QNN does not load {label} for {where}: {said}. Run `xrt doctor`, and check the options of the policy"
        return EngineFailed(msg, engine="qnn", device="npu")
    named = "; ".join(f"{one.name} ({one.op}): {one.reason}" for one in rejected[:_NAMED])
    more = f"; and {len(rejected) - _NAMED} more" if len(rejected) > _NAMED else ""
    ops = ", ".join(sorted({one.op for one in rejected}))
    fixes = [f"To let them run on the CPU, state execution.allow_cpu_ops: [{ops}]"]
    if composing:
        fixes = [
            "QNN accepts them one by one and fails to build its graph, so execution.allow_cpu_ops cannot leave them "
            f"to the CPU. Replace them in the model (operators {ops}), or run it on another engine"
        ]
    if any(one.reason == _SHAPE for one in rejected):
        fixes.insert(
            0,
            "QNN needs every shape beforehand: state execution.shapes for the inputs, and export the model without "
            "operators whose result has a shape that depends on values",
        )
    msg = f"{len(rejected)} node(s) of {label} do not run on QNN for {where}: {named}{more}. {'. '.join(fixes)}"
    return UnsupportedOperationError(msg, engine="qnn", device="npu")


def _clean(reason: str) -> str:
    return _TAIL.sub("", reason.strip()).rstrip(".") or "QNN gives no reason"


def _distinct(found: Sequence[RejectedNode]) -> list[RejectedNode]:
    """Keep one entry a node: QNN looks at the graph twice, the second time in another layout."""
    kept: dict[str, RejectedNode] = {}
    for one in found:
        kept.setdefault(plain_name(one.name), msgspec.structs.replace(one, name=plain_name(one.name)))
    return list(kept.values())
