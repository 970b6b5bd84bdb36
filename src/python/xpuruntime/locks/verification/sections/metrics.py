# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Metric`: a function of the user that runs a session and returns a number, with the least that it may be."""

from __future__ import annotations

import importlib.util
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.errors import InputError
from xpuruntime.files.paths import kind_of
from xpuruntime.locks.verification.claim_codes import ClaimCode
from xpuruntime.locks.verification.claims import Claim

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xpuruntime.inference import InferenceSession

__all__ = ["Metric", "metric_claim", "read_metric"]

_FORM = re.compile(r"(?P<file>.+\.py):(?P<name>[^\W\d]\w*)(?:=(?P<floor>[^=]+))?")


class Metric(NamedTuple):
    """A metric: ``function(run)`` returns a number, where ``run(inputs)`` returns the outputs of the model by name."""

    name: str
    function: Callable[[Callable[..., dict[str, Any]]], Any]
    floor: float


def read_metric(text: str, floors: Mapping[str, float]) -> Metric:
    """Read ``FILE.py:NAME`` or ``FILE.py:NAME=FLOOR``, and import the file.

    Parameters
    ----------
    text : str
    floors : mapping of str to float
        Least values by name, from the policy.

    Raises
    ------
    InputError
        The form is another, the file cannot be imported or has no such function, or no floor is stated.
    """
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
    function = getattr(_imported(text, file), name, None)
    if not callable(function):
        raise InputError(f"--metric {text}: {file} has no function {name!r}. Fix: name one of its functions")
    return Metric(name, function, floor)


def _number(text: str, stated: str) -> float:
    try:
        floor = float(stated)
    except ValueError:
        floor = math.nan
    if not math.isfinite(floor):
        raise InputError(f"--metric {text}: the floor {stated!r} is not a finite number. Fix: write one, such as 0.98")
    return floor


def _imported(text: str, file: str) -> Any:
    if kind_of(file) != "file":
        raise InputError(f"--metric {text}: '{file}' is not a file. Fix: name a Python file, such as metric.py:top1")
    spec = importlib.util.spec_from_file_location(f"xrt_metric_{abs(hash(file))}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise InputError(f"--metric {text}: {file} cannot be imported: {_said(error)}") from error
    return module


def metric_claim(metric: Metric, session: InferenceSession) -> Claim:
    """Compute a metric. What it raises, or returns that is no number, fails the claim."""
    requested = f">= {metric.floor:g}"
    try:
        value = metric.function(session.run)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _failed(metric, requested, "raised", f"{metric.name} raised {_said(error)}")
    number = _number_of(value)
    if number is None:
        what = type(value).__name__
        return _failed(metric, requested, what, f"{metric.name} returned a value of type {what}, which is no number")
    if math.isnan(number):
        return _failed(metric, requested, "nan", f"{metric.name} returned NaN")
    figures = {"value": number, "floor": metric.floor} if math.isfinite(number) else {"floor": metric.floor}
    passed = number >= metric.floor
    return Claim(
        id=f"accuracy.metric.{metric.name}",
        section="accuracy",
        requested=requested,
        observed=f"{number:.6g}",
        verdict="pass" if passed else "fail",
        code=ClaimCode.OK if passed else ClaimCode.BELOW_FLOOR,
        reason=f"{metric.name} is {number:.6g}, {'at least' if passed else 'below'} {metric.floor:g}",
        fix=None if passed else "compare the engines with `xrt compare`, or state a lower floor",
        figures=figures,
    )


def _number_of(value: Any) -> float | None:
    """Return a number, or an array of one, as a float; ``None`` for what is none: text is not read."""
    try:
        return None if isinstance(value, (str, bytes)) else float(value)
    except Exception:  # of any class that a value has of its own
        return None


def _failed(metric: Metric, requested: str, observed: str, reason: str) -> Claim:
    return Claim(
        id=f"accuracy.metric.{metric.name}",
        section="accuracy",
        requested=requested,
        observed=observed,
        verdict="fail",
        code=ClaimCode.METRIC_FAILED,
        reason=reason,
        fix=f"correct the function {metric.name}: it gets run(inputs) and returns a number",
        figures={"floor": metric.floor},
    )


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())[:500]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
