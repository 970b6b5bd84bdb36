# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Pages beside the protocol: metrics for Prometheus, and the state of a server for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from xpuruntime.errors import XpuRuntimeError
from xpuruntime.policies.kinds import duration_text
from xpuruntime.runtime.cpu_and_memory import process_memory
from xpuruntime.serving.models.service import Models
from xpuruntime.serving.monitoring.records import FAILURES, LATENCY_BUCKETS, StatisticsSnapshot

if TYPE_CHECKING:
    from xpuruntime.serving.messages import ModelService
    from xpuruntime.serving.models.slot import ModelSlot
    from xpuruntime.serving.models.version import ServedVersion

_KEYS = ("model", "version")


def exposition(models: Models, accept: str = "") -> tuple[bytes, str]:
    """Return the metrics as Prometheus reads them, with their content type."""
    try:
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder
    except ImportError as error:
        raise XpuRuntimeError(
            "metrics need the package prometheus-client, which is not installed. Fix: pip install 'xpuruntime[serve]'"
        ) from error
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ModelsCollector(models))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class ModelsCollector:
    """A `Collector` of prometheus-client: register it where other metrics of the process are, too."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._dialects = models.settings.metrics.dialect

    def describe(self) -> list[Any]:
        """Return nothing: what there is depends on the models."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the families."""
        counted_versions = [
            (version, version.statistics.snapshot()) for slot in self._models.slots.values() for version in slot.loaded
        ]
        if "xrt" in self._dialects:
            yield from _counted(counted_versions)
            yield from _states(self._models, [version for version, _ in counted_versions])
            yield from _watched([version for version, _ in counted_versions])
        if "triton" in self._dialects:
            yield from _triton(counted_versions)


def _labels(version: ServedVersion) -> list[str]:
    return [version.name, str(version.version)]


