# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`explain_session`: requested, resolved, observed, for one open session."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.accuracy import make_reference
from xpuruntime.engines.base import LoadedModel, Observed
from xpuruntime.engines.control_builder import PROBED
from xpuruntime.errors import InputError, XpuRuntimeError
from xpuruntime.evidence import Latency, SourceNode, build_report
from xpuruntime.evidence.cuda_graphs import GraphStatus, graph_status
from xpuruntime.evidence.determinism import determinism_seen
from xpuruntime.evidence.documents import checkpoint, observe_checkpoints
from xpuruntime.evidence.records import KeySeen, Status, Unit
from xpuruntime.evidence.report_building import (
    coverage_note,
    environment_facts,
    instrumented,
    machine_facts,
    profiler_overhead_note,
)
from xpuruntime.evidence.shape_coverage import ShapeCoverage, shape_coverage
from xpuruntime.evidence.tolerances import compare_within
from xpuruntime.inference.profiling import MemoryWatch
from xpuruntime.inference.session_arguments import compare_kernels
from xpuruntime.runtime.profiler import Mark, tell
from xpuruntime.runtime.session_registry import instrumented_method
from xpuruntime.runtime.telemetry import log_decision, log_step, traced

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo, TensorInfo
    from xpuruntime.evidence import Report
    from xpuruntime.inference.session import InferenceSession

_LEVELS = {"honoured": "DEBUG", "substituted": "WARNING", "unsupported": "WARNING"}

_WARM, _STEPS = 3, 3
_ACCURACY = ("accuracy.reference", "accuracy.rtol", "accuracy.atol", "accuracy.cosine")


def _facts_of(report: Report) -> dict[str, Any]:
    deviations = [observation.key for observation in report.deviations]
    plan = {name: report.plan.get(name) for name in ("engine", "device", "precision")}
    return {**plan, "honoured": report.honoured, "deviations": deviations}


@traced("explain", _facts_of)
def explain_session(
    session: InferenceSession, loaded: LoadedModel, inputs: Mapping[str, Any] | None, runs: int
) -> Report:
    """Time the session itself, then watch an instrumented copy; see `InferenceSession.explain`."""
    from xpuruntime.engines.precision import probe_feeds, probing, shapes_text
    from xpuruntime.runtime.libraries.loading import loaded_libraries

    notes = []
    feeds: Mapping[str, Any]
    if inputs is None:
        feeds = probe_feeds(session.model)
        if feeds:
            notes.append(f"inputs were generated ({shapes_text(feeds)}): pass explain(inputs) for your own")
    else:
        feeds = inputs
    watch = MemoryWatch(loaded.memory, session.plan.device)
    with probing(session.model, feeds, generated=inputs is None):
        observed, latency = _watched_runs(session, loaded, feeds, runs, watch, notes)
    log_step("comparing with the policy", 3, _STEPS)
    observed = msgspec.structs.replace(observed, keys=_keys(session, loaded, inputs, observed, notes))
    if session.plan.policy_source == "model metadata":
        notes.append("the policy is the one that the model carries (source: model metadata)")
    device = session.plan.device
    cuda = [gpu for gpu in session._machine.cuda if f"cuda:{gpu.index}" == device]
    arch = "sm{}{}".format(*cuda[0].compute_capability) if cuda else None
    notes.extend(compare_kernels(session.model, session.plan, arch, observed.units))
    graph = source_graph(session.model)
    report = build_report(
        session.plan.to_dict(),
        session.plan.controls,
        observed,
        allow_cpu_ops=session.policy.execution.allow_cpu_ops,
        conversions=(*loaded.conversions(), *session._checks),
        latency=latency,
        memory=loaded.memory(),
        libraries=loaded_libraries(),
        notes=notes,
        environment={**environment_facts(), **machine_facts(session._machine)},
        graph=graph,
        memory_over_time=watch.samples,
        cuda_graph=_graph_status(session, loaded, observed, graph),
        shapes=_shapes(session, feeds, observed),
        determinism=session.determinism_tests,
    )
    for observation in report.observations:
        text = (
            f"{observation.key}: asked {observation.requested}, observed {observation.observed}: {observation.status}: "
            f"{observation.reason}"
        )
        names = ("key", "requested", "observed", "status")
        facts = {name: getattr(observation, name) for name in names}
        log_decision("explain", _LEVELS.get(observation.status, "INFO"), "observation", text, **facts)
    return report


