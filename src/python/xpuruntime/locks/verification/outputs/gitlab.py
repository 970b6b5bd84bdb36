# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Verification for GitLab CI: the files that ``artifacts:reports`` of a job names."""

from __future__ import annotations

__all__ = ["REPORTS"]

#: Format to the file that it is written to: ``artifacts:reports:junit`` and ``artifacts:reports:metrics``.
REPORTS = {"junit": "xrt-junit.xml", "openmetrics": "metrics.txt"}
