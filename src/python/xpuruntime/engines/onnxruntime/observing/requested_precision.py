# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Requested precision of one executed unit: the policy's, or the types that the source model states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.engines.onnxruntime.arithmetic import OPERATORS, quantises_activations
from xpuruntime.engines.precision.names import FLOATS
from xpuruntime.engines.precision.stated import model_precisions
from xpuruntime.engines.unplaced_units import CONVERSIONS, is_product

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from xpuruntime.engines.onnxruntime.observing.graph import GraphView, NodeView

__all__ = ["RequestedPrecision"]

#: Types in which no number of a model is computed.
_INDICES = frozenset(("int64", "int32", "bool"))
#: Types that activations are quantised to.
_QUANTISED = frozenset(("int8", "uint8", "int16", "uint16"))


class RequestedPrecision:
    """The precision that is asked for of each unit of one session."""

    def __init__(self, model: Any, source: GraphView, constant: AbstractSet[str], precision: str) -> None:
        self._source, self._constant, self._precision = source, constant, precision
        self._types = model_precisions(model, source.dtypes)

    def of_executed(
        self, op: str, owned: Sequence[int], serves: Sequence[int], outputs: Sequence[str], ran: str | None
    ) -> str | None:
        """Return what was asked for of an executed node; ``None`` where no number is computed."""
        if not owned and ran is not None and ran.rpartition("->")[2] in _INDICES:  # sizes in an expansion
            return None
        if self._only_indices(outputs, ran):
            return None
        return self.of(op, owned, ran) or self.of(op, serves, ran)

    def of(self, op: str, nodes: Sequence[int], ran: str | None) -> str | None:
        """Return what is asked for of source nodes that run as `op`; ``None`` where no precision applies to them."""
        held = [self._source.nodes[i] for i in nodes]
        if not held or {op, *(n.op for n in held)} <= CONVERSIONS:
            return None
        if op in OPERATORS:
            return self._of_quantised(held, ran)
        if self._precision == "model" and self._passes_quantised(held, ran):
            return ran if ran in _QUANTISED else None  # an ArgMax of integers computes no numbers
        types = [self._types[k] for n in reversed(held) for k in n.outputs if k in self._types]
        # Labels, indices and masks that a node makes beside its numbers have no precision.
        stated = next((name for name in types if name in FLOATS), types[0] if types else None)
        if self._precision == "int8" and not any(is_product(n.op) for n in held):
            return "int8" if ran is not None and {"int8", "uint8"}.intersection(ran.split("->")) else stated
        if self._precision == "model":
            return stated
        if stated is not None and stated not in FLOATS:
            return None
        if stated is None and ran is not None and not FLOATS.intersection(ran.split("->")):
            return None
        return "fp32" if self._precision == "tf32" else self._precision

    def _only_indices(self, outputs: Sequence[str], ran: str | None) -> bool:
        """Say whether a unit reads and makes only indices and masks, such as the shape of a transpose."""
        made = {self._types.get(name, "?") for name in outputs}
        return bool(made) and ran is not None and made | set(ran.split("->")) <= _INDICES

    def _passes_quantised(self, held: Sequence[NodeView], ran: str | None) -> bool:
        """Whether nodes take values that the model itself quantised as integers, as a pool between products does."""
        types = [] if ran is None else ran.split("->")
        if not types or types[0] not in _QUANTISED or not (_QUANTISED | _INDICES).issuperset(types):
            return False
        own = {k for node in held for k in node.outputs}
        made, read = self._source.producers, self._source.consumers
        return all(
            any(k in own or (k in made and made[k].op == "DequantizeLinear") for k in node.inputs)
            or all(reader.op == "QuantizeLinear" for k in node.outputs for reader in read.get(k, (node,)))
            for node in held
            if node.op not in ("QuantizeLinear", "DequantizeLinear")
        )

    def _of_quantised(self, held: Sequence[NodeView], ran: str | None) -> str | None:
        """Return the precision asked for of a quantised operator: the policy's, else what the model's nodes state."""
        if self._precision in FLOATS:
            return self._precision
        if self._precision != "model":
            return "fp32" if self._precision == "tf32" else self._precision
        read = {k for node in held if node.op == "DequantizeLinear" for k in node.inputs[:1]}
        quantised = any(quantises_activations(n.op, n.numbers) for n in held) or not read <= self._constant
        if quantised:
            return ran
        types = [self._types[k] for n in reversed(held) for k in n.outputs if k in self._types]
        return next((name for name in types if name in FLOATS), None)
