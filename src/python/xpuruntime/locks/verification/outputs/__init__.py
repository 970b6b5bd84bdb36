# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Output formats of a verification, one module each: `FORMATS`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.errors import InputError
from xpuruntime.evidence.writing import write_whole
from xpuruntime.locks.verification.outputs.in_toto import to_in_toto
from xpuruntime.locks.verification.outputs.junit import to_junit
from xpuruntime.locks.verification.outputs.markdown import to_markdown
from xpuruntime.locks.verification.outputs.openmetrics import to_openmetrics
from xpuruntime.locks.verification.outputs.page import render_page
from xpuruntime.locks.verification.outputs.sarif import to_sarif
from xpuruntime.printable import printable

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from pathlib import Path

    from xpuruntime.locks.verification.claims import VerificationResult

__all__ = ["FORMATS", "GITLAB_REPORTS", "write_output"]


def _to_json(result: VerificationResult) -> str:
    return printable(result.to_json()) + "\n"


#: Name of a format to what writes a verification as text.
FORMATS: dict[str, Callable[[VerificationResult], str]] = {
    "json": _to_json,
    "md": to_markdown,
    "junit": to_junit,
    "sarif": to_sarif,
    "openmetrics": to_openmetrics,
    "html": render_page,
    "intoto": to_in_toto,
}

#: Format to the file that GitLab reads it from: ``artifacts:reports:junit`` and ``artifacts:reports:metrics`` of a job.
GITLAB_REPORTS = {"junit": "xrt-junit.xml", "openmetrics": "metrics.txt"}


def write_output(result: VerificationResult, format: str, path: str | os.PathLike[str]) -> Path:
    """Write a verification to a file, which is replaced as a whole or not at all."""
    if format not in FORMATS:
        raise InputError(f"{format!r} is not a format of verifications; formats: {', '.join(FORMATS)}")
    return write_whole(path, FORMATS[format](result), f"the verification as {format}")
