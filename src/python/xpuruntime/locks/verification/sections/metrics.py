# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Claims of metrics: functions of the user that run a session and return a number, each with the least it may be."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.errors import InputError
from xpuruntime.files.paths import kind_of
from xpuruntime.locks.verification.claim_codes import ClaimCode
from xpuruntime.locks.verification.claims import Claim
from xpuruntime.locks.verification.metric_worker.process import MetricFailed, MetricProcess
from xpuruntime.locks.verification.metric_worker.worker_side import number_of, said

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xpuruntime.inference import InferenceSession

__all__ = ["FileMetric", "Metric", "metric_claim", "metric_not_given", "read_metric"]

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
