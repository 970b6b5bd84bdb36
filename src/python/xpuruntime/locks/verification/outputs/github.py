# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A verification for GitHub Actions: annotations in the log, and the summary of the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.errors import InputError
from xpuruntime.files.paths import reason_of, user_path
from xpuruntime.locks.verification.outputs.markdown import to_markdown
from xpuruntime.locks.verification.text import worst_first
from xpuruntime.printable import printable

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from xpuruntime.locks.verification.claims import Claim, VerificationResult

__all__ = ["append_summary", "escape_data", "escape_property", "workflow_commands"]

#: GitHub shows ten annotations of a kind in a step; the last says how many more there are.
_SHOWN = 9
#: Bytes that the summary of a step may have.
_SUMMARY = 1 << 20
_CUT = "\n\nThe rest was cut off, since a summary may have 1 MiB.\n"


def workflow_commands(result: VerificationResult) -> list[str]:
    """Return workflow commands, one a line: errors for what fails, warnings for what is inconclusive otherwise."""
    claims = worst_first(result.claims)
    kinds = {"error": [one for one in claims if result.effect(one) == "fail"]}
    kinds["warning"] = [one for one in claims if result.effect(one) in ("undecided", "warn")]
    return [line for kind, found in kinds.items() for line in _lines(kind, found, result)]


def _lines(kind: str, claims: list[Claim], result: VerificationResult) -> Iterable[str]:
    shown = claims if len(claims) <= _SHOWN + 1 else claims[:_SHOWN]
    for one in shown:
        facts = {"title": one.id}
        if result.policy and one.line:
            facts = {"file": result.policy, "line": str(one.line), "col": str(one.column or 1), **facts}
        fix = f"\nFix: {one.fix}" if one.fix else ""
        yield _command(kind, facts, f"{one.reason} (requested {one.requested}, observed {one.observed}){fix}")
    if len(shown) < len(claims):
        more = len(claims) - len(shown)
        yield _command(kind, {"title": "xrt verify"}, f"{more} more in the summary of the job")


def _command(kind: str, facts: dict[str, str], text: str) -> str:
    named = ",".join(f"{name}={escape_property(value)}" for name, value in facts.items())
    return f"::{kind} {named}::{escape_data(printable(text))}"


def escape_data(text: str) -> str:
    """Escape the message of a workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escape_property(text: str) -> str:
    """Escape a property of a workflow command, such as a file name."""
    return escape_data(text).replace(":", "%3A").replace(",", "%2C")


def append_summary(result: VerificationResult, path: str | os.PathLike[str]) -> None:
    """Append the Markdown of a verification to the file that ``GITHUB_STEP_SUMMARY`` names.

    The file is that of the step, which its other commands append to, so it is not replaced. What would make it larger
    than GitHub accepts is cut off.
    """
    target = user_path(path, "GITHUB_STEP_SUMMARY")
    text = to_markdown(result).encode("utf-8", "backslashreplace")
    try:
        room = _SUMMARY - (target.stat().st_size if target.is_file() else 0)
        if len(text) > room:
            kept = text[: max(room - len(_CUT), 0)].decode("utf-8", "ignore")
            text = (kept.rpartition("\n")[0] + _CUT).encode() if kept else b""
        with target.open("ab") as file:
            file.write(text)
    except OSError as error:
        fix = "unset GITHUB_STEP_SUMMARY, or leave --github out"
        raise InputError(f"cannot write the summary to '{target}': {reason_of(error)}. Fix: {fix}") from error
