# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Units of nodes that no kernel ran for, and unique unit names, shared by the observers of all engines."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

from xpuruntime.engines.precision.names import FLOATS
from xpuruntime.evidence.records import Unit

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["CONVERSIONS", "UnitIds", "check_complete", "effective_of", "folded_unit", "is_product", "listed"]

#: Operators that change types because the model says so: they have no precision of their own to honour.
CONVERSIONS = frozenset({"Cast", "CastLike", "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})

_PRODUCTS = ("Conv", "MatMul", "Gemm", "Attention")


def is_product(op: str) -> bool:
    """Whether an operator is one that quantisation is for; the others may stay as the model states them."""
    return any(word in op for word in _PRODUCTS)


def check_complete(units: Iterable[Unit], nodes: Iterable[str]) -> None:
    """Hold a join to its promise: every source node is in exactly one unit, and nothing else is."""
    count = Counter(name for unit in units for name in unit.source_nodes)
    wrong = [name for name, times in count.items() if times != 1] + sorted(set(nodes) ^ set(count))
    if wrong:
        raise AssertionError(f"source nodes not accounted for exactly once: {wrong[:5]}")


class UnitIds:
    """Makes ids of names: a name that comes again is numbered, ``"conv#2"``."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def __call__(self, name: str) -> str:
        """Return the id of the next unit of this name."""
        self._seen[name] += 1
        return name if self._seen[name] == 1 else f"{name}#{self._seen[name]}"


class _Node(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def outputs(self) -> Sequence[str]: ...


def folded_unit(node: _Node, engine: str, reason: str, **more: Any) -> Unit:
    """Return the unit of a source node that does not run."""
    fields: dict[str, Any] = {
        "id": node.name,
        "op": node.op,
        "relation": "folded",
        "source_nodes": (node.name,),
        "outputs": tuple(name for name in node.outputs if name),
        "engine": engine,
        "device": "none",
        "placement_reason": reason,
        "placement_source": "rule",
    }
    return Unit(**{**fields, **more})


def listed(values: Iterable[str]) -> str:
    """Return the distinct values in one line, the most frequent first; empty where there are none."""
    return ", ".join(value for value, _ in Counter(values).most_common())


def effective_of(units: Iterable[Unit], engine: str) -> dict[str, str]:
    """Return the observations of policy keys that concern all units, by key."""
    ran = [unit for unit in units if unit.time is not None and unit.source_nodes and unit.relation != "folded"]
    if not ran:
        return {}
    precisions = (unit.precision_run for unit in ran if unit.precision_requested in FLOATS)
    found = {
        "execution.engine": engine,
        "execution.device": listed(unit.device for unit in ran),
        "execution.precision": listed(name for name in precisions if name),
        "execution.layout": listed(unit.layout for unit in ran if unit.layout),
    }
    return {key: value for key, value in found.items() if value}
