# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Evidence: record types, the comparison of what was asked with what ran, and the report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.lazy_names import load_name as _load_name

if TYPE_CHECKING:
    from xpuruntime.evidence.kernels.decisions import KernelCandidate, KernelDecision
    from xpuruntime.evidence.records import (
        Boundary,
        Control,
        Conversion,
        Enforceability,
        Latency,
        Observation,
        SourceNode,
        Status,
        Time,
        Unit,
        Verdict,
    )
    from xpuruntime.evidence.report import Report
    from xpuruntime.evidence.report_builder.build import build_report
    from xpuruntime.evidence.report_builder.observations import observations
    from xpuruntime.evidence.report_comparison import ReportComparison
    from xpuruntime.evidence.report_diff.comparing import compare_reports
    from xpuruntime.evidence.sections.graph_status import GraphBlocker, GraphStatus
    from xpuruntime.evidence.sections.memory_over_time import LiveBytes, MemorySample
    from xpuruntime.evidence.sections.shape_coverage import InputCoverage, ShapeCoverage

__all__ = [
    "Boundary",
    "Control",
    "Conversion",
    "Enforceability",
    "GraphBlocker",
    "GraphStatus",
    "InputCoverage",
    "KernelCandidate",
    "KernelDecision",
    "Latency",
    "LiveBytes",
    "MemorySample",
    "Observation",
    "Report",
    "ReportComparison",
    "ShapeCoverage",
    "SourceNode",
    "Status",
    "Time",
    "Unit",
    "Verdict",
    "build_report",
    "compare_reports",
    "observations",
]

#: Public name to the module that has it; loaded on first use.
_LAZY = {
    "Boundary": "records",
    "Control": "records",
    "Conversion": "records",
    "Enforceability": "records",
    "GraphBlocker": "sections.graph_status",
    "GraphStatus": "sections.graph_status",
    "InputCoverage": "sections.shape_coverage",
    "KernelCandidate": "kernels.decisions",
    "KernelDecision": "kernels.decisions",
    "Latency": "records",
    "LiveBytes": "sections.memory_over_time",
    "MemorySample": "sections.memory_over_time",
    "Observation": "records",
    "Report": "report",
    "ReportComparison": "report_comparison",
    "ShapeCoverage": "sections.shape_coverage",
    "SourceNode": "records",
    "Status": "records",
    "Time": "records",
    "Unit": "records",
    "Verdict": "records",
    "build_report": "report_builder.build",
    "compare_reports": "report_diff.comparing",
    "observations": "report_builder.observations",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        return _load_name(__name__, name, _LAZY)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
