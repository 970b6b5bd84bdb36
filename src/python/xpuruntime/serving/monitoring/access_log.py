# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`AccessLog`: one line of JSON for each request."""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import warnings
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from xpuruntime.errors import InputError, XpuRuntimeWarning
from xpuruntime.files.paths import reason_of
from xpuruntime.printable import printable

if TYPE_CHECKING:
    from xpuruntime.serving.batching.jobs import Job
    from xpuruntime.serving.messages import InferRequest
    from xpuruntime.serving.status import ServingError

__all__ = ["AccessLog", "RequestLog", "both_logs"]


class RequestLog(Protocol):
    """Callback of a request: with its error, if any, its seconds, and what was measured where it was accepted."""

    def __call__(
        self, request: InferRequest, error: ServingError | None, seconds: float, job: Job | None = None
    ) -> None:
        """Take one request. Called in many threads."""


def both_logs(one: RequestLog, other: RequestLog) -> RequestLog:
    """Return a log that gives each request to two."""

    def log(request: InferRequest, error: ServingError | None, seconds: float, job: Job | None = None) -> None:
        one(request, error, seconds, job)
        other(request, error, seconds, job)

    return log


class AccessLog:
    """Appends to a file; safe to call from many threads, and several processes may have the same file.

    Nothing of a tensor is written, and of a request its id alone. Where the file cannot be written, such as on a full
    disk, lines are counted in `lost`, and the first is warned of: requests are served on.

    Parameters
    ----------
    path : str
        ``"-"`` for the standard output. A file that is there is appended to.

    Raises
    ------
    InputError
        The file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        #: Lines that could not be written.
        self.lost = 0
        try:
            self._file = 1 if path == "-" else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
        except OSError as error:
            raise InputError(
                f"access_log: {path} cannot be written: {reason_of(error)}. Fix: name another file"
            ) from None

    def __call__(
        self, request: InferRequest, error: ServingError | None, seconds: float, job: Job | None = None
    ) -> None:
        """Write one line."""
        line: dict[str, Any] = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "model": request.model[:128],
            "version": request.version[:32],
            "id": request.id[:128],
            "status": "OK" if error is None else error.code.name,
            "ms": round(seconds * 1e3, 3),
        }
        if job is not None:
            line["rows"] = job.feed.rows
            if job.began is not None:
                line["queue_ms"] = round((job.began - job.entry.arrived) * 1e3, 3)
            if job.executions:
                line["compute_ms"] = round(sum(one.compute_ns for one in job.executions) / 1e6, 3)
                line["batch"] = max(one.batch.rows for one in job.executions)
        if error is not None:
            line["error"] = str(error)
        data = msgspec.json.encode({key: printable(v) if isinstance(v, str) else v for key, v in line.items()}) + b"\n"
        with self._lock:
            try:
                if self._file >= 0:
                    os.write(self._file, data)
                return
            except OSError as failure:
                self.lost += 1
                if self.lost > 1:
                    return
                text = f"access_log: {self._path} cannot be written: {reason_of(failure)}; requests are served on"
        with contextlib.suppress(XpuRuntimeWarning):  # where warnings are errors, the request still gets its answer
            warnings.warn(text, XpuRuntimeWarning, stacklevel=2)

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            file, self._file = self._file, -1
        if file > 1:
            os.close(file)
