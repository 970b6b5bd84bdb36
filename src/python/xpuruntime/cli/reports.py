# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Saved reports as arguments of ``xrt explain``: one is shown again, two are compared."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.errors import InputError
from xpuruntime.evidence.report import MAX_REPORT
from xpuruntime.files.paths import kind_of, reason_of, refuse_overwriting, user_path
from xpuruntime.files.reading import decode_json, open_regular
from xpuruntime.files.writing import check_writable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["check_target", "given_reports", "show_reports"]

#: How a JSON xpuruntime object begins, the first kilobytes of which tell what it is.
_HEADER = re.compile(rb'^\s*\{\s*"schema"\s*:\s*"(xpuruntime\.[\w.]+/\d+)"')
_HEAD = 4096
_BLANK = b" \t\r\n"
_REPORT = "xpuruntime.report/"


def check_target(option: str, path: str | None) -> None:
    """Refuse a file that could not be written, before anything runs."""
    if path is None:
        return
    target = user_path(path, option)
    if kind_of(target) == "folder":
        raise InputError(f"{option} {path}: this is a folder. Fix: name a file in it")
    if kind_of(target.parent) != "folder":
        raise InputError(f"{option} {path}: the folder '{target.parent}' is not there. Fix: make it, or name another")
    try:
        check_writable(target)
    except OSError as error:
        raise InputError(
            f"{option} {path}: nothing can be written there: {reason_of(error)}. Give a path in a folder that "
            "is writable and has free space"
        ) from error


def given_reports(paths: Sequence[str]) -> bool:
    """Whether the arguments of ``xrt explain`` are saved reports, by the schema in the files, never by their names."""
    schemas = [_schema(path) for path in paths]
    for path, schema in zip(paths, schemas, strict=True):
        if schema is not None and not schema.startswith(_REPORT):
            raise InputError(
                f"'{path}' holds '{schema}', which is no report; give what `xrt explain MODEL --json` printed or "
                "`Report.save` wrote"
            )
    if len(paths) == 1:
        return schemas[0] is not None
    if len(paths) > 2:
        raise InputError(
            f"explain takes one model, one report or two reports, got {len(paths)} arguments: leave some out"
        )
    for path, schema in zip(paths, schemas, strict=True):
        if schema is None:
            what = "is no xpuruntime report" if kind_of(path) == "file" else "is no file"
            raise InputError(
                f"two arguments of explain are two saved reports, and '{path}' {what}: it is no JSON object "
                f'with "schema": "{_REPORT}...". Give what `xrt explain MODEL --json` printed, or one model alone'
            )
    return True


def show_reports(
    paths: Sequence[str],
    options: Mapping[str, Any],
    *,
    html: str | None,
    noise: float | None,
    noise_us: float | None,
    summary: bool,
    as_json: bool,
) -> int:
    """Show one saved report again, or compare two, and return the exit code."""
    from xpuruntime.cli.exit_codes import ExitCode
    from xpuruntime.cli.output import print_and_save
    from xpuruntime.cli.output_kinds import refuse_other_kinds
    from xpuruntime.evidence import Report, compare_reports
    from xpuruntime.evidence.render_text.terminal import render

    given = [name for name, value in options.items() if value]
    if given:
        raise InputError(
            f"{', '.join(given)} say how a model is run, and '{paths[0]}' is a saved report: leave them out"
        )
    refuse_overwriting({"--html": html}, [("the report", path) for path in paths])
    refuse_other_kinds({"--html": (html, "page")})
    if len(paths) == 1:
        if noise is not None or noise_us is not None:
            raise InputError("--noise and --noise-us are for two reports, and one was given: leave them out")
        report = Report.load(paths[0])
        shown = render(report, summary=True) if summary else None
        print_and_save(report, {report.save_html: html}, shown=shown, as_json=as_json)
        return ExitCode.OK if report.honoured else ExitCode.NOT_HONOURED
    if summary:
        raise InputError("--summary is for one report, and two were given: leave it out")
    limits = {name: value for name, value in (("noise", noise), ("noise_us", noise_us)) if value is not None}
    found = compare_reports(paths[0], paths[1], **limits)
    print_and_save(found, {found.save_html: html}, as_json=as_json)
    return ExitCode.OK if found.same else ExitCode.NOT_HONOURED


def _schema(path: str) -> str | None:
    """Return the schema in the header of a JSON xpuruntime file, or ``None``: a model, a folder, anything else."""
    try:
        with open_regular(path) as file:
            head = file.read(_HEAD)
            found = _HEADER.match(head)
            if found is not None:
                return found[1].decode()
            if not head.lstrip(_BLANK).startswith(b"{"):
                return None
            rest = os.fstat(file.fileno()).st_size - len(head)
            if rest > MAX_REPORT:
                return None
            schema = decode_json(head + file.read(max(rest, 0)), _Header).schema
    except (OSError, msgspec.MsgspecError):
        return None
    return schema if schema.startswith("xpuruntime.") else None


class _Header(msgspec.Struct):
    """The mark of xpuruntime's files in other JSON, also where a tool has sorted the keys."""

    schema: str
