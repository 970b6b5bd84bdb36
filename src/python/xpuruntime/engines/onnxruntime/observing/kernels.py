# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernels that xpuruntime operators ran, by the dispatcher's decisions, and whether the policy's keys were met."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from xpuruntime import _core
from xpuruntime.engines.onnxruntime.observing.decisions import rewrite_decisions
from xpuruntime.engines.onnxruntime.rewriting.records import by_key
from xpuruntime.engines.onnxruntime.rewriting.rule_query import facts_of_decision, kernels_of
from xpuruntime.engines.onnxruntime.rewriting.rules import THREADS, xpuruntime_threads
from xpuruntime.evidence.records import KeySeen

if TYPE_CHECKING:
    from collections.abc import Iterable

    from xpuruntime.engines.base import Observed
    from xpuruntime.engines.onnxruntime.rewriting.graph_edit import Rewriting
    from xpuruntime.engines.onnxruntime.rewriting.records import Rewrite, UnrewrittenNode
    from xpuruntime.evidence.records import Unit
    from xpuruntime.ops.decision_log import Decision

__all__ = ["DecidedKernels"]


class DecidedKernels:
    """Watches the decisions that the dispatcher makes about one copy of a session's model, and no others.

    They are recorded in a log of their own: what the session itself runs, and what other sessions of the same model run
    at the same time, is not in it, and it is as empty as it is in the first pass of a process.
    """

    def __init__(self, rewriting: Rewriting, device: str, arch: str | None) -> None:
        self._rewriting, self._device, self._arch = rewriting, device, arch
        self._log = _core.DecisionLog()
        #: The copy that is to be opened.
        self.source, self._rules = rewriting.watched(self._log)

    def attach(self, observed: Observed) -> Observed:
        """Return `observed` with the kernel of every unit that an xpuruntime operator ran, and the keys compared."""
        made = self._decisions()
        kinds = {one.node: one.kind for one in self._rewriting.rewrites}
        units = tuple(_with_kernel(unit, kinds, made) for unit in observed.units)
        notes = list(observed.notes)
        silent = [node for node in kinds if node not in made]
        if silent:
            why = "the dispatcher keeps no more of one pass" if self._log.dropped else "they did not run"
            notes.append(
                f"the dispatcher reports no kernel of {len(silent)} rewritten nodes, such as {silent[0]!r}: {why}"
            )
        keys = {**observed.keys, **self._keys(kinds, made), **self._threads(observed)}
        decided = rewrite_decisions(self._rewriting, made, self._device)
        return msgspec.structs.replace(observed, units=units, notes=tuple(notes), keys=keys, decisions=decided)

    def _threads(self, observed: Observed) -> dict[str, KeySeen]:
        """Report that ONNX Runtime's ``execution.threads`` does not hold for xpuruntime's kernels on the CPU."""
        read, threads = observed.effective.get("execution.threads"), xpuruntime_threads()
        if read is None or self._device != "cpu" or read.endswith(f"={threads}"):
            return {}
        text = f"{read}; xpuruntime kernels: {'as many as cores' if threads is None else threads}"
        reason = f"ONNX Runtime's own operators are limited to it, xpuruntime kernels to {THREADS}"
        return {"execution.threads": KeySeen(observed=text, status="substituted", reason=reason)}

    def _decisions(self) -> dict[str, list[Decision]]:
        from xpuruntime.ops.decision_log import recorded

        made: dict[str, list[Decision]] = {}
        for one in recorded(self._log):
            if one.count:
                made.setdefault(one.node, []).append(one)
        return made

    def _keys(self, kinds: dict[str, str], made: dict[str, list[Decision]]) -> dict[str, KeySeen]:
        """Compare what ran with what the policy asks of each operation, whatever the dispatcher was given."""
        policy = self._rewriting.policy
        asked: dict[str, list[tuple[Decision, tuple[str, ...]]]] = {}
        for node, ones in made.items():
            for one in ones:
                found = policy.compiled_rules.match(facts_of_decision(one, kinds[node], self._device, self._arch))
                asked.setdefault(found.source, []).append((one, found.use))
        done, left = by_key(self._rewriting.rewrites), by_key(self._rewriting.found.left)
        seen = {
            key: self._compare(asked.get(key, []), kinds, done.get(key, []), left.get(key, []))
            for key in sorted({*done, *left, *asked} - {"default"})
        }
        if policy.auto_strategy == "best_performance":
            tuned = sum(one.key == "tuning" for one in self._rewriting.rewrites)
            text = f"{tuned} of {len(self._rewriting.found.free)} free nodes run as xpuruntime operators"
            seen["kernels.auto_strategy"] = KeySeen(
                observed=text, status="honoured", reason="measured when the session was loaded; see its conversions"
            )
        return seen

    def _compare(
        self,
        ran: list[tuple[Decision, tuple[str, ...]]],
        kinds: dict[str, str],
        rewrites: list[Rewrite],
        left: list[UnrewrittenNode],
    ) -> KeySeen:
        """Compare what ran with what one key asks for; `rewrites` and `left` are of the nodes that it may be for."""
        nodes = {one.node for one, _ in ran}
        counts: dict[str, set[str]] = {}
        for one, _ in ran:
            counts.setdefault(one.chosen, set()).add(one.node)
        told = [f"{kernel} ({len(where)} {_nodes(len(where))})" for kernel, where in sorted(counts.items())]
        if left:
            told.append(f"ONNX Runtime's own ({len(left)} {_nodes(len(left))})")
        text = ", ".join(told) or "-"
        wrong = [one for one, words in ran if not _meets(one, words, kinds[one.node])]
        if wrong:
            first = wrong[0]
            why = first.notes[0] if first.notes else f"{first.node!r} ran {first.kernel}"
            count = len({one.node for one in wrong})
            return KeySeen(
                observed=text, status="substituted", reason=f"{count} of {len(nodes)} {_nodes(len(nodes))}: {why}"
            )
        if left:
            return KeySeen(observed=text, status="substituted", reason=f"{left[0].node!r}: {left[0].reason}")
        if not ran:
            reason = "no operation of the observed runs was one that it is for"
            return KeySeen(observed=text, status="unobservable", reason=reason)
        lost = [one.node for one in rewrites if one.node not in nodes]
        if lost and self._log.dropped:
            reason = (
                f"the record of {len(lost)} {_nodes(len(lost))}, such as {lost[0]!r}, was dropped: the log was full"
            )
            return KeySeen(observed=text, status="unobservable", reason=reason)
        return KeySeen(observed=text, status="honoured", reason=f"the dispatcher ran it in {_all(len(nodes))}")


def _with_kernel(unit: Unit, kinds: dict[str, str], made: dict[str, list[Decision]]) -> Unit:
    node = next((name for name in unit.source_nodes if name in kinds), None)
    if node is None or node not in made or unit.relation == "folded":
        return unit
    kernels = ", ".join(dict.fromkeys(one.kernel for one in made[node]))
    return msgspec.structs.replace(unit, kernel=kernels, kernel_source="reported")


def _meets(one: Decision, words: Iterable[str], kind: str) -> bool:
    for word in words:
        if word == "auto":
            return True
        config = word.partition("@")[2]
        if one.chosen in kernels_of(kind, word) and config in ("", one.config):
            return True
    return False


def _nodes(count: int) -> str:
    return "node" if count == 1 else "nodes"


def _all(count: int) -> str:
    return "its node" if count == 1 else f"all {count} nodes"
