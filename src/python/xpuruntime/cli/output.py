# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Output of commands: JSON or tables, diagnostics on stderr, and files, which replace none of another kind."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TextIO

import msgspec

from xpuruntime.errors import InputError, XpuRuntimeError
from xpuruntime.files.paths import json_bytes, kind_of, reason_of, refuse_overwriting, user_path
from xpuruntime.files.reading import open_regular
from xpuruntime.printable import UNBOUNDED, escape_console, printable
from xpuruntime.runtime.telemetry import named_logger

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from xpuruntime.cli.options import SessionOptions

_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]+")
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
        shown = _BEYOND_ASCII.sub(lambda match: json.dumps(match.group())[1:-1], shown)
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


def print_and_save(
    thing: Any,
    saves: Mapping[Callable[[str], Any], str | None] | None = None,
    *,
    html: str | None = None,
    shown: Any = None,
    as_json: bool,
) -> None:
    """Print a thing, and write it to the files that were named, each by the call that does so, and to the page `html`.

    What cannot be written has been printed by then, and does not keep the other files from being written. Under
    ``--json`` it is the other way round: on stdout is one value, and that of a failure is the error. `shown` is printed
    in place of the thing.
    """
    if not as_json:
        screen, shown = console(), thing if shown is None else shown
        if screen.width < UNBOUNDED:
            shown = _filled(shown.__rich__() if hasattr(shown, "__rich__") else shown, screen.width)
            screen.print(shown, crop=False)
        else:  # rich pads the cells of a grid
            with screen.capture() as held:
                screen.print(shown, crop=False)
            screen.file.write(re.sub(" +(?=\n)", "", held.get()))
        sys.stdout.flush()
    failed: list[Exception] = []
    for save, path in [*(saves or {}).items(), *([(thing.save_html, html)] if html else [])]:
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
        print_json(thing.to_dict())


def console(*, stderr: bool = False, markup: bool = False) -> Console:
    """Return a console on stdout, or on stderr. Markup is off unless asked for: what is printed is mostly data.

    What is no terminal, such as a pipe or the log of a job, has no width: a row of a table is a line of it. Colors that
    ``FORCE_COLOR`` asks for make no terminal of it.
    """
    from rich.console import Console

    terminal = Console(stderr=stderr, markup=markup, highlight=False, emoji=False, force_jupyter=False)
    if not terminal.file.isatty():
        terminal.width = UNBOUNDED
    return escape_console(terminal)


def on_screen() -> bool:
    """Whether results go to a terminal, which shows what fits a screen."""
    return console().file.isatty()


def error_line(text: str, *, label: str = "error") -> None:
    """Print ``label: text`` on stderr: on a terminal in lines that fit, in a pipe as it is."""
    text = printable(text)
    if sys.stderr.isatty():
        from rich.text import Text

        shown, told = console(stderr=True), Text(f"{label}: {text}")
        told.stylize(_LABELS[label], 0, len(label) + 2)
        with shown.capture() as held:
            shown.print(_filled(told, shown.width), soft_wrap=True)
        sys.stderr.write(held.get())  # in this way it clears what `working` shows; a console would write past that
    else:
        sys.stderr.write(f"{label}: {text}\n")


#: Words, and commands in backquotes, which are pasted.
_PIECES = re.compile(r"(?:`[^`\n]*`|[^\s`]|`)+")
_COMMAND = re.compile(r"Fix: (?:pip|python|xrt|make|apt-get|export|unset)\b")


def _filled(shown: Any, width: int) -> Any:
    """Return text, and the texts of a group, in lines of at most `width`, each fix on its own."""
    # What is pasted into a shell is not broken.
    from rich.console import Group
    from rich.text import Text

    if isinstance(shown, Group):
        return Group(*(_filled(part, width) for part in shown.renderables))
    if not isinstance(shown, Text):
        return shown
    lines = (
        Text(indent, shown.style).append_text(line[begin:end])
        for line in shown.split("\n", allow_blank=True)
        for indent, begin, end in _places(line.plain, width)
    )
    filled = Text("\n").join(lines)
    filled.no_wrap, filled.overflow = True, "ignore"
    return filled


