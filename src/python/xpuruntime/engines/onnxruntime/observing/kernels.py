# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernels that xpuruntime operators ran, by the dispatcher's decisions, and whether the policy's keys were met."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from xpuruntime import _core
from xpuruntime.engines.onnxruntime.observing.unit_facts import rewrite_decisions
from xpuruntime.engines.onnxruntime.rewriting.rules import (
    THREADS,
    Rewrite,
    UnrewrittenNode,
    by_key,
    facts_of_decision,
    kernels_of,
    xpuruntime_threads,
)
from xpuruntime.evidence.kernel_records import parse_kernel_name
from xpuruntime.evidence.records import BESIDE, Boundary, DeviceKernel, KeySeen, Time, Unit

if TYPE_CHECKING:
    from xpuruntime.engines.base import Observed
    from xpuruntime.engines.onnxruntime.observing.profile import NodeEvent, NodeProfile, NodeSpan
    from xpuruntime.engines.onnxruntime.rewriting.graph_edit import Rewriting
    from xpuruntime.ops.decision_log import Decision
    from xpuruntime.runtime.profiler import DeviceRecording, DeviceWork, HostCall


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
        decisions = self._decisions()
        kinds = {rewrite.node: rewrite.kind for rewrite in self._rewriting.rewrites}
        units = tuple(_with_kernel(unit, kinds, decisions) for unit in observed.units)
        notes = list(observed.notes)
        silent = [node for node in kinds if node not in decisions]
        if silent:
            why = "the dispatcher keeps no more of one pass" if self._log.dropped else "they did not run"
            notes.append(
                f"the dispatcher reports no kernel of {len(silent)} rewritten nodes, such as {silent[0]!r}: {why}"
            )
        keys = {**observed.keys, **self._keys(kinds, decisions), **self._threads(observed)}
        decided = rewrite_decisions(self._rewriting, decisions, self._device)
        return msgspec.structs.replace(observed, units=units, notes=tuple(notes), keys=keys, decisions=decided)

    def _threads(self, observed: Observed) -> dict[str, KeySeen]:
        read, threads = observed.effective.get("execution.threads"), xpuruntime_threads()
        if read is None or self._device != "cpu" or read.endswith(f"={threads}"):
            return {}
        text = f"{read}; xpuruntime kernels: {'as many as cores' if threads is None else threads}"
        reason = f"ONNX Runtime's own operators are limited to it, xpuruntime kernels to {THREADS}"
        return {"execution.threads": KeySeen(observed=text, status="substituted", reason=reason)}

    def _decisions(self) -> dict[str, list[Decision]]:
        from xpuruntime.ops.decision_log import recorded

        decisions: dict[str, list[Decision]] = {}
        for decision in recorded(self._log):
            if decision.count:
                decisions.setdefault(decision.node, []).append(decision)
        return decisions

    def _keys(self, kinds: dict[str, str], decisions: dict[str, list[Decision]]) -> dict[str, KeySeen]:
        """Compare what ran with what the policy asks of each operation, whatever the dispatcher was given."""
        policy = self._rewriting.policy
        requested: dict[str, list[tuple[Decision, tuple[str, ...]]]] = {}
        for node, ones in decisions.items():
            for decision in ones:
                match = policy.compiled_rules.match(facts_of_decision(decision, kinds[node], self._device, self._arch))
                requested.setdefault(match.source, []).append((decision, match.use))
        done, left = by_key(self._rewriting.rewrites), by_key(self._rewriting.matches.left)
        seen = {
            key: self._compare(requested.get(key, []), kinds, done.get(key, []), left.get(key, []))
            for key in sorted({*done, *left, *requested} - {"default"})
        }
        if policy.auto_strategy == "best_performance":
            tuned = sum(rewrite.key == "tuning" for rewrite in self._rewriting.rewrites)
            text = f"{tuned} of {len(self._rewriting.matches.free)} free nodes run as xpuruntime operators"
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
        nodes = {decision.node for decision, _ in ran}
        counts: dict[str, set[str]] = {}
        for decision, _ in ran:
            counts.setdefault(decision.chosen, set()).add(decision.node)
        told = [f"{kernel} ({len(where)} {_nodes(len(where))})" for kernel, where in sorted(counts.items())]
        if left:
            told.append(f"ONNX Runtime's own ({len(left)} {_nodes(len(left))})")
        text = ", ".join(told) or "-"
        wrong = [decision for decision, words in ran if not _meets(decision, words, kinds[decision.node])]
        if wrong:
            first = wrong[0]
            why = first.notes[0] if first.notes else f"{first.node!r} ran {first.kernel}"
            count = len({decision.node for decision in wrong})
            return KeySeen(
                observed=text, status="substituted", reason=f"{count} of {len(nodes)} {_nodes(len(nodes))}: {why}"
            )
        if left:
            return KeySeen(observed=text, status="substituted", reason=f"{left[0].node!r}: {left[0].reason}")
        if not ran:
            reason = "no operation of the observed runs was one that it is for"
            return KeySeen(observed=text, status="unobservable", reason=reason)
        lost = [rewrite.node for rewrite in rewrites if rewrite.node not in nodes]
        if lost and self._log.dropped:
            reason = (
                f"the record of {len(lost)} {_nodes(len(lost))}, such as {lost[0]!r}, was dropped: the log was full"
            )
            return KeySeen(observed=text, status="unobservable", reason=reason)
        return KeySeen(observed=text, status="honoured", reason=f"the dispatcher ran it in {_all(len(nodes))}")


