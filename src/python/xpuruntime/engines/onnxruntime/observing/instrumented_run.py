# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Instrumented run of ONNX Runtime: one session with its profile, its node assignment and its optimized graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from xpuruntime.engines.base import Observed
from xpuruntime.engines.observation import effective_of
from xpuruntime.engines.onnxruntime.observing.kernels import DeviceTimes, NodeKey, outside
from xpuruntime.engines.onnxruntime.observing.profile import Devices, NodeProfile, read_profile
from xpuruntime.engines.onnxruntime.observing.unit_attribution import attribute_units
from xpuruntime.engines.onnxruntime.opening import assignment
from xpuruntime.errors import EngineError
from xpuruntime.evidence.documents import COLD, COUNTED, LOADED, checkpoint
from xpuruntime.evidence.records import Span, Timeline
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.printable import error_line
from xpuruntime.runtime.profiler import tell

_IDLE = "a run executes no node: all of them were computed or removed when the session was made"


def instrument(options: Any, profile_prefix: str | None, optimized_path: str | None) -> None:
    """Set on `onnxruntime.SessionOptions` what `observe` needs; everything else stays as it is."""
    if profile_prefix is not None:
        options.enable_profiling = True
        options.profile_file_prefix = profile_prefix
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if optimized_path is not None:
        options.optimized_model_filepath = optimized_path
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", Path(optimized_path).name + ".weights"
        )
        # ONNX Runtime warns that an optimized graph suits this machine only: it is read here and deleted.
        options.log_severity_level = 3


def observe(
    make_session: Callable[[str | None, str | None], Any],
    feeds: Mapping[str, Any],
    runs: int,
    source: Any,
    *,
    device: str = "cpu",
    precision: str = "model",
    allow_cpu_ops: Collection[str] = (),
    engine: str = "onnxruntime",
    run: Callable[[Any, Mapping[str, Any]], Any] | None = None,
) -> Observed:
    """Run an instrumented session and say what ran. Never raises for what goes wrong on the way: it is noted."""
    notes: list[str] = []
    watched = Devices(device)
    try:
        folder = ScratchFolder("observe")
    except OSError as error:
        notes.append(
            f"no temporary folder for the profile ({error}): of this pass only where nodes were placed is known, no "
            "time, precision or fusion. Set TMPDIR to a folder that is writable and has free space"
        )
        try:
            assigned = assignment(make_session(None, None))
        except Exception as failed:
            return Observed(partial=True, notes=(*notes, f"nothing was observed: {error_line(failed)[:300]}"))
        profile, graph, broken, lost = NodeProfile(events=()), None, True, True
    else:
        with folder as directory:
            prefix, path = str(Path(directory) / "profile"), Path(directory) / "optimized.onnx"
            session, broken = _make(make_session, prefix, str(path), notes)
            if session is None:
                return Observed(partial=True, notes=tuple(notes))
            checkpoint(LOADED)
            with watched:
                broken |= _run(session, feeds, max(1, runs), run, notes)
            watched.begin_of(session)
            profile, lost = _finish(session, notes)
            graph = _load(path, notes)
            assigned = assignment(session)
            session = None
    tell(lambda: watched.marks(profile))
    seen = watched.added_to(profile)
    profile = seen.profile
    idle = _nothing_to_run(profile, graph) and not (broken or lost)
    if idle:
        profile = msgspec.structs.replace(profile, partial=False, notes=(_IDLE,))
    if assigned is None:
        notes.append("this ONNX Runtime does not say which provider each node was assigned to")
    joined = attribute_units(
        source,
        graph,
        profile.events,
        assigned,
        device=device,
        precision=precision,
        allow_cpu_ops=allow_cpu_ops,
        engine=engine,
    )
    away = any(e.provider != "CPUExecutionProvider" for e in profile.events)
    if away and not seen.device_us:
        notes.append(
            "times of units outside the CPU are the host's: how long it took to hand the work over. ONNX Runtime's "
            "profile holds no device time, and no copies of the session's own inputs and outputs"
        )
    return Observed(
        units=joined.units,
        boundaries=(*joined.boundaries, *seen.boundaries),
        effective={"execution.engine": engine} if idle else effective_of(joined.units, engine),
        notes=(*notes, *seen.notes, *profile.notes, *joined.notes),
        partial=broken or lost or profile.partial or joined.partial,
        run_us=profile.run_us,
        units_us=() if away else profile.nodes_us,
        outside_us={} if away else outside(profile.windows, profile.spans),
        cut_us=0.0 if away or not profile.run_us else len(profile.spans) / len(profile.run_us),
        live=joined.live,
        timeline=_timeline(seen, joined.unit_of),
    )


