# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A verification for GitLab CI: the files that ``artifacts:reports`` of a job names."""

from __future__ import annotations

from pathlib import Path

__all__ = ["REPORTS", "report_files"]

#: Format to the name of its file: ``artifacts:reports:junit`` and ``artifacts:reports:metrics``.
REPORTS = {"junit": "xrt-junit.xml", "openmetrics": "metrics.txt"}


def report_files(folder: str = ".") -> dict[str, Path]:
    """Return where each format is written for GitLab, in the folder of the job."""
    return {format: Path(folder, name) for format, name in REPORTS.items()}