def _with_kernel(unit: Unit, kinds: dict[str, str], decisions: dict[str, list[Decision]]) -> Unit:
    node = next((name for name in unit.source_nodes if name in kinds), None)
    if node is None or node not in decisions or unit.relation == "folded":
        return unit
    kernels = ", ".join(dict.fromkeys(decision.kernel for decision in decisions[node]))
    return msgspec.structs.replace(unit, kernel=kernels, kernel_source="reported")


def _meets(decision: Decision, words: Iterable[str], kind: str) -> bool:
    for word in words:
        if word == "auto":
            return True
        config = word.partition("@")[2]
        if decision.chosen in kernels_of(kind, word) and config in ("", decision.config):
            return True
    return False


def _nodes(count: int) -> str:
    return "node" if count == 1 else "nodes"


def _all(count: int) -> str:
    return "its node" if count == 1 else f"all {count} nodes"


_CPU = "CPUExecutionProvider"
#: What counts as work of a device.
_KINDS = ("kernel", "copy", "fill")


#: Name, index and operator of an executed node.
NodeKey = tuple[str, int, str]


class DeviceTimes(NamedTuple):
    """A profile with the times of devices.

    `last_run` holds the work of the last run, each with the node that started it and its start by the profile's clock.
    """

    profile: NodeProfile
    boundaries: tuple[Boundary, ...]
    device_us: tuple[float, ...]
    in_nodes_us: tuple[float, ...]
    notes: tuple[str, ...]
    last_run: tuple[tuple[NodeKey | None, DeviceWork, float], ...] = ()


class _Piece(NamedTuple):
    """A piece of work, and the run in which it was started."""

    run: int
    work: DeviceWork


def with_device_times(profile: NodeProfile, recording: DeviceRecording, began_ns: int) -> DeviceTimes:
    """Return a profile with what devices did for each node."""
    windows = [(began_ns + start * 1000, began_ns + end * 1000) for start, end in profile.windows]
    owners, outside, waits = _sorted(profile.spans, windows, recording, began_ns)
    count = len(windows)
    events = tuple(
        _event(event, owners.get((event.name, event.index, event.op), []), count) for event in profile.events
    )
    totals, within = [0.0] * count, [0.0] * count
    for pieces in owners.values():
        for piece in pieces:
            totals[piece.run] += piece.work.us
            within[piece.run] += piece.work.us
    for piece in outside:
        totals[piece.run] += piece.work.us
    notes = []
    if sum(totals):
        text = f"of {statistics.median(totals):.0f} us of device time in a run, {sum(within) / sum(totals):.0%}"
        notes.append(f"{text} is work that nodes started")
    boundaries = (*_copies(outside, count), *_other(outside, count), *_waits(waits, count))
    timed_profile = msgspec.structs.replace(profile, events=events)
    started: list[tuple[NodeKey | None, _Piece]] = [(key, piece) for key, pieces in owners.items() for piece in pieces]
    started += [(None, piece) for piece in outside]
    last = tuple(
        (key, piece.work, (piece.work.start_ns - began_ns) / 1000) for key, piece in started if piece.run == count - 1
    )
    return DeviceTimes(timed_profile, boundaries, tuple(totals), tuple(within), tuple(notes), last)


def _sorted(
    spans: Sequence[NodeSpan], windows: Sequence[tuple[float, float]], recording: DeviceRecording, began_ns: int
) -> tuple[dict[NodeKey, list[_Piece]], list[_Piece], list[_Piece]]:
    """Return the work of each node, the work of runs outside of nodes, and what the host waited for."""
    calls: dict[int, HostCall] = {}
    for call in recording.calls:
        known = calls.get(call.correlation)
        if known is None or call.start_ns < known.start_ns:  # the runtime's, around the driver's
            calls[call.correlation] = call
    ordered = sorted(spans, key=lambda span: (span.start_us, -span.end_us))
    starts = [began_ns + node_span.start_us * 1000 for node_span in ordered]
    opened = [start for start, _ in windows]
    owners: dict[NodeKey, list[_Piece]] = defaultdict(list)
    outside: list[_Piece] = []
    waits: list[_Piece] = []
    for work in recording.work:
        started = calls.get(work.correlation) if work.correlation else None
        at = started.start_ns if started is not None else work.start_ns if work.kind == "wait" else None
        run = bisect_right(opened, at) - 1 if at is not None else -1
        if at is None or run < 0 or at > windows[run][1]:
            continue
        if work.kind == "wait":
            waits.append(_Piece(run, work))
            continue
        if work.kind not in _KINDS:
            continue
        span = _innermost(ordered, starts, at, began_ns)
        if span is None:
            outside.append(_Piece(run, work))
        else:
            owners[span.name, span.node, span.op].append(_Piece(run, work))
    return owners, outside, waits


