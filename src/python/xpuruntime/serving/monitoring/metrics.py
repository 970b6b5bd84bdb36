# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Metrics for Prometheus: a collector that reads the counters of the models when it is asked, and not before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.errors import XpuRuntimeError
from xpuruntime.runtime.process_memory import process_memory
from xpuruntime.serving.monitoring.statistics import FAILURES, LATENCY_BUCKETS, StatisticsSnapshot

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from xpuruntime.serving.models.service import Models
    from xpuruntime.serving.models.version import ServedVersion

__all__ = ["ModelsCollector", "exposition"]

_KEYS = ("model", "version")


def exposition(models: Models, accept: str = "") -> tuple[bytes, str]:
    """Return the metrics as Prometheus reads them, with their content type.

    Parameters
    ----------
    models : Models
    accept : str
        The header of the request; OpenMetrics where it asks for that.

    Raises
    ------
    XpuRuntimeError
        The package prometheus-client is not installed.
    """
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
        found = [(one, one.statistics.snapshot()) for slot in self._models.slots.values() for one in slot.loaded]
        if "xrt" in self._dialects:
            yield from _counted(found)
            yield from _states(self._models, [one for one, _ in found])
            yield from _watched([one for one, _ in found])
        if "triton" in self._dialects:
            yield from _triton(found)


def _labels(one: ServedVersion) -> list[str]:
    return [one.name, str(one.version)]


def _counted(found: Sequence[tuple[ServedVersion, StatisticsSnapshot]]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    requests = CounterMetricFamily("xrt_requests", "Requests by outcome.", labels=[*_KEYS, "outcome"])
    latency = HistogramMetricFamily("xrt_request_seconds", "Seconds from arrival to answer.", labels=_KEYS)
    queue = CounterMetricFamily("xrt_queue_seconds", "Seconds that requests waited.", labels=_KEYS)
    compute = CounterMetricFamily("xrt_compute_seconds", "Seconds of executions.", labels=[*_KEYS, "phase"])
    rows = CounterMetricFamily("xrt_inferences", "Rows that were run.", labels=_KEYS)
    executions = CounterMetricFamily("xrt_executions", "Batches that were run.", labels=_KEYS)
    dispatches = CounterMetricFamily("xrt_dispatches", "Batches by why they were sent.", labels=[*_KEYS, "reason"])
    elements = CounterMetricFamily("xrt_input_elements", "Elements of inputs.", labels=[*_KEYS, "kind"])
    for one, counted in found:
        at = _labels(one)
        requests.add_metric([*at, "success"], counted.requests["success"].times)
        for failure in FAILURES:
            requests.add_metric([*at, failure.lower()], counted.failures[failure])
        buckets, so_far = [], 0
        for bound, count in zip((*map(str, LATENCY_BUCKETS), "+Inf"), counted.latency_buckets, strict=True):
            so_far += count
            buckets.append((bound, so_far))
        latency.add_metric(at, buckets, counted.latency_sum)
        queue.add_metric(at, counted.requests["queue"].ns / 1e9)
        for phase, place in (("input", 0), ("infer", 1), ("output", 2)):
            compute.add_metric([*at, phase], sum(times[place].ns for times in counted.batches.values()) / 1e9)
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
    for one in loaded:
        at, state = _labels(one), one.batcher.state()
        waiting.add_metric(at, state.waiting)
        running.add_metric(at, state.running)
        oldest.add_metric(at, state.oldest_wait)
        memory.add_metric([*at, one.memory["device"], one.memory["source"]], one.memory["bytes"])
        plan = one.session.plan
        lock = one.lock.digest if one.lock is not None else ""
        facts = {"engine": plan.engine, "device": plan.device, "precision": plan.precision, "lock": lock}
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
    for one in loaded:
        at = _labels(one)
        for name, facts in one.watched().items():
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


def _triton(found: Sequence[tuple[ServedVersion, StatisticsSnapshot]]) -> Iterator[Any]:
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
    for one, counted in found:
        at = _labels(one)
        success.add_metric(at, counted.requests["success"].times)
        for reason in FAILURES:
            failure.add_metric([*at, reason], counted.failures[reason])
        rows.add_metric(at, counted.inferences)
        executions.add_metric(at, counted.executions)
        pending.add_metric(at, one.batcher.state().waiting)
        for name, metric in durations.items():
            metric.add_metric(at, counted.requests["success" if name == "request" else name].ns // 1000)
    yield from (success, failure, rows, executions, pending, *durations.values())
