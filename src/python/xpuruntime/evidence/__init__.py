# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Evidence: record types, the comparison of what was asked with what ran, and the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.lazy_names import lazy as _lazy

if TYPE_CHECKING:
    from xpuruntime.evidence.cuda_graphs import GraphBlocker, GraphStatus
    from xpuruntime.evidence.difference import Difference
    from xpuruntime.evidence.kernel_records import KernelCandidate, KernelDecision
    from xpuruntime.evidence.key_observations import observations
    from xpuruntime.evidence.memory_over_time import LiveBytes, MemorySample
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
    from xpuruntime.evidence.report_building import build_report
    from xpuruntime.evidence.report_comparing import compare_reports
    from xpuruntime.evidence.report_comparison import ReportComparison
    from xpuruntime.evidence.shape_coverage import InputCoverage, ShapeCoverage

__all__ = [
    "Boundary",
    "Control",
    "Conversion",
    "Difference",
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
    "Difference": "difference",
    "Enforceability": "records",
    "GraphBlocker": "cuda_graphs",
    "GraphStatus": "cuda_graphs",
    "InputCoverage": "shape_coverage",
    "KernelCandidate": "kernel_records",
    "KernelDecision": "kernel_records",
    "Latency": "records",
    "LiveBytes": "memory_over_time",
    "MemorySample": "memory_over_time",
    "Observation": "records",
    "Report": "report",
    "ReportComparison": "report_comparison",
    "ShapeCoverage": "shape_coverage",
    "SourceNode": "records",
    "Status": "records",
    "Time": "records",
    "Unit": "records",
    "Verdict": "records",
    "build_report": "report_building",
    "compare_reports": "report_comparing",
    "observations": "key_observations",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazy(__name__, _LAZY)
