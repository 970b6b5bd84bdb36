# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`status_page`: the state of a server on one HTML page: latency, queues, batches, memory, evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.evidence.page import render_serving
from xpuruntime.policies.quantities import duration_text

if TYPE_CHECKING:
    from xpuruntime.serving.models.service import Models
    from xpuruntime.serving.models.slot import ModelSlot
    from xpuruntime.serving.models.version import ServedVersion

__all__ = ["status_data", "status_page"]


def status_page(models: Models) -> str:
    """Return the page, which loads itself anew every few seconds and nothing else."""
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
        return [_row(one) for one in loaded]
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
        "engine": f"{plan.engine}@{plan.device} ({plan.precision})",
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


def _canary(found: dict[str, Any]) -> str:
    said = (
        f"{found['runs']} runs, {found['out_of_tolerance']} out of tolerance, largest drift {found['worst_drift']:.3g}"
    )
    return said + _left_out(found)


def _shadow(found: dict[str, Any]) -> str:
    time = found["time"]
    verdict = f"{time['verdict']} ({time['ratio']:.3f} x)" if time is not None else f"{found['rounds']} rounds so far"
    said = f"{found['engine']}: {verdict}, {found['out_of_tolerance']} of {found['runs']} out of tolerance"
    return said + _left_out(found)


def _left_out(found: dict[str, Any]) -> str:
    return "".join(f", {found[what]} {what}" for what in ("dropped", "errors") if found[what])