def _places(line: str, width: int) -> Iterator[tuple[str, int, int]]:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    problem = line.partition(" Fix: ")[0]
    for first, start, text in (("", 0, problem), (indent, len(problem) + 1, line[len(problem) + 1 :])):
        begin = end = start
        for piece in () if _COMMAND.match(text) else _PIECES.finditer(text):
            if end > begin and len(first) + start + piece.end() - begin > width:
                yield first, begin, end
                first, begin = indent, start + piece.start()
            end = start + piece.end()
        if text or not start:
            yield first, begin, start + len(text)


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
    """Show on stderr what is under way, its step and its time; nothing under ``--json`` or where that is a pipe."""
    if as_json or not sys.stderr.isatty():
        yield
        return
    import logging

    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:  # lines printed meanwhile are above
        task = bar.add_task(text, total=None)

        class Steps(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                bar.update(task, description=f"{text}: {record.getMessage()}")

        logger, steps = named_logger("xpuruntime.steps"), Steps()
        level = logger.level
        logger.addHandler(steps)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(steps)
            logger.setLevel(level)


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
    expression = rb"(?:\xef\xbb\xbf)?\s*" + pattern.encode()
    return _Kind(words, lambda file: re.match(expression, file.read(_HEAD), re.IGNORECASE) is not None)


def _json(words: str, key: str, value: str) -> _Kind:
    pair = rb'"' + re.escape(key).encode() + rb'"\s*:\s*"' + re.escape(value).encode()

    def fits(file: BinaryIO) -> bool:
        data = file.read(_MOST)
        return data.lstrip()[:1] == b"{" and re.search(pair, data) is not None

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
    import zipfile

    try:
        with zipfile.ZipFile(file) as archive:
            return all(name.endswith(".npy") for name in archive.namelist())
    except zipfile.BadZipFile:
        return False


def _is_trace(file: BinaryIO) -> bool:
    head = file.read(_HEAD)
    if head.startswith(_GZIP):
        import gzip
        import io
        import zlib

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
    "units as csv": _begins("units of a report as CSV", r"id,op,"),
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
            named = option if option.endswith(path) else f"{option} {path}"
            raise InputError(
                f"{named} would replace a file that is not {kind.words}. Fix: name another file, or remove it"
            )


def check_outputs(
    outputs: Mapping[str, str | None],
    model: str,
    session_options: SessionOptions,
    values: Sequence[str] | None = None,
    read: Iterable[tuple[str, str]] = (),
) -> None:
    """Refuse outputs that would replace the model, its data, or another file that the command reads."""
    if any(path is not None for path in outputs.values()):
        there = any(path is not None and kind_of(path) == "file" for path in outputs.values())
        folder = [("the model", model)] if kind_of(model) == "folder" else []
        refuse_overwriting(outputs, [*read, *_inputs(model, session_options, values)] if there else folder)


def _inputs(model: str, session_options: SessionOptions, values: Sequence[str] | None) -> Iterator[tuple[str, str]]:
    yield "the model", model
    if kind_of(model) == "folder":
        from xpuruntime.artifacts.manifest import made_files

        for name in made_files(Path(model)) or ():
            yield "a file of the model", str(Path(model, name))
    if session_options.policy is not None and session_options.policy != "auto":
        yield "the policy", session_options.policy
    if session_options.calibration is not None:
        yield from _samples(session_options.calibration)
    for value in values or ():
        name, _, rest = value.partition("=")
        path = name[1:] if name.startswith("@") else rest[1:] if rest.startswith("@") else ""
        if path:
            yield "the input", path
    if kind_of(model) == "file":
        yield from _data(model)


def _samples(path: str) -> Iterator[tuple[str, str]]:
    files = [path] if kind_of(path) != "folder" else map(str, Path(path).glob("*.np[yz]"))
    yield from (("the calibration inputs", file) for file in files)


def _data(model: str) -> Iterator[tuple[str, str]]:
    from xpuruntime.engines.registry import read_model

    info = read_model(model)
    for file in info.external_files:
        yield "the data of the model", os.path.join(info.base_dir or ".", file.location)  # noqa: PTH118 - as text
