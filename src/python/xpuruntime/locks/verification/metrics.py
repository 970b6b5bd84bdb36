# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Metrics: functions of the user that run a session and return a number, each with the least it may be.

The function of a file is called in a worker process; the session that it runs stays in this process.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xpuruntime
from xpuruntime.errors import InputError
from xpuruntime.files.paths import kind_of
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.locks.verification.claims import Claim, ClaimCode
from xpuruntime.locks.verification.metric_function import is_full_disk, number_of, read_value, said, write_value
from xpuruntime.runtime.cpu_and_memory import available_memory
from xpuruntime.runtime.worker import FailureKind, Worker, WorkerFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Self

    from xpuruntime.inference import InferenceSession

__all__ = ["FileMetric", "Metric", "MetricFailed", "MetricProcess", "metric_claim", "metric_not_given", "read_metric"]

_SIDE = "xpuruntime.locks.verification.metric_function"
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


_FORM = re.compile(r"(?P<file>.+\.py):(?P<name>[^\W\d]\w*)(?:=(?P<floor>[^=]+))?")
_FAILED_FIX = "correct the function {0}: it gets run(inputs) and returns a number"
#: What did not end by the function itself says nothing about the model.
_LIMIT_FIXES = {
    ClaimCode.METRIC_TIMEOUT: (
        "have {0} run fewer samples, or allow more with --metric-timeout (metric_timeout in Python)"
    ),
    ClaimCode.METRIC_MEMORY: (
        "have {0} hold fewer samples at a time, or allow more with --metric-memory (metric_memory in Python)"
    ),
    ClaimCode.METRIC_DISK_FULL: "free space there, or set TMPDIR to a folder on another disk",
}


class Metric(NamedTuple):
    """A metric: ``function(run)`` returns a number, where ``run(inputs)`` returns the outputs of the model by name.

    The function is called in this process and without a limit of time: what ends, blocks or crashes it does so to the
    process. Name a function of a file, ``"FILE.py:FUNCTION"``, to have it called in a worker process.
    """

    name: str
    function: Callable[[Callable[..., dict[str, Any]]], Any]
    floor: float

    def compute(self, run: Callable[..., dict[str, Any]]) -> float:
        """Return the number of the function."""
        try:
            value = self.function(run)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise MetricFailed("raised", f"{self.name} raised {said(error)}") from error
        number = number_of(value)
        if number is None:
            raise MetricFailed.no_number(self.name, type(value).__name__)
        return number


class FileMetric(NamedTuple):
    """A metric whose function a file has: it is imported, and called, in a worker process."""

    name: str
    process: MetricProcess
    floor: float

    def compute(self, run: Callable[..., dict[str, Any]]) -> float:
        """Return the number of the function; once."""
        return self.process.compute(run)


def read_metric(text: str, floors: Mapping[str, float], timeout: float, memory_limit: int | None = None) -> FileMetric:
    """Read ``FILE.py:NAME`` or ``FILE.py:NAME=FLOOR``, and import the file in a worker process."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise InputError(
            f"--metric {text}: write FILE.py:FUNCTION, or FILE.py:FUNCTION=FLOOR such as metric.py:top1=0.98"
        )
    file, name, stated = match["file"], match["name"], match["floor"]
    floor = floors.get(name) if stated is None else _number(text, stated)
    if floor is None:
        fix = f"write {file}:{name}=0.98, or state verify.metrics.{name} in the policy"
        raise InputError(f"--metric {text}: no floor is stated for {name!r}; {fix}")
    if kind_of(file) != "file":
        raise InputError(f"--metric {text}: '{file}' is not a file. Fix: name a Python file, such as metric.py:top1")
    return FileMetric(name, MetricProcess(file, name, timeout, memory_limit), floor)


def _number(text: str, stated: str) -> float:
    try:
        floor = float(stated)
    except ValueError:
        floor = math.nan
    if not math.isfinite(floor):
        raise InputError(f"--metric {text}: the floor {stated!r} is not a finite number. Fix: write one, such as 0.98")
    return floor


def metric_claim(metric: Metric | FileMetric, session: InferenceSession) -> Claim:
    """Compute a metric. Without a number it fails, or is inconclusive where time, memory or a disk ran out."""
    try:
        number = metric.compute(session.run)
        if math.isnan(number):
            raise MetricFailed("nan", f"{metric.name} returned NaN")
    except MetricFailed as failed:
        return _no_number(metric, failed)
    figures = {"value": number, "floor": metric.floor} if math.isfinite(number) else {"floor": metric.floor}
    passed = number >= metric.floor
    return Claim(
        id=f"accuracy.metric.{metric.name}",
        section="accuracy",
        requested=f">= {metric.floor:g}",
        observed=f"{number:.6g}",
        verdict="pass" if passed else "fail",
        code=ClaimCode.OK if passed else ClaimCode.BELOW_FLOOR,
        reason=f"{metric.name} is {number:.6g}, {'at least' if passed else 'below'} {metric.floor:g}",
        fix=None if passed else "compare the engines with `xrt compare`, or state a lower floor",
        figures=figures,
    )


def metric_not_given(name: str, floor: float) -> Claim:
    """Return the claim of a metric that the policy has a floor for, and that nobody gave the function of."""
    return Claim(
        id=f"accuracy.metric.{name}",
        section="accuracy",
        requested=f">= {floor:g}",
        observed="not computed",
        verdict="inconclusive",
        code=ClaimCode.METRIC_NOT_GIVEN,
        reason=f"the policy states the least value of {name}, and no function {name} was given",
        fix=f"give its function with --metric FILE.py:{name} (metrics in Python)",
        figures={"floor": floor},
    )


def _no_number(metric: Metric | FileMetric, failed: MetricFailed) -> Claim:
    limit = _LIMIT_FIXES.get(failed.code)
    return Claim(
        id=f"accuracy.metric.{metric.name}",
        section="accuracy",
        requested=f">= {metric.floor:g}",
        observed=failed.observed,
        verdict="fail" if limit is None else "inconclusive",
        code=failed.code,
        reason=str(failed),
        fix=(limit or _FAILED_FIX).format(metric.name),
        figures={"floor": metric.floor},
    )
