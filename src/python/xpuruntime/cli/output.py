# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Output of commands: JSON or tables on stdout, diagnostics and progress on stderr."""

from __future__ import annotations

import json
import re
import sys
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from xpuruntime.errors import XpuRuntimeError
from xpuruntime.files.paths import json_bytes
from xpuruntime.printable import escape_console, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.console import Console
    from rich.progress import Progress

__all__ = [
    "console",
    "error_line",
    "print_and_save",
    "print_json",
    "print_plain",
    "print_thing",
    "progress",
    "results",
    "results_apart",
    "working",
]

_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]+")
#: Columns that no table of a command reaches.
_UNBOUNDED = 100_000
_LABELS = {"error": "bold red", "warning": "yellow", "help": "dim", "note": "dim"}


_apart: TextIO | None = None


def results() -> TextIO:
    """Return the stream of a command's results."""
    return sys.stdout if _apart is None else _apart


@contextmanager
def results_apart() -> Iterator[None]:
    """Keep stdout for `print_json` alone: what plugins and engines print meanwhile goes to stderr."""
    global _apart
    before, _apart = _apart, results()
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _apart = before


def print_json(value: Any) -> None:
    """Print a value as indented JSON on stdout: UTF-8, or ASCII with escapes where stdout has another encoding.

    `value` may be JSON text already.
    """
    text = printable(value) if isinstance(value, str) else json_bytes(value, enc_hook=str).decode()
    shown = printable(msgspec.json.format(text, indent=2)) + "\n"
    stream = results()
    if not _is_utf8(stream):
        shown = _BEYOND_ASCII.sub(lambda found: json.dumps(found.group())[1:-1], shown)
        binary = getattr(stream, "buffer", None)
        if binary is not None:
            stream.flush()
            binary.write(shown.encode("ascii"))
            return
    stream.write(shown)


def _is_utf8(stream: TextIO) -> bool:
    return (getattr(stream, "encoding", None) or "utf-8").lower().replace("_", "-") in ("utf-8", "utf8")


def print_plain(text: str) -> None:
    """Print text on stdout."""
    sys.stdout.write(printable(text if text.endswith("\n") else text + "\n"))


def print_thing(thing: Any, *, as_json: bool) -> None:
    """Print what has `to_dict` and can be shown by rich: the one or the other."""
    if as_json:
        print_json(thing.to_dict())
    else:
        console().print(thing)


def print_and_save(
    thing: Any, saves: Mapping[Callable[[str], Any], str | None], *, shown: Any = None, as_json: bool
) -> None:
    """Print a thing, and write it to the files that were named, each by the call that does so.

    What cannot be written has been printed by then, and does not keep the other files from being written. Under
    ``--json`` it is the other way round: on stdout is one value, and that of a failure is the error. `shown` is printed
    in place of the thing.
    """
    if not as_json:
        console().print(thing if shown is None else shown)
        sys.stdout.flush()
    failed: list[Exception] = []
    for save, path in saves.items():
        if path is not None:
            try:
                save(path)
            except (XpuRuntimeError, OSError) as error:
                failed.append(error)
    for other in failed[1:]:
        error_line(str(other))
    if failed:
        raise failed[0]
    if as_json:
        print_thing(thing, as_json=True)


def console(*, stderr: bool = False, markup: bool = False) -> Console:
    """Return a console on stdout, or on stderr. Markup is off unless asked for: what is printed is mostly data.

    What is no terminal, such as a pipe or the log of a job, has no width: a row of a table is a line of it.
    """
    from rich.console import Console

    made = Console(stderr=stderr, markup=markup, highlight=False, emoji=False, force_jupyter=False)
    if not made.is_terminal:
        made.width = _UNBOUNDED
    return escape_console(made)


def error_line(text: str, *, label: str = "error") -> None:
    """Print ``label: text`` on stderr."""
    text = printable(text)
    if sys.stderr.isatty():
        from rich.text import Text

        console(stderr=True).print(Text.assemble((f"{label}: ", _LABELS[label]), text), soft_wrap=True)
    else:
        sys.stderr.write(f"{label}: {text}\n")


def progress(*, as_json: bool) -> Progress:
    """Return a progress bar on stderr, which shows nothing under ``--json`` or when stderr is no terminal.

    It refreshes only on request, so that it does not disturb what is being timed.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console(stderr=True),
        auto_refresh=False,
        transient=True,
        disable=as_json or not sys.stderr.isatty(),
    )


@contextmanager
def working(text: str, *, as_json: bool) -> Iterator[None]:
    """Show on stderr that something slow is under way; nothing under ``--json`` or when stderr is no terminal."""
    if as_json or not sys.stderr.isatty():
        yield
        return
    with console(stderr=True).status(text):  # lines printed meanwhile appear above it
        yield