def _watched_runs(
    session: InferenceSession,
    loaded: LoadedModel,
    feeds: Mapping[str, Any],
    runs: int,
    watch: MemoryWatch,
    notes: list[str],
) -> tuple[Observed, Latency]:
    """Time runs without instruments, then make the instrumented pass; `watch` samples memory around both."""
    watch("before")
    with observe_checkpoints(watch):
        run = instrumented_method(loaded, "run")
        log_step("timing", 1, _STEPS)
        latency = measure(lambda: run(feeds), runs)
        log_step("observing", 2, _STEPS)
        began = time.time_ns()
        observed = _observe(loaded, feeds, runs)
    if session.plan.engine != "onnxruntime":  # which reports when its nodes ran, and not only for how long
        tell(lambda: laid_out(observed.units, began))
    watch("after the pass")
    notes.extend(watch.notes)
    within = instrumented(
        observed.run_us,
        observed.units_us,
        sum(u.time is not None and u.phase != "decode" for u in observed.units),  # the runs are prefills then
        outside_us=observed.outside_us,
        cut_us=observed.cut_us,
    )
    detail = {"inputs": _described(feeds), "instrumented": within}
    latency = msgspec.structs.replace(latency, detail={key: value for key, value in detail.items() if value})
    notes.extend(
        note for note in (coverage_note(within), profiler_overhead_note(within, latency.p90_us)) if note is not None
    )
    return observed, latency


def _keys(
    session: InferenceSession,
    loaded: LoadedModel,
    inputs: Mapping[str, Any] | None,
    observed: Observed,
    notes: list[str],
) -> dict[str, KeySeen]:
    """Return what was compared for keys that units do not show: accuracy, lock, determinism, the engine's own."""
    checked = _accuracy(session, loaded, inputs, notes)
    if session._lock is not None:
        from xpuruntime.inference.locked import lock_seen

        checked["execution.lock"] = lock_seen(session._lock, observed.units, observed.decisions)
    tested = session.determinism_tests
    seen = {} if tested is None else determinism_seen(tested, session.policy.execution.determinism)
    return {**checked, **observed.keys, **seen}


def _accuracy(
    session: InferenceSession, loaded: LoadedModel, inputs: Mapping[str, Any] | None, notes: list[str]
) -> dict[str, KeySeen]:
    """Return what the accuracy probe of the session says of the accuracy keys."""
    # Where the probe at loading compared nothing, it is repeated with the inputs that are given here.
    proof = session._proof
    if proof is None:
        return {}
    text = PROBED
    if proof.inconclusive is not None and inputs is not None:
        try:
            reference = make_reference(session._request, session._engine, session._machine, inputs)
            proof = compare_within(
                reference.outputs, loaded.run(reference.feeds), proof.tolerance, session.model.random_outputs
            )
            text = "the inputs of explain() compared with fp32 on the CPU"
            notes.append(f"the probe at loading was inconclusive; {text}: {proof}")
        except XpuRuntimeError as error:
            notes.append(f"the probe at loading was inconclusive, and the inputs of explain() cannot be used: {error}")
    status: Status = "honoured" if proof.passed else "substituted"
    reason = proof.figures
    if proof.inconclusive is not None:
        status, reason = "inconclusive", proof.inconclusive
    tested = [key for key in _ACCURACY if (control := session.plan.control(key)) and control.resolved == PROBED]
    seen = dict.fromkeys(tested, KeySeen(observed=text, status=status, reason=reason))
    if status == "honoured" and proof.no_cosine and "accuracy.cosine" in seen:
        seen["accuracy.cosine"] = KeySeen(observed=text, status="inconclusive", reason=proof.no_cosine)
    return seen


