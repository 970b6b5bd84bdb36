# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Evidence: record types, the comparison of what was asked with what ran, and the report."""

from __future__ import annotations

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
