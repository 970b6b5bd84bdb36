# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`TensorSizes`: bytes of the results of each operator, and which results share memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.evidence.memory_over_time import UnitMemory, live_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from xpuruntime.engines.model import NodeInfo
    from xpuruntime.evidence.memory_over_time import LiveBytes

__all__ = ["TensorSizes"]


class TensorSizes:
    """Notes the memory of results in one run of a program, operator by operator."""

    def __init__(self, module: Any, tensors: Sequence[Any]) -> None:
        held = (*module.parameters(), *module.buffers(), *tensors)
        self._given = {_memory(tensor) for tensor in held}
        #: Of the run that began last: operator to address and bytes of each result.
        self._results: dict[str, list[tuple[int, int]]] = {}

    def begin(self) -> None:
        """Forget the run before."""
        self._results.clear()

    def note_results(self, name: str, results: Sequence[Any]) -> None:
        """Note the results of an operator that has just run."""
        self._results[name] = [(_memory(result), int(result.untyped_storage().nbytes())) for result in results]

    def live(self, nodes: Mapping[str, NodeInfo], outputs: Collection[str] = ()) -> tuple[LiveBytes, ...]:
        """Return what is live around each operator that ran; nothing where one of them is not among `nodes`.

        A result at the address of something that its operator reads is a view of it: both are there at that moment.
        Several results of an operator that has one name for them count as one. A tensor that nobody reads is an output.
        """
        held: dict[str, set[int]] = {}
        steps = []
        for name, results in self._results.items():
            node = nodes.get(name)
            if node is None:
                return ()
            read = {address: input_ for input_ in node.inputs for address in held.get(input_, ())}
            makes: dict[str, int] = {}
            views: dict[str, str] = {}
            for output, series in _shared_out(node.outputs, results):
                held[output] = {address for address, _ in series}
                own = {a: size for a, size in series if a not in read and a not in self._given}
                bases = [read[a] for a, _ in series if a in read]
                if own:
                    makes[output] = sum(own.values())
                elif bases:
                    views[output] = bases[0]
                read |= dict.fromkeys(own, output)
            steps.append(UnitMemory(unit=name, reads=node.inputs, makes=makes, views=views))
        read_by_some = {name for step in steps for name in step.reads}
        unread = {make for step in steps for make in (*step.makes, *step.views)} - read_by_some
        return live_bytes(steps, {*unread, *outputs})


def _shared_out(
    outputs: Sequence[str], results: Sequence[tuple[int, int]]
) -> list[tuple[str, Sequence[tuple[int, int]]]]:
    if len(outputs) == len(results):
        return [(output, [result]) for output, result in zip(outputs, results, strict=True)]
    return [(outputs[0], results)] if outputs else []


def _memory(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())
