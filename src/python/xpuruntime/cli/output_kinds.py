# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kinds of output files: what an option writes replaces a file of the same kind, and no other that is there."""

from __future__ import annotations

import gzip
import io
import re
import zipfile
import zlib
from typing import TYPE_CHECKING, NamedTuple

from xpuruntime.errors import InputError
from xpuruntime.files.paths import kind_of, reason_of, user_path
from xpuruntime.files.reading import open_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import BinaryIO

__all__ = ["refuse_other_kinds"]

#: Bytes from the begin of a file that tell its kind.
_HEAD = 1 << 16
#: Bytes of a JSON file that are looked through: a tool may have sorted its keys.
_MOST = 1 << 26
_ARRAYS = b"\x93NUMPY"
_GZIP = b"\x1f\x8b"


class _Kind(NamedTuple):
    words: str
    fits: Callable[[BinaryIO], bool]


def _begins(words: str, pattern: str) -> _Kind:
    expression = re.compile(rb"(?:\xef\xbb\xbf)?\s*" + pattern.encode(), re.IGNORECASE)
    return _Kind(words, lambda file: expression.match(file.read(_HEAD)) is not None)


def _json(words: str, key: str, value: str) -> _Kind:
    """Return the kind of a JSON object with a key whose text begins so, wherever it stands."""
    pair = re.compile(rb'"' + re.escape(key).encode() + rb'"\s*:\s*"' + re.escape(value).encode())

    def fits(file: BinaryIO) -> bool:
        data = file.read(_MOST)
        return data.lstrip()[:1] == b"{" and pair.search(data) is not None

    return _Kind(words, fits)


def _is_policy(file: BinaryIO) -> bool:
    from xpuruntime.errors import PolicyError
    from xpuruntime.policies import Policy, files

    try:
        text = file.read(_HEAD + 1).decode()
        Policy.from_document(files.loads(text, "json" if text.lstrip()[:1] == "{" else "yaml", "the file"))
    except (PolicyError, UnicodeDecodeError):
        return False
    return True


def _has_arrays(file: BinaryIO) -> bool:
    if file.read(len(_ARRAYS)) == _ARRAYS:
        return True
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            return all(name.endswith(".npy") for name in archive.namelist())
    except zipfile.BadZipFile:
        return False


def _is_trace(file: BinaryIO) -> bool:
    head = file.read(_HEAD)
    if head.startswith(_GZIP):
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(head)) as inside:
                head = inside.read(4096)
        except (OSError, EOFError, zlib.error):
            return False
    return head.lstrip()[:1] == b"{" and b'"traceEvents"' in head


def _is_lock(file: BinaryIO) -> bool:
    from xpuruntime.errors import LockError
    from xpuruntime.lockfile.canonical import MAX_LOCK, parse_lock

    try:
        parse_lock(file.read(MAX_LOCK + 1), "the file")
    except LockError:
        return False
    return True


_KINDS = {
    "arrays": _Kind("a file of NumPy arrays", _has_arrays),
    "bisection": _json("a result of `xrt bisect`", "schema", "xpuruntime.bisect/"),
    "diff": _json("a result of `xrt diff`", "schema", "xpuruntime.diff/"),
    "lock": _Kind("a lock", _is_lock),
    "page": _begins("an HTML page", r"(?:<!doctype html|<html)"),
    "policy": _Kind("a policy", _is_policy),
    "report": _json("a report", "schema", "xpuruntime.report"),
    "statement": _json("an in-toto statement", "_type", "https://in-toto.io/Statement/"),
    "trace": _Kind("a trace", _is_trace),
    "verification as json": _json("a verification", "schema", "xpuruntime.verification/"),
    "verification as junit": _begins("a JUnit file", r"(?:<\?xml[^>]*>\s*)?<testsuites?\b"),
    "verification as md": _begins(
        "a verification as Markdown", r"## [^\n]*\n\n[^\n]*\n\n(?:\| claim \| requested \||###|\Z)"
    ),
    "verification as openmetrics": _begins("a file of metrics", r"# (?:TYPE|HELP|UNIT|EOF)\b"),
    "verification as sarif": _json("a SARIF file", "$schema", "https://json.schemastore.org/sarif"),
}
_KINDS["verification as html"], _KINDS["verification as intoto"] = _KINDS["page"], _KINDS["statement"]


def refuse_other_kinds(outputs: Mapping[str, tuple[str | None, str]]) -> None:
    """Refuse outputs that would replace a file of another kind."""
    for option, (path, word) in outputs.items():
        if path is None or kind_of(target := user_path(path, option)) != "file":
            continue
        kind = _KINDS[word]
        try:
            with open_regular(target) as file:
                other = bool(file.read(1)) and not (file.seek(0) or kind.fits(file))
        except OSError as error:
            raise InputError(
                f"{option} {path}: the file that is there cannot be read: {reason_of(error)}. Fix: name another file"
            ) from error
        if other:
            named = option if option.endswith(f"={path}") else f"{option} {path}"
            raise InputError(
                f"{named} would replace a file that is not {kind.words}. Fix: name another file, or remove it"
            )