def _graph_status(
    session: InferenceSession, loaded: LoadedModel, observed: Observed, graph: tuple[SourceNode, ...]
) -> GraphStatus:
    return graph_status(
        device=session.plan.device,
        engine=session.plan.engine,
        stated=session.policy.execution.cuda_graph,
        units=observed.units,
        boundaries=observed.boundaries,
        graph=graph,
        open_sizes={tensor.name: _open(tensor) for tensor in session.inputs},
        refused=loaded.graph_refusal(),
        bound=session._bound,
        partial=observed.partial,
    )


def _open(tensor: TensorInfo) -> list[str]:
    if tensor.shape is None:
        return ["its shape"]
    return [size or f"dimension {i}" for i, size in enumerate(tensor.shape) if not isinstance(size, int)]


def _shapes(session: InferenceSession, feeds: Mapping[str, Any], observed: Observed) -> ShapeCoverage:
    seen = {
        name: [int(size) for size in array.shape]
        for name, array in (feeds.items() if hasattr(feeds, "items") else ())
        if hasattr(array, "shape")
    }
    profiles = session.plan.settings.get("profiles") or {}
    return shape_coverage(
        (*session.inputs, *session.model.overridable_inputs),
        seen,
        stated=session.policy.execution.shapes,
        profiles=profiles,
        decisions=observed.decisions,
    )


def laid_out(units: Iterable[Unit], began_ns: int) -> list[Mark]:
    """Return units one after another, for a trace: engines tell how long they took, and not when they ran."""
    outs, at = [], began_ns
    for unit in units:
        if unit.time is None or unit.time.unit != "us" or not unit.time.value:
            continue
        end = at + round(unit.time.value * 1000)
        details = {"op": unit.op, "device": unit.device, "kernel": unit.kernel, "precision": unit.precision_run}
        outs.append(Mark(f"units of {unit.engine}, one run, laid end to end", unit.id, at, end, 0, details))
        at = end
    return outs


def source_graph(model: ModelInfo) -> tuple[SourceNode, ...]:
    """Return a model's nodes with the tensors between them; weights and other constants of the file are left out."""
    between = {tensor.name for tensor in model.inputs} | {name for node in model.nodes for name in node.outputs}
    between.discard("")  # an input or output that is left out
    return tuple(
        SourceNode(
            name=node.name,
            op=node.op,
            inputs=tuple(name for name in node.inputs if name in between),
            outputs=tuple(name for name in node.outputs if name),
        )
        for node in model.nodes
    )


def _observe(loaded: LoadedModel, feeds: Mapping[str, Any], runs: int) -> Observed:
    """Watch the instrumented copy; where it breaks down as a whole, say so and go on with what else is known."""
    try:
        return loaded.observe(feeds, runs)
    except InputError:
        raise
    except Exception as error:  # an engine of someone else's may raise anything
        text = " ".join(str(error).split())[:500]
        return Observed(partial=True, notes=(f"the instrumented pass broke off: {type(error).__name__}: {text}",))


def _described(feeds: Mapping[str, Any]) -> dict[str, str]:
    """Return input name to dtype and shape, so that reports of other inputs are not compared by their times."""
    if not hasattr(feeds, "items"):
        return {}
    return {
        name: f"{str(array.dtype).rpartition('.')[2]} {[int(size) for size in array.shape]}"
        for name, array in feeds.items()
        if hasattr(array, "dtype") and hasattr(array, "shape")
    }


def measure(run: Callable[[], Any], runs: int) -> Latency:
    """Return the wall time of whole calls, after a few that are not counted."""
    for _ in range(_WARM):
        run()
    checkpoint("the session's warm-up runs")
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    checkpoint("the session's timed runs")
    times.sort()
    return Latency(
        median_us=times[len(times) // 2],
        p90_us=times[min(len(times) - 1, int(len(times) * 0.9))],
        min_us=times[0],
        runs=runs,
    )