def _innermost(ordered: Sequence[NodeSpan], starts: Sequence[float], at: float, began_ns: int) -> NodeSpan | None:
    index = bisect_right(starts, at) - 1
    # Nodes are short and hold others only in control flow: few steps back.
    for position in range(index, max(-1, index - 64), -1):
        if at <= began_ns + ordered[position].end_us * 1000:
            return ordered[position]
    return None


def _event(event: NodeEvent, pieces: list[_Piece], runs: int) -> NodeEvent:
    if event.provider == _CPU and not pieces:
        return event
    kernels = _kernels(pieces, runs)
    per_run = [0.0] * runs
    for piece in pieces:
        per_run[piece.run] += piece.work.us
    return msgspec.structs.replace(event, device_us=float(statistics.median(per_run)), device_kernels=kernels)


def _kernels(pieces: Iterable[_Piece], runs: int) -> tuple[DeviceKernel, ...]:
    groups: dict[tuple[Literal["kernel", "copy", "fill"], str], list[_Piece]] = defaultdict(list)
    for piece in pieces:
        work = piece.work
        name = f"{work.name} {work.source} -> {work.destination}" if work.kind == "copy" else work.name
        groups[work.kind, name].append(piece)  # type: ignore[index]  # of the three kinds, see _sorted
    kernels = []
    for (kind, name), held in groups.items():
        per_run = [0.0] * runs
        for piece in held:
            per_run[piece.run] += piece.work.us
        said = parse_kernel_name(name)
        kernels.append(
            DeviceKernel(
                name=name,
                kind=kind,
                count=len(held) / runs,
                us=float(statistics.median(per_run)),
                runs=runs,
                bytes=sum(piece.work.bytes for piece in held) // runs,
                tensor_cores=said.tensor_cores,
                precision=said.precision,
            )
        )
    return tuple(sorted(kernels, key=lambda kernel: -kernel.us))


def _boundary(
    kind: Literal["copy", "sync"], where: str, pieces: list[_Piece], runs: int, of: Literal["device", "wall"]
) -> Boundary:
    per_run = [0.0] * runs
    for piece in pieces:
        per_run[piece.run] += piece.work.us
    size = sum(piece.work.bytes for piece in pieces) // runs
    return Boundary(
        kind=kind,
        where=where,
        count=max(1, round(len(pieces) / runs)),
        bytes=size if kind == "copy" else None,
        time=Time(value=float(statistics.median(per_run)), unit="us", kind=of, runs=runs),
    )


def _copies(outside: Iterable[_Piece], runs: int) -> list[Boundary]:
    groups: dict[str, list[_Piece]] = defaultdict(list)
    for piece in outside:
        work = piece.work
        if work.kind == "copy":
            groups[f"{work.source or '?'} -> {work.destination or '?'}, {BESIDE}"].append(piece)
    return [_boundary("copy", where, held, runs, "device") for where, held in groups.items()]


def _other(outside: Iterable[_Piece], runs: int) -> list[Boundary]:
    held = [piece for piece in outside if piece.work.kind == "fill"]
    return [_boundary("copy", f"fills {BESIDE}", held, runs, "device")] if held else []


def _waits(waits: Iterable[_Piece], runs: int) -> list[Boundary]:
    groups: dict[str, list[_Piece]] = defaultdict(list)
    for piece in waits:
        groups[piece.work.name].append(piece)
    return [_boundary("sync", where, held, runs, "wall") for where, held in groups.items()]


def outside(windows: Sequence[tuple[float, float]], spans: Sequence[NodeSpan]) -> dict[str, float]:
    """Return what went by before the first node and after the last, and what went by between nodes.

    Parameters
    ----------
    windows : sequence of (float, float)
        Start and end of each counted run.
    spans : sequence of NodeSpan
        The executions of nodes in these runs.

    Returns
    -------
    dict of str to float
        ``call`` and ``between``, medians over the runs, microseconds; empty where no node ran. Nodes that ran at the
        same time are counted once, so that ``between`` is time in which none did.
    """
    ordered = sorted((span.start_us, span.end_us) for span in spans)
    call, between, at = [], [], 0
    for start, end in sorted(windows):
        while at < len(ordered) and ordered[at][0] < start:
            at += 1
        first, reached, idle = None, start, 0.0
        while at < len(ordered) and ordered[at][0] <= end:
            begin, done = ordered[at]
            if first is None:
                first, reached = begin, begin
            idle += max(0.0, begin - reached)
            reached = max(reached, done)
            at += 1
        if first is not None:
            call.append(max(0.0, first - start) + max(0.0, end - reached))
            between.append(idle)
    if not call:
        return {}
    return {"call": float(statistics.median(call)), "between": float(statistics.median(between))}
