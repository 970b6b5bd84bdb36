# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`FORMATS`: what a verification can be written as, one module a format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.errors import InputError
from xpuruntime.evidence.writing import write_whole
from xpuruntime.locks.outputs.in_toto import to_in_toto
from xpuruntime.locks.outputs.junit import to_junit
from xpuruntime.locks.outputs.markdown import to_markdown
from xpuruntime.locks.outputs.openmetrics import to_openmetrics
from xpuruntime.locks.outputs.page import render_page
from xpuruntime.locks.outputs.sarif import to_sarif

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from pathlib import Path

    from xpuruntime.locks.claims import VerificationResult

__all__ = ["FORMATS", "write_output"]


def _to_json(result: VerificationResult) -> str:
    return result.to_json() + "\n"


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


def write_output(result: VerificationResult, format: str, path: str | os.PathLike[str]) -> Path:
    """Write a verification to a file, which is replaced as a whole or not at all.

    Raises
    ------
    InputError
        There is no such format, or the file cannot be written.
    """
    if format not in FORMATS:
        raise InputError(f"{format!r} is not a format of verifications; formats: {', '.join(FORMATS)}")
    return write_whole(path, FORMATS[format](result), f"the verification as {format}")