def _timeline(seen: DeviceTimes, unit_of: Mapping[NodeKey, str]) -> Timeline | None:
    """Return when what ran in the last run, ``None`` where nothing did, or too much."""
    if not seen.profile.windows:
        return None
    begin, end = max(seen.profile.windows)
    spans, threads = [], dict[int, str]()
    for node in sorted(seen.profile.spans, key=lambda span: (span.start_us, -span.end_us)):
        if not begin <= node.start_us <= end:
            continue
        lane = threads.setdefault(node.thread, f"thread {len(threads) + 1}")
        unit, start, us = unit_of.get(node[:3], ""), node.start_us - begin, node.end_us - node.start_us
        spans.append(Span(name=node.name, unit=unit, kind="unit", lane=lane, start_us=start, us=us))
    for key, work, start in sorted(seen.last_run, key=lambda started: started[2]):
        lane = f"cuda:{work.device} stream {work.stream}"
        kind: Any = work.kind
        unit = unit_of.get(key, "") if key is not None else ""
        spans.append(Span(name=work.name, unit=unit, kind=kind, lane=lane, start_us=start - begin, us=work.us))
    if not spans or len(spans) > Timeline.MOST_SPANS:
        return None
    return Timeline(run_us=end - begin, spans=tuple(spans))


def _nothing_to_run(profile: NodeProfile, graph: Any) -> bool:
    return bool(profile.windows) and not profile.events and graph is not None and not graph.graph.node


def _make(
    make_session: Callable[[str | None, str | None], Any], prefix: str, path: str, notes: list[str]
) -> tuple[Any, bool]:
    try:
        return make_session(prefix, path), False
    except Exception as error:
        notes.append(f"the optimized graph could not be written: {error_line(error)[:300]}")
    try:
        return make_session(prefix, None), True
    except Exception as error:
        notes.append(f"nothing was observed: the instrumented session could not be made: {error_line(error)[:300]}")
        return None, True


def _run(
    session: Any,
    feeds: Mapping[str, Any],
    runs: int,
    run: Callable[[Any, Mapping[str, Any]], Any] | None,
    notes: list[str],
) -> bool:
    for number in range(runs + 1):
        try:
            if run is None:
                session.run(None, dict(feeds))
            else:
                run(session, feeds)
        except Exception as error:
            notes.append(f"instrumented run {number + 1} of {runs + 1} failed: {error_line(error)[:300]}")
            return True
        if number in (0, runs):
            checkpoint(COUNTED if number else COLD)
    return False


def _finish(session: Any, notes: list[str]) -> tuple[NodeProfile, bool]:
    try:
        written = session.end_profiling()
    except Exception as error:
        notes.append(f"the profile could not be written: {error_line(error)[:300]}")
        return NodeProfile(events=()), True
    try:
        return read_profile(written), False
    except EngineError as error:
        notes.append(str(error))
        return NodeProfile(events=()), True


def _load(path: Path, notes: list[str]) -> Any:
    """Read the optimized graph without its weights; None when it is missing or damaged."""
    if not path.exists():
        return None
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(str(path), load_external_data=False)
    except (OSError, DecodeError, ValueError) as error:
        notes.append(f"the optimized graph could not be read back: {error_line(error)[:300]}")
        return None
    if not model.graph.node and not model.graph.output:
        notes.append("the optimized graph was written empty: is the disk full?")
        return None
    return model
