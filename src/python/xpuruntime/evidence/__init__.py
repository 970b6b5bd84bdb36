# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""How it is told: record types, the comparison of what was asked with what ran, and the report."""

from __future__ import annotations

from xpuruntime.evidence.build import build_report
from xpuruntime.evidence.compare import observations
from xpuruntime.evidence.comparing_reports import compare_reports
from xpuruntime.evidence.kernel_decisions import KernelCandidate, KernelDecision
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
from xpuruntime.evidence.report_comparison import ReportComparison

__all__ = [
    "Boundary",
    "Control",
    "Conversion",
    "Enforceability",
    "KernelCandidate",
    "KernelDecision",
    "Latency",
    "Observation",
    "Report",
    "ReportComparison",
    "SourceNode",
    "Status",
    "Time",
    "Unit",
    "Verdict",
    "build_report",
    "compare_reports",
    "observations",
]