def _counted(counted_versions: Sequence[tuple[ServedVersion, StatisticsSnapshot]]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    requests = CounterMetricFamily("xrt_requests", "Requests by outcome.", labels=[*_KEYS, "outcome"])
    latency = HistogramMetricFamily("xrt_request_seconds", "Seconds from arrival to answer.", labels=_KEYS)
    queue = CounterMetricFamily("xrt_queue_seconds", "Seconds that requests waited.", labels=_KEYS)
    compute = CounterMetricFamily("xrt_compute_seconds", "Seconds of executions.", labels=[*_KEYS, "phase"])
    rows = CounterMetricFamily("xrt_inferences", "Rows that were run.", labels=_KEYS)
    executions = CounterMetricFamily("xrt_executions", "Batches that were run.", labels=_KEYS)
    dispatches = CounterMetricFamily("xrt_dispatches", "Batches by why they were sent.", labels=[*_KEYS, "reason"])
    elements = CounterMetricFamily("xrt_input_elements", "Elements of inputs.", labels=[*_KEYS, "kind"])
    for version, counted in counted_versions:
        at = _labels(version)
        requests.add_metric([*at, "success"], counted.requests["success"].times)
        for failure in FAILURES:
            requests.add_metric([*at, failure.lower()], counted.failures[failure])
        buckets, so_far = [], 0
        for bound, count in zip((*map(str, LATENCY_BUCKETS), "+Inf"), counted.latency_buckets, strict=True):
            so_far += count
            buckets.append((bound, so_far))
        latency.add_metric(at, buckets, counted.latency_sum)
        queue.add_metric(at, counted.requests["queue"].ns / 1e9)
        for phase, position in (("input", 0), ("infer", 1), ("output", 2)):
            compute.add_metric([*at, phase], sum(times[position].ns for times in counted.batches.values()) / 1e9)
        rows.add_metric(at, counted.inferences)
        executions.add_metric(at, counted.executions)
        for reason, count in counted.reasons.items():
            dispatches.add_metric([*at, reason], count)
        elements.add_metric([*at, "own"], counted.elements)
        elements.add_metric([*at, "padding"], counted.padding)
    yield from (requests, latency, queue, compute, rows, executions, dispatches, elements)


def _states(models: Models, loaded: Sequence[ServedVersion]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    ready = GaugeMetricFamily("xrt_model_ready", "Whether the model makes progress.", labels=["model"])
    for name, slot in models.slots.items():
        ready.add_metric([name], float(slot.ready()[0]))
    waiting = GaugeMetricFamily("xrt_queue_requests", "Requests that wait.", labels=_KEYS)
    running = GaugeMetricFamily("xrt_running_executions", "Batches that run.", labels=_KEYS)
    oldest = GaugeMetricFamily("xrt_queue_oldest_seconds", "How long the oldest request has waited.", labels=_KEYS)
    memory = GaugeMetricFamily("xrt_model_memory_bytes", "Size of a model.", labels=[*_KEYS, "device", "source"])
    info = InfoMetricFamily("xrt_model", "What a model runs under.", labels=_KEYS)
    for version in loaded:
        at, state = _labels(version), version.batcher.state()
        waiting.add_metric(at, state.waiting)
        running.add_metric(at, state.running)
        oldest.add_metric(at, state.oldest_wait)
        memory.add_metric([*at, version.memory["device"], version.memory["source"]], version.memory["bytes"])
        plan = version.session.plan
        lock = version.lock.digest if version.lock is not None else ""
        facts = {"engine": plan.engine, "device": version.devices, "precision": plan.precision, "lock": lock}
        info.add_metric(at, {**facts, "execution_hash": plan.execution_hash})
    used = GaugeMetricFamily("xrt_memory_used_bytes", "Memory of all models of a device.", labels=["device"])
    for device, size in models.budget.used().items():
        used.add_metric([device], size)
    limits = GaugeMetricFamily("xrt_memory_budget_bytes", "Most memory of all models.", labels=["device"])
    for device, size in models.budget.limits.items():
        limits.add_metric([device], size)
    resident = GaugeMetricFamily("xrt_process_resident_bytes", "Memory of the process, with what engines keep of it.")
    resident.add_metric([], process_memory().resident or 0)
    evicted = CounterMetricFamily("xrt_evictions", "Models that were evicted for others.", models.budget.evictions)
    yield from (ready, waiting, running, oldest, memory, info, used, limits, resident, evicted)
    if models.access_log is not None:
        text = "Lines of the access log that could not be written."
        yield CounterMetricFamily("xrt_access_log_lost", text, models.access_log.lost)


def _watched(loaded: Sequence[ServedVersion]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    drift = GaugeMetricFamily("xrt_canary_drift", "Largest relative difference of the last canary.", labels=_KEYS)
    ratio = GaugeMetricFamily("xrt_shadow_time_ratio", "Time of the shadow over that of the model.", labels=_KEYS)
    families = {
        name: CounterMetricFamily(f"xrt_{name}_runs", f"Requests that the {name} ran.", labels=[*_KEYS, "result"])
        for name in ("canary", "shadow")
    }
    for version in loaded:
        at = _labels(version)
        for name, facts in version.watched().items():
            outside = facts["out_of_tolerance"]
            families[name].add_metric([*at, "within"], facts["runs"] - outside)
            families[name].add_metric([*at, "outside"], outside)
            families[name].add_metric([*at, "dropped"], facts["dropped"])
            families[name].add_metric([*at, "error"], facts["errors"])
            if name == "canary":
                drift.add_metric(at, facts["drift"])
            elif facts["time"] is not None:
                ratio.add_metric(at, facts["time"]["ratio"])
    yield from (*families.values(), drift, ratio)


def _triton(counted_versions: Sequence[tuple[ServedVersion, StatisticsSnapshot]]) -> Iterator[Any]:
    """Yield the metrics under Triton's names, whose counters do not end in ``_total``: so they have no type here."""
    from prometheus_client.core import GaugeMetricFamily, UnknownMetricFamily

    def family(name: str, text: str, *labels: str) -> Any:
        return UnknownMetricFamily(f"nv_inference_{name}", text, labels=[*_KEYS, *labels])

    success = family("request_success", "Requests that were answered.")
    failure = family("request_failure", "Requests that failed, by reason.", "reason")
    rows = family("count", "Rows that were run.")
    executions = family("exec_count", "Batches that were run.")
    pending = GaugeMetricFamily("nv_inference_pending_request_count", "Requests that wait.", labels=_KEYS)
    durations = {
        name: family(f"{name}_duration_us", f"Microseconds: {name.replace('_', ' ')}.")
        for name in ("request", "queue", "compute_input", "compute_infer", "compute_output")
    }
    for version, counted in counted_versions:
        at = _labels(version)
        success.add_metric(at, counted.requests["success"].times)
        for reason in FAILURES:
            failure.add_metric([*at, reason], counted.failures[reason])
        rows.add_metric(at, counted.inferences)
        executions.add_metric(at, counted.executions)
        pending.add_metric(at, version.batcher.state().waiting)
        for name, metric in durations.items():
            metric.add_metric(at, counted.requests["success" if name == "request" else name].ns // 1000)
    yield from (success, failure, rows, executions, pending, *durations.values())


def status_page(models: Models) -> str:
    """Return the page, which loads itself anew every few seconds and nothing else."""
    from xpuruntime.evidence.page import render_serving

    return render_serving(status_data(models))


def status_data(models: Models) -> dict[str, Any]:
    """Return what the page shows, as plain values."""
    ready, reason = models.ready()
    rows = [row for slot in models.slots.values() for row in _rows(slot)]
    served = [row for row in rows if row["state"] == "READY"]
    used, limits = models.budget.used(), models.budget.limits
    return {
        "ready": ready,
        "reason": reason,
        "facts": [
            ["models ready", f"{sum(row['good'] for row in served)} of {len(models.slots)}"],
            ["answered", f"{sum(row['requests'] for row in rows):,}"],
            ["failed", f"{sum(row['failed'] for row in rows):,}"],
            ["waiting", str(sum(row["waiting"] for row in rows))],
            ["evicted", str(models.budget.evictions)],
        ],
        "models": rows,
        "devices": [
            {"device": device, "used": used.get(device, 0), "budget": limits.get(device)}
            for device in sorted({*used, *limits})
        ],
    }


def _rows(slot: ModelSlot) -> list[dict[str, Any]]:
    loaded = slot.loaded
    if loaded:
        return [_row(version) for version in loaded]
    (state,) = slot.index()
    return [
        {
            **dict.fromkeys(("version", "engine", "plan", "lock", "canary", "shadow", "slo", "batching"), ""),
            **dict.fromkeys(("requests", "failed", "waiting", "running", "executions", "inferences", "padding"), 0),
            "name": slot.name,
            "state": state["state"],
            "reason": state["reason"],
            "good": slot.ready()[0],
            "p50": None,
            "p99": None,
            "reasons": {},
            "memory": None,
        }
    ]


def _row(loaded: ServedVersion) -> dict[str, Any]:
    counted, queue, plan = loaded.statistics.snapshot(), loaded.batcher.state(), loaded.session.plan
    p50, p99 = loaded.statistics.latency(0.5, 0.99)
    good, reason = loaded.progress()
    watched, batching, limits = loaded.watched(), loaded.batching, loaded.limits
    canary, shadow = watched.get("canary"), watched.get("shadow")
    return {
        "name": loaded.name,
        "version": str(loaded.version),
        "state": "READY",
        "reason": reason,
        "good": good,
        "engine": f"{plan.engine}@{loaded.devices} ({plan.precision})",
        "p50": p50,
        "p99": p99,
        "requests": counted.requests["success"].times,
        "failed": counted.requests["fail"].times,
        "waiting": queue.waiting,
        "running": queue.running,
        "executions": counted.executions,
        "inferences": counted.inferences,
        "reasons": counted.reasons,
        "padding": counted.padding_share,
        "batching": ", ".join(f"{key} {_shown(value)}" for key, value in batching.to_plain().items()) or "no batches",
        "memory": loaded.memory,
        "plan": plan.execution_hash,
        "lock": loaded.lock.digest if loaded.lock is not None else "",
        "canary": _canary(canary) if canary is not None else "none",
        "shadow": _shadow(shadow) if shadow is not None else "none",
        "slo": "none"
        if limits is None
        else f"p99 {duration_text(limits.p99)}, {'met' if limits.met else 'not met'}: batches of "
        f"{limits.max_batch_size}, delay {limits.max_queue_delay_us} us",
    }


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple, dict)) else str(value)


def _canary(watch: dict[str, Any]) -> str:
    said = (
        f"{watch['runs']} runs, {watch['out_of_tolerance']} out of tolerance, largest drift {watch['worst_drift']:.3g}"
    )
    return said + _left_out(watch)


def _shadow(shadow: dict[str, Any]) -> str:
    time = shadow["time"]
    verdict = f"{time['verdict']} ({time['ratio']:.3f} x)" if time is not None else f"{shadow['rounds']} rounds so far"
    said = f"{shadow['engine']}: {verdict}, {shadow['out_of_tolerance']} of {shadow['runs']} out of tolerance"
    return said + _left_out(shadow)


def _left_out(watch: dict[str, Any]) -> str:
    return "".join(f", {watch[what]} {what}" for what in ("dropped", "errors") if watch[what])


#: Path to a function of the header ``Accept``, which returns the body and its content type.
Pages: TypeAlias = Mapping[str, Callable[[str], tuple[bytes, str]]]


def pages_of(service: ModelService) -> Pages:
    """Return the pages of the models of this package, and none of another service."""
    if not isinstance(service, Models):
        return {}
    models = service

    def metrics(accept: str) -> tuple[bytes, str]:
        return exposition(models, accept)

    def status(accept: str) -> tuple[bytes, str]:
        del accept
        return status_page(models).encode(), "text/html; charset=utf-8"

    return {models.settings.metrics.path: metrics, "/status": status}
