# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Text of exceptions in one line: an exception may have none, such as that of a bare ``assert``, or many lines."""

from __future__ import annotations

__all__ = ["error_line", "first_line"]


def first_line(text: str) -> str:
    """Return the first line of a text that is not blank; empty where there is none."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def error_line(error: BaseException, *, named: bool = False) -> str:
    """Return the first line of an exception's text, or the name of its type where it has none."""
    name, line = type(error).__name__, first_line(str(error))
    if not line:
        return name
    return f"{name}: {line}" if named else line
