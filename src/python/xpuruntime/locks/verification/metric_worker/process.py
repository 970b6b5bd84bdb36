# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`MetricProcess`: the worker process of a metric; the session that its function runs stays in this process."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xpuruntime
from xpuruntime.errors import InputError
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.locks.verification.claim_codes import ClaimCode
from xpuruntime.locks.verification.metric_worker.passed_values import read_value, write_value
from xpuruntime.locks.verification.metric_worker.worker_side import is_full_disk, said
from xpuruntime.runtime.cpu_and_memory import available_memory
from xpuruntime.runtime.worker import FailureKind, Worker, WorkerFailure

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

__all__ = ["MetricFailed", "MetricProcess"]

_SIDE = "xpuruntime.locks.verification.metric_worker.worker_side"
_IMPORT = "the import"
#: Seconds within which the process has imported xpuruntime.
_START = 120.0
#: The share of the available memory that it may hold where nothing is stated.
_SHARE = 0.9
_CODES = {FailureKind.TIMEOUT: ClaimCode.METRIC_TIMEOUT, FailureKind.OUT_OF_MEMORY: ClaimCode.METRIC_MEMORY}
_PACKAGES = Path(xpuruntime.__file__).parents[1]


class MetricFailed(Exception):  # noqa: N818  the outcome of a function, which becomes a claim
    """A metric gave no number."""

    def __init__(self, observed: str, reason: str, code: ClaimCode = ClaimCode.METRIC_FAILED) -> None:
        super().__init__(reason)
        self.observed, self.code = observed, code

    @classmethod
    def no_number(cls, name: str, kind: str) -> Self:
        """Return that a value of another type was returned."""
        return cls(kind, f"{name} returned a value of type {kind}, which is no number")


class MetricProcess:
    """A worker process that imports a file, and calls one of its functions."""

    def __init__(self, file: str, name: str, timeout: float, memory_limit: int | None = None) -> None:
        self._name, self._timeout, self._closed = name, timeout, False
        self._worker = Worker(
            pythonpath=[_PACKAGES], timeout=timeout, memory_limit=memory_limit or available_memory(_SHARE)
        )
        try:
            # Imports what is not the user's.
            self._worker.call(f"{_SIDE}:number_of", timeout=_START, called=_IMPORT, value=0)
            found = self._worker.call(f"{_SIDE}:load", called=_IMPORT, file=file, name=name, path=sys.path)
        except WorkerFailure as failure:
            self.close()
            why = _how_ended(failure, _IMPORT, timeout)[1]
            raise InputError(f"--metric {file}:{name}: {file} cannot be imported: {why}") from failure
        except BaseException:
            self.close()
            raise
        if found:
            self.close()
        if "raised" in found:
            raise InputError(f"--metric {file}:{name}: {file} cannot be imported: {found['raised']}")
        if "lacks" in found:
            raise InputError(f"--metric {file}:{name}: {file} has no function {name!r}. Fix: name one of its functions")

    def compute(self, run: Callable[..., dict[str, Any]]) -> float:
        """Call the function, end the process, and return the number."""
        try:
            scratch = ScratchFolder("metric")
        except OSError as error:
            self.close()
            if not is_full_disk(error):
                raise
            raise _disk_full(self._name, said(error)) from error
        with scratch as folder:

            def serve(inputs: dict[str, Any]) -> dict[str, Any]:
                try:
                    return write_value(run(read_value(inputs)), Path(folder))
                except Exception as error:  # is raised in the function
                    number = error.errno if isinstance(error, OSError) and is_full_disk(error) else None
                    return {"raised": [type(error).__name__, str(error), number]}

            try:
                found = self._worker.call(f"{_SIDE}:compute", serve=serve, called=self._name, folder=folder)
            except WorkerFailure as failure:
                code = _CODES.get(failure.kind, ClaimCode.METRIC_CRASHED)
                raise MetricFailed(*_how_ended(failure, self._name, self._timeout), code) from failure
            finally:
                self.close()
        if "full" in found:
            raise _disk_full(self._name, found["full"])
        if "raised" in found:
            raise MetricFailed("raised", f"{self._name} raised {found['raised']}")
        if found["number"] is None:
            raise MetricFailed.no_number(self._name, found["type"])
        return float(found["number"])

    def close(self) -> None:
        """End the process, and show what it printed, the last 64 KiB of it, on stderr: stdout has the result."""
        self._worker.close()
        if not self._closed:
            self._closed = True
            sys.stderr.write(self._worker.output)
            sys.stderr.flush()


def _disk_full(name: str, error: str) -> MetricFailed:
    reason = f"a disk was full while {name} ran; temporary files are in {tempfile.gettempdir()} ({error})"
    return MetricFailed("disk full", reason, ClaimCode.METRIC_DISK_FULL)


def _how_ended(failure: WorkerFailure, what: str, timeout: float) -> tuple[str, str]:
    """Return in a word and in a sentence how a process ended."""
    if failure.kind is FailureKind.TIMEOUT:
        return "timeout", f"{what} took more than {timeout:g} s, and its process was killed"
    if failure.signal is not None:
        return failure.signal, f"{what} ended its process by {failure.signal}"
    if failure.exit_code is not None:
        return f"exit {failure.exit_code}", f"{what} ended its process with exit status {failure.exit_code}"
    return failure.kind.value, failure.reason
