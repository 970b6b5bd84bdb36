# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Entries of a lock: what a report observed, under names that are the same in every load, and what each depends on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from xpuruntime.lockfile.consistency import NOTHING_RAN
from xpuruntime.lockfile.drift import ValidatorKind
from xpuruntime.lockfile.engine_dependencies import CORE, OWN_KERNELS, of_kernel
from xpuruntime.lockfile.records import CallEntry, UnitEntry, Validator

if TYPE_CHECKING:
    from xpuruntime.evidence.kernel_records import KernelDecision
    from xpuruntime.evidence.records import Unit

#: Names of operators on the host, of which the profiler shows the one that took longest: another one in another run.
_OPERATORS = ("aten::",)


def _kernels_by_node(decisions: Iterable[KernelDecision]) -> dict[str, str]:
    by_node: dict[str, dict[str, None]] = {}
    for decision in decisions:
        if decision.kernel is not None:
            for node in decision.nodes:
                by_node.setdefault(node, {})[decision.kernel] = None
    return {node: ", ".join(sorted(kernels)) for node, kernels in by_node.items()}


def unit_entries(
    units: Sequence[Unit], decisions: Iterable[KernelDecision], validators: Sequence[Validator], at: str
) -> tuple[UnitEntry, ...]:
    """Return one entry for each unit, sorted by name."""
    chosen = _kernels_by_node(decisions)
    ids = _Dependencies(validators)
    names: Counter[str] = Counter()
    entries = []
    for unit in units:
        name = _name(unit)
        names[name] += 1
        if names[name] > 1:
            name = f"{name}#{names[name]}"
        kernel = _kernel(unit, chosen)
        entries.append(
            UnitEntry(
                unit=name,
                op=unit.op,
                relation=unit.relation,
                sources=unit.source_nodes,
                outputs=tuple(sorted(unit.outputs)),
                at=at,
                on=" ".join(part for part in (unit.engine, unit.device, unit.provider) if part),
                kernel=kernel,
                precision=unit.precision_run,
                accumulate=_accumulate(unit),
                layout=unit.layout,
                depends_on=ids.of(kernel),
                known="unobservable" if kernel is None and unit.relation not in NOTHING_RAN else "observed",
            )
        )
    return tuple(sorted(entries, key=lambda entry: (entry.at, entry.unit)))


def _name(unit: Unit) -> str:
    """Return a name made of source nodes and tensors: many engines number their units anew in each load."""
    phase = f"{unit.phase}:" if unit.phase else ""
    if unit.source_nodes:
        return phase + "+".join(unit.source_nodes)
    served = "+".join(unit.serves) or "+".join(sorted(unit.outputs))
    return phase + (f"{unit.op} for {served}" if served else unit.op)


def _kernel(unit: Unit, chosen: Mapping[str, str]) -> str | None:
    for node in unit.source_nodes:
        if node in chosen:
            return chosen[node]
    on_device = sorted({kernel.name for kernel in unit.device_kernels if kernel.kind == "kernel"})
    if on_device:
        return " + ".join(on_device)
    if unit.kernel is None or unit.kernel_source != "reported" or unit.kernel.startswith(_OPERATORS):
        return None
    return unit.kernel


def _accumulate(unit: Unit) -> str | None:
    """Return the precision in which a device's kernels multiply, as far as their names say."""
    precisions = {kernel.precision for kernel in unit.device_kernels if kernel.precision is not None}
    return precisions.pop() if len(precisions) == 1 else None


def call_entries(decisions: Iterable[KernelDecision], validators: Sequence[Validator]) -> tuple[CallEntry, ...]:
    """Return an entry for each node that an xpuruntime kernel served, sorted by node."""
    ids = _Dependencies(validators)
    entries: dict[tuple[str, str], CallEntry] = {}
    for decision in decisions:
        kernel = decision.kernel
        if kernel is None:
            continue
        for node in decision.nodes:
            entry = CallEntry(
                op=decision.op,
                dtype=decision.dtype,
                module=decision.module,
                node=node,
                kernel=kernel,
                depends_on=ids.of(kernel),
            )
            entries.setdefault((node, decision.op), entry)
    return tuple(entries[key] for key in sorted(entries))


class _Dependencies:
    def __init__(self, validators: Sequence[Validator]) -> None:
        self._sources = {
            validator.id: validator.key for validator in validators if validator.kind == ValidatorKind.KERNEL_SOURCE
        }
        self._libraries = {
            validator.id: validator.key for validator in validators if validator.kind == ValidatorKind.LIBRARY
        }
        self._all = tuple(
            validator.id for validator in validators if validator.id not in {**self._sources, **self._libraries}
        )

    def of(self, kernel: str | None) -> tuple[str, ...]:
        """Return the ids for one kernel: of libraries only those that it is of, where that is known."""
        own = kernel is not None and kernel.startswith(OWN_KERNELS)
        brought = CORE if own else (kernel or "").partition(".")[0]
        needed = [id for id, name in self._sources.items() if name == brought]
        needed += [id for id, name in self._libraries.items() if not own or of_kernel(name, str(kernel))]
        return tuple(sorted((*self._all, *needed)))
