# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Metrics: functions of the user that run a session and return a number, each with the least it may be.

The function of a file is called in a worker process; the session that it runs stays in this process.
"""

from __future__ import annotations

import builtins
import errno
import importlib.util
import math
import re
import secrets
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

import xpuruntime
from xpuruntime import errors
from xpuruntime.errors import InputError
from xpuruntime.files.paths import kind_of
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.locks.verification.claims import Claim, ClaimCode
from xpuruntime.locks.worker_side.xrt_session_worker import read_array, write_array
from xpuruntime.runtime.cpu_and_memory import available_memory
from xpuruntime.runtime.worker import FailureKind, Worker, WorkerFailure

if TYPE_CHECKING:
    from xpuruntime.inference import InferenceSession

_SIDE = "xpuruntime.locks.verification.metrics"
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
            failed = self._worker.call(f"{_SIDE}:load", called=_IMPORT, file=file, name=name, path=sys.path)
        except WorkerFailure as failure:
            self.close()
            why = _how_ended(failure, _IMPORT, timeout)[1]
            raise InputError(f"--metric {file}:{name}: {file} cannot be imported: {why}") from failure
        except BaseException:
            self.close()
            raise
        if failed:
            self.close()
        if "raised" in failed:
            raise InputError(f"--metric {file}:{name}: {file} cannot be imported: {failed['raised']}")
        if "lacks" in failed:
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
                answer = self._worker.call(f"{_SIDE}:compute", serve=serve, called=self._name, folder=folder)
            except WorkerFailure as failure:
                code = _CODES.get(failure.kind, ClaimCode.METRIC_CRASHED)
                raise MetricFailed(*_how_ended(failure, self._name, self._timeout), code) from failure
            finally:
                self.close()
        if "full" in answer:
            raise _disk_full(self._name, answer["full"])
        if "raised" in answer:
            raise MetricFailed("raised", f"{self._name} raised {answer['raised']}")
        if answer["number"] is None:
            raise MetricFailed.no_number(self._name, answer["type"])
        return float(answer["number"])

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


def write_value(value: Any, folder: Path) -> dict[str, Any]:
    """Return a value as JSON can carry it, with arrays as files of a folder."""
    if value is None or type(value) in (bool, int, float, str):
        return {"plain": value}
    if isinstance(value, Mapping):
        return {"map": [[_key(key), write_value(entry, folder)] for key, entry in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list": [write_value(entry, folder) for entry in value]}
    array = np.asarray(value)
    if array.dtype == object:
        texts = array.ravel().tolist()
        if any(type(text) is not str for text in texts):
            msg = f"a value of type {type(value).__name__} cannot be passed. Fix: pass arrays of numbers or of text"
            raise TypeError(msg)
        return {"texts": texts, "shape": array.shape}
    path = folder / f"{secrets.token_hex(8)}.npy"
    write_array(path, array, "")
    return {"array": str(path)}


def read_value(passed: dict[str, Any]) -> Any:
    """Return what `write_value` wrote, and remove its files."""
    [(kind, content)] = ((kind, content) for kind, content in passed.items() if kind != "shape")
    if kind == "plain":
        return content
    if kind == "map":
        return {key: read_value(entry) for key, entry in content}
    if kind == "list":
        return [read_value(entry) for entry in content]
    if kind == "texts":
        array = np.empty(len(content), object)
        array[:] = content
        return array.reshape(passed["shape"])
    path = Path(content)
    value = read_array(path)[1]
    path.unlink()
    path.with_suffix(".json").unlink()
    return value


def _key(key: Any) -> str | int:
    if isinstance(key, (str, int)):
        return key
    msg = f"a mapping with a key of type {type(key).__name__} cannot be passed; keys are text or whole numbers"
    raise TypeError(msg)


_MODULE = "xrt_metric"

_function: Callable[[Callable[[Any], Any]], Any]


def load(file: str, name: str, path: list[str]) -> dict[str, str]:
    """Import a file, with the module path of the verifying process. Return what it raised or lacks, if anything."""
    global _function
    sys.path[:] = path
    spec = importlib.util.spec_from_file_location(_MODULE, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    try:
        spec.loader.exec_module(module)
        function = getattr(module, name, None)
    except BaseException as error:
        return {"raised": said(error)}
    if not callable(function):
        return {"lacks": name}
    _function = function
    return {}


def compute(folder: str, ask: Callable[[Any], Any]) -> dict[str, Any]:
    """Call the function. Return its number and the type that it returned, or what it raised."""

    def run(inputs: Any) -> Any:
        reply = ask(write_value(inputs, Path(folder)))
        if "raised" in reply:
            raise _error(*reply["raised"])
        return read_value(reply)

    try:
        value = _function(run)
    except BaseException as error:
        return {"full" if is_full_disk(error) else "raised": said(error)}
    return {"number": number_of(value), "type": type(value).__name__}


def is_full_disk(error: BaseException | None) -> bool:
    """Whether an exception, or one that it was raised from or after, is of a disk or a quota that is full."""
    for _ in range(100):
        if error is None or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
            return error is not None
        error = error.__cause__ or error.__context__
    return False


def number_of(value: Any) -> float | None:
    """Return a number, or an array of one, as a float; ``None`` for what is none: text is not read."""
    try:
        return None if isinstance(value, (str, bytes)) else float(value)
    except Exception:  # of any class that a value has of its own
        return None


def said(error: BaseException) -> str:
    """Return the class and the text of an exception in one line."""
    try:
        text = " ".join(str(error).split())[:500]
    except Exception:  # of a class of the user's own
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _error(kind: str, text: str, number: int | None) -> Exception:
    """Return what a run raised in the other process; of a class that is not known here, a `RuntimeError`."""
    if number is not None:
        return OSError(number, text)
    type_ = getattr(errors, kind, None) or getattr(builtins, kind, None)
    if isinstance(type_, type) and issubclass(type_, Exception):
        try:
            return type_(text)
        except TypeError:  # its arguments are others
            pass
    return RuntimeError(f"{kind}: {text}")
