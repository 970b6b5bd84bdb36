# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Sides of a difference: a saved report, a lock, this interpreter, or another one."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.errors import (
    EngineError,
    EngineFailed,
    EngineUnavailable,
    InputError,
    LockError,
    ModelError,
    PlanError,
    PolicyError,
    UnsupportedOperationError,
    XpuRuntimeError,
)
from xpuruntime.evidence import Report
from xpuruntime.files.paths import kind_of
from xpuruntime.files.reading import open_regular
from xpuruntime.lockfile.canonical import load_lock
from xpuruntime.locks.fresh_environments import link_this_package
from xpuruntime.locks.session_worker import MODULE, session_worker
from xpuruntime.runtime.worker import FailureKind, WorkerFailure

if TYPE_CHECKING:
    from xpuruntime.lockfile.records import Lock
    from xpuruntime.runtime.worker import Worker

__all__ = ["FileSide", "LockSide", "PythonSide", "call", "read_side", "start_worker"]

_PREFIX = "py:"
#: Of the errors of a worker, those that are raised here as what they are; the first that fits.
_KINDS: tuple[type[XpuRuntimeError], ...] = (
    PolicyError,
    ModelError,
    InputError,
    EngineUnavailable,
    EngineFailed,
    UnsupportedOperationError,
    PlanError,
    LockError,
)
#: What the first kilobytes of a lock have: its keys are sorted, and the schema is the last one.
_HEAD, _LOCK = 4096, re.compile(rb'^\s*\{\s*"digest": "sha256:')


class FileSide(NamedTuple):
    """A saved report, by the path that was given."""

    name: str

    def report(self) -> Report:
        """Read it. Raises `InputError` where it is none."""
        return Report.load(self.name)


class LockSide(NamedTuple):
    """A lock, by the path that was given."""

    name: str

    def lock(self) -> Lock:
        """Read it. Raises `LockError` where it is cut off, was edited, or is of a later release."""
        return load_lock(self.name)


class PythonSide(NamedTuple):
    """An interpreter, by what was given, ``"here"`` or ``"py:PATH"``."""

    name: str
    python: str


def read_side(text: str) -> FileSide | LockSide | PythonSide:
    """Read an argument as a side."""
    if text == "here":
        return PythonSide(text, sys.executable)
    if text.startswith(_PREFIX):
        return PythonSide(text, str(Path(text[len(_PREFIX) :]).expanduser()))
    if kind_of(text) != "file":
        msg = (
            f"{text!r} is neither a file nor an interpreter: give a report that `xrt explain --json` printed, a lock, "
            "`here`, or `py:` and the path of a Python interpreter"
        )
        raise InputError(msg)
    with open_regular(text) as file:
        is_lock = _LOCK.search(file.read(_HEAD)) is not None
    return LockSide(text) if is_lock else FileSide(text)


def start_worker(side: PythonSide, folder: Path) -> Worker:
    """Start the interpreter of a side, with its own xpuruntime where it has one, else with this one."""
    worker = session_worker(side.python)
    failure = worker.attempt(f"{MODULE}:load_core", called="load_core").failure
    if failure is None:
        return worker
    worker.close()
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    there = ".".join(worker.facts["python"].split(".")[:2])
    if here != there:
        msg = (
            f"{side.name} runs Python {there} and has no xpuruntime of its own that can be used "
            f"({failure.reason}); the one of this process is built for Python {here}: install xpuruntime there"
        )
        raise EngineError(msg)
    root = folder / f"package-{len([*folder.iterdir()])}"
    link_this_package(root / "xpuruntime")
    worker = session_worker(side.python, root)
    failure = worker.attempt(f"{MODULE}:load_core", called="load_core").failure
    if failure is not None:
        worker.close()
        msg = f"xpuruntime cannot be used in {side.name}: {_reason(failure)}. Install what is missing there"
        raise EngineError(msg)
    return worker


def call(worker: Worker, name: str, function: str, **arguments: Any) -> Any:
    """Call a function of `xrt_session_worker`; an error names the side, unless that is empty.

    Raises
    ------
    XpuRuntimeError
        Of the same kind as the worker's where that is bad input, a refusal or a failed engine, else an `EngineError`.
    """
    try:
        return worker.call(f"{MODULE}:{function}", called=function, **arguments)
    except WorkerFailure as failure:
        kind = next((one for one in _KINDS if one.__name__ in failure.exceptions), EngineError)
        fix = "install it there" if "ModuleNotFoundError" in failure.exceptions else None
        reason = f"{name}: {_reason(failure)}" if name else _reason(failure)
        raise kind(reason, fix=fix) from failure


def _reason(failure: WorkerFailure) -> str:
    """Return the reason, and the output where it may say more than the exception."""
    if failure.kind is FailureKind.EXCEPTION:
        return failure.reason
    return str(failure)
