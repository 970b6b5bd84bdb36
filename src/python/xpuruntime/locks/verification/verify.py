# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`verify`: the check of every claim that a policy and a lock make of a model."""

from __future__ import annotations

import hashlib
import os
import shlex
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import msgspec

from xpuruntime.argument_types import ARRAYS, COUNT, NAMES, NUMBER, PATH, TEXT, ArgumentType, check_types
from xpuruntime.errors import (
    AccuracyError,
    EngineError,
    EngineUnavailable,
    InputError,
    LockError,
    UnsupportedOperationError,
    XpuRuntimeError,
    XpuRuntimeWarning,
)
from xpuruntime.files.paths import json_bytes
from xpuruntime.lockfile.canonical import load_lock
from xpuruntime.lockfile.records import Lock, utc_now
from xpuruntime.lockfile.rules import policy_of
from xpuruntime.locks.environments import MODULE, session_worker
from xpuruntime.locks.verification.accuracy import (
    accuracy_claims,
    determinism_claims,
    generation_claims,
    memory_claims,
    start_claims,
)
from xpuruntime.locks.verification.claims import SECTIONS, Claim, ClaimCode, Section, Subject
from xpuruntime.locks.verification.evidence import audit_claims, evidence_claims
from xpuruntime.locks.verification.metrics import FileMetric, Metric, read_metric
from xpuruntime.locks.verification.result import VerificationResult
from xpuruntime.locks.verification.speed import machine_conditions, speed_claims
from xpuruntime.policies import Policy, VerifyPolicy, files
from xpuruntime.policies.device_spec import read_size
from xpuruntime.policies.document import did_you_mean
from xpuruntime.policies.verify_policy import Inconclusive
from xpuruntime.runtime.telemetry import log_decision, log_step, traced
from xpuruntime.runtime.worker import WorkerFailure

if TYPE_CHECKING:
    from xpuruntime.engines.registry import EngineRegistry
    from xpuruntime.inference import InferenceSession
    from xpuruntime.inference.session_arguments import ModelLike, PolicyLike
    from xpuruntime.policies.execution_policy import Precision
    from xpuruntime.runtime.machine import Machine

_CHECKS: dict[Section, Callable[[Subject], Iterable[Claim]]] = {
    "evidence": evidence_claims,
    "accuracy": accuracy_claims,
    "generation": generation_claims,
    "determinism": determinism_claims,
    "memory": memory_claims,
    "start": start_claims,
    "audit": audit_claims,
    "speed": speed_claims,
}
#: Seconds; a clock of floats can be asked for them.
_FOREVER = 1e9
_METRICS = ArgumentType(
    "a list of 'FILE.py:FUNCTION' or Metric",
    lambda value: isinstance(value, (list, tuple)) and all(isinstance(item, (str, Metric)) for item in value),
)

_SIZE = ArgumentType("a number of bytes, or text such as '8GiB'", lambda value: COUNT.fits(value) or TEXT.fits(value))


def _described(result: VerificationResult) -> dict[str, Any]:
    facts = {name: getattr(result, name) for name in ("model", "lock", "engine", "device", "verdict")}
    return {**facts, "failed": [claim.id for claim in result.of("fail")]}


@traced("verify", _described)
def verify(
    model: ModelLike,
    policy: PolicyLike | None = None,
    *,
    lock: str | os.PathLike[str] | None = None,
    inputs: Mapping[str, Any] | None = None,
    only: Sequence[str] | None = None,
    metrics: Sequence[str | Metric] = (),
    metric_timeout: float = 600.0,
    metric_memory: int | str | None = None,
    against: str | os.PathLike[str] | None = None,
    budget: float | None = None,
    inconclusive: Inconclusive | None = None,
    device: str | None = None,
    engine: str | Sequence[str] | None = None,
    precision: Precision | None = None,
    calibration: Any = None,
    trust: bool = False,
    registry: EngineRegistry | None = None,
    machine: Machine | None = None,
) -> VerificationResult:
    """Open a model under a policy and check every claim that the policy makes.

    Parameters
    ----------
    model : str, path, or torch.nn.Module
        As for `InferenceSession`.
    policy : Policy, path, mapping, or ``"auto"``, optional
        Its section ``verify`` says what is checked beyond its keys. Claims of a file name line and column.
    lock : path, optional
        A lock file, checked as ``xrt lock --check`` does; its policy holds where none is given.
    inputs : mapping of str to array, optional
        Default: generated from the model's shapes, the same each time; the result notes it.
    only : sequence of str, optional
        Sections, such as ``["evidence", "accuracy"]``; default: all that the policy asks for.
    metrics : sequence of str or Metric
        ``"FILE.py:FUNCTION"``, with the floor in ``verify.metrics`` of the policy, or ``"FILE.py:FUNCTION=FLOOR"``. The
        function gets `run`, which maps inputs to outputs, and returns a number. It is called in a worker process, where
        outputs are NumPy arrays; that of a `Metric` in this process, which it can end, crash or hold for ever.
    metric_timeout : float
        Seconds that the import, and the function with its runs, of a metric of a file may take; a claim that is late is
        inconclusive. ``math.inf`` is no limit.
    metric_memory : int or str, optional
        Bytes of main memory, or text such as ``"8GiB"``, that the process of a metric of a file and its children may
        hold; a claim that holds more is inconclusive. Default: 90% of what is available as it starts.
    against : path, optional
        The interpreter of another environment, such as ``"old/bin/python"``: the session is timed beside one of the
        same model and policy there, each in a process of its own.
    budget : float, optional
        Seconds for measurements of speed; default: that of ``verify.speed``.
    inconclusive : {"fail", "warn", "pass"}, optional
        What inconclusive claims do to the exit code; overrides the policy.
    device, engine, precision, calibration, trust, registry, machine
        As for `InferenceSession`.

    Returns
    -------
    VerificationResult
        Printable; ``.claims``, ``.verdict``, ``.exit_code``, ``.save(path, format)``.

    Raises
    ------
    InputError
        An argument is wrong, or the inputs do not fit the model.
    LockError
        The lock file cannot be used.
    PolicyError
    ModelError
    EngineError
        The engine asked for is not installed.
    CudaError
        The CUDA device asked for is missing.

    Notes
    -----
    An engine that fails, and a metric that raises or ends its process, are claims that failed.

    Examples
    --------
    >>> import xpuruntime as xrt
    >>> policy = {"execution": {"engine": "onnxruntime", "device": "cpu"}}
    >>> result = xrt.verify(xrt.demo_model_path(), policy, only=["evidence", "accuracy"])
    >>> result.verdict
    'pass'
    """
    types = {
        "inputs": ARRAYS, "only": NAMES, "metrics": _METRICS, "metric_timeout": NUMBER, "metric_memory": _SIZE,
        "against": PATH, "budget": NUMBER, "lock": PATH, "inconclusive": TEXT,
    }  # fmt: skip
    check_types(
        types,
        {**locals(), "only": None if isinstance(only, str) else only},
        optional=("inputs", "only", "metric_memory", "against", "budget", "lock", "inconclusive"),
    )
    sections = _sections(only, metrics)
    _check_limits(inconclusive, metric_timeout=metric_timeout, budget=budget)
    held = min(metric_timeout, _FOREVER), None if metric_memory is None else read_size(metric_memory, "metric_memory")
    stated = _stated(policy, lock)
    if against is not None:
        _check_interpreter(os.fspath(against))
    options: dict[str, Any] = {
        "device": device, "engine": engine, "policy": stated.policy, "precision": precision,
        "calibration": calibration, "trust": trust, "registry": registry, "machine": machine,
    }  # fmt: skip
    result = _nothing_verified(model, stated, inconclusive)
    with ExitStack() as resources:
        functions = _read_metrics(metrics, Policy.coerce(stated.policy).verify or VerifyPolicy(), held, resources)
        start = time.perf_counter()
        session = _session(model, options)
        if isinstance(session, Claim):
            return _logged(msgspec.structs.replace(result, claims=(session,)))
        opened_s = time.perf_counter() - start
        resources.enter_context(session)
        feeds, notes = _first_run(session, inputs)
        subject = Subject(
            session=session,
            model=model,
            document=stated.document,
            feeds=feeds,
            own_inputs=inputs is not None,
            reopen=lambda: _opened(model, options),
            opened_s=opened_s,
            metrics=functions,
            sections=sections,
            budget=None if budget is None else min(budget, _FOREVER),
            against=None if against is None else os.fspath(against),
            lock=result.lock,
            locked=stated.locked,
            options=options,
        )
        claims = tuple(_claims(subject))
        return _logged(_verified(result, subject, claims, notes))


def _logged(result: VerificationResult) -> VerificationResult:
    model = result.model
    for claim in result.claims:
        level = {"pass": "DEBUG", "fail": "WARNING"}.get(claim.verdict, "INFO")
        text = f"{claim.verdict}: {claim.id}: {claim.reason}"
        log_decision(
            "verify", level, "claim", text, model=model, claim=claim.id, verdict=claim.verdict, code=claim.code
        )
    level = "INFO" if result.exit_code == 0 else "WARNING"
    log_decision("verify", level, "verdict", f"{model}: {result.headline}", **_described(result))
    return result


class _Stated(NamedTuple):
    """What must hold: a policy, the file that it is of, and a lock."""

    policy: PolicyLike | None
    document: files.Document | None
    lock: str | None
    locked: Lock | None


def _stated(policy: PolicyLike | None, lock: str | os.PathLike[str] | None) -> _Stated:
    document = _document(policy)
    stated = policy if document is None else Policy.from_document(document)
    locked = None if lock is None else load_lock(lock)
    if stated is None and locked is not None and locked.identity.policy is not None:
        stated = policy_of(locked.identity.policy, str(lock))
    return _Stated(stated, document, None if lock is None else os.fspath(lock), locked)


def _nothing_verified(model: ModelLike, stated: _Stated, inconclusive: Inconclusive | None) -> VerificationResult:
    return VerificationResult(
        created=utc_now(),
        version=metadata.version("xpuruntime"),
        model=os.fspath(model) if isinstance(model, (str, os.PathLike)) else type(model).__name__,
        policy=None if stated.document is None else stated.document.name,
        policy_sha256=_policy_digest(stated.policy, stated.document),
        lock=stated.lock,
        lock_sha256=None if stated.locked is None else stated.locked.digest.removeprefix("sha256:"),
        inconclusive=inconclusive,
    )


def _read_metrics(
    metrics: Sequence[str | Metric], limits: VerifyPolicy, held: tuple[float, int | None], resources: ExitStack
) -> tuple[Metric | FileMetric, ...]:
    """Read metrics; `resources` closes the processes of those that are of files."""
    read: dict[str, Metric | FileMetric] = {}
    for metric in metrics:
        function = metric if isinstance(metric, Metric) else read_metric(metric, limits.metrics, *held)
        if isinstance(function, FileMetric):
            resources.callback(function.process.close)
        if function.name in read:
            raise InputError(f"two metrics are named {function.name!r}, and claims have their names. Fix: rename one")
        read[function.name] = function
    return tuple(read.values())


def _session(model: ModelLike, options: dict[str, Any]) -> InferenceSession | Claim:
    """Open the session, or return the claim that it could not be opened; what is no claim is raised."""
    try:
        return _opened(model, options)
    except (UnsupportedOperationError, AccuracyError, LockError) as error:
        return _not_opened(error)
    except EngineError as error:
        if not _plans(model, options):
            raise
        return _not_opened(error)


def _first_run(session: InferenceSession, inputs: Mapping[str, Any] | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Run the session once, so that inputs that do not fit are refused here, and fail no claim."""
    from xpuruntime.engines.precision import probing

    feeds, notes = _feeds(session, inputs)
    with probing(session.model, feeds, generated=inputs is None):
        session.run(feeds)
    return feeds, notes


def _verified(
    result: VerificationResult, subject: Subject, claims: tuple[Claim, ...], notes: tuple[str, ...]
) -> VerificationResult:
    plan = subject.session.plan
    if subject.locked is not None and not subject.locked.sealed:
        unsealed = f"an edit of the figures of {result.lock} is not detected: `xrt lock --upgrade` seals them"
        notes = (*notes, unsealed)
    return msgspec.structs.replace(
        result,
        model_sha256=plan.model.sha256,
        engine=plan.engine,
        device=plan.device,
        claims=claims,
        comparable=all(claim.code != ClaimCode.OTHER_MACHINE for claim in claims),
        notes=(*notes, *plan.warnings),
        facts=machine_conditions(),
    )


def _sections(only: Sequence[str] | None, metrics: Sequence[object]) -> frozenset[str]:
    if only is None:
        return frozenset()
    if isinstance(only, str) or not only:
        raise InputError(f"only is a list of sections, such as ['evidence', 'accuracy'], got {only!r}")
    for name in only:
        if name not in SECTIONS:
            raise InputError(
                f"{name!r} is not a section of a verification{did_you_mean(str(name), SECTIONS, 'sections')}"
            )
    if metrics and "accuracy" not in only:
        raise InputError(
            f"metrics are claims of accuracy, and only names {', '.join(sorted({*only}))}. Fix: add accuracy"
        )
    return frozenset(only)


def _check_limits(inconclusive: Inconclusive | None, **limits: float | None) -> None:
    if inconclusive is not None and inconclusive not in (words := get_args(Inconclusive)):
        hint = did_you_mean(str(inconclusive), words, "values")
        raise InputError(f"inconclusive: {inconclusive!r} is not a valid value{hint}")
    for name, seconds in limits.items():
        if seconds is not None and not seconds > 0:
            raise InputError(f"{name}: {seconds!r:.40} is not a number of seconds above 0, such as 60")


def _check_interpreter(python: str) -> None:
    if not (Path(python).is_file() and os.access(python, os.X_OK)):
        raise InputError(
            f"against: {python!r} is not an executable file. Fix: give an interpreter, such as VENV/bin/python"
        )
    try:
        with session_worker(python) as worker:
            failure = worker.attempt(f"{MODULE}:load_core", called="import xpuruntime").failure
    except WorkerFailure as error:
        raise InputError(f"against: {error.reason}") from error
    if failure is not None:
        fix = f"`{shlex.quote(python)} -m pip install xpuruntime` with the extra of the engine, or leave against out"
        raise EngineUnavailable(f"against: {python!r} cannot open a session: {failure.reason}", fix=fix)


def _document(policy: object) -> files.Document | None:
    is_path = (isinstance(policy, str) and policy not in ("auto", "prefer", "strict")) or hasattr(policy, "__fspath__")
    return files.load(policy) if is_path else None  # type: ignore[arg-type]


def _policy_digest(policy: PolicyLike | None, document: files.Document | None) -> str | None:
    if document is not None:
        return document.sha256
    if policy is None:
        return None
    return hashlib.sha256(json_bytes(Policy.coerce(policy).to_dict(), order="deterministic")).hexdigest()


def _opened(model: ModelLike, options: dict[str, Any]) -> InferenceSession:
    """Open a session without warnings: those of its plan are notes of the result."""
    from xpuruntime.inference import InferenceSession

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", XpuRuntimeWarning)
        return InferenceSession(model, **options)


def _plans(model: ModelLike, options: dict[str, Any]) -> bool:
    """Whether the plan stands, so that it is the engine that failed, and not the environment."""
    from xpuruntime.inference import plan

    try:
        plan(model, **options)
    except XpuRuntimeError:
        return False
    return True


def _not_opened(error: XpuRuntimeError) -> Claim:
    accuracy = isinstance(error, AccuracyError)
    return Claim(
        id="accuracy.outputs" if accuracy else "evidence.session",
        section="accuracy" if accuracy else "evidence",
        requested="a session under the policy",
        observed="not opened",
        verdict="fail",
        code=ClaimCode.OUT_OF_TOLERANCE if accuracy else ClaimCode.NOT_OPENED,
        reason=error.reason,
        fix=error.fix,
    )


def _feeds(session: InferenceSession, inputs: Mapping[str, Any] | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    if inputs is not None:
        return dict(inputs), ()
    from xpuruntime.engines.cuda_arrays import host_copies
    from xpuruntime.engines.precision import probe_feeds, shapes_text

    feeds = host_copies(probe_feeds(session.model))
    note = f"inputs were generated (seed 0) for {shapes_text(feeds)}: give your own with inputs, or --input"
    return feeds, (note,) if feeds else ()


def _claims(subject: Subject) -> Iterator[Claim]:
    sections = [section for section in SECTIONS if not subject.sections or section in subject.sections]
    for number, section in enumerate(sections, 1):
        timed = subject.limits.speed if section == sections[-1] == "speed" else None
        log_step(
            section, number, len(sections), None if timed is None else min(subject.budget or timed.budget, timed.budget)
        )
        yield from _of_section(section, subject)


def _of_section(section: Section, subject: Subject) -> Iterator[Claim]:
    """Yield the claims of a section. What fails in it, an engine above all, is a claim that failed."""
    nothing = True
    try:
        for claim in _CHECKS[section](subject):
            nothing = False
            yield claim
    except Exception as error:  # an engine of someone else's may raise anything
        yield _raised(section, error)
        return
    if nothing and section in subject.sections:
        yield Claim(
            id=section,
            section=section,
            requested="-",
            observed="-",
            verdict="skipped",
            code=ClaimCode.NOT_APPLICABLE,
            reason=f"the policy states no verify.{section}",
            fix=f"state verify.{section} in the policy",
        )


def _raised(section: Section, error: Exception) -> Claim:
    text = str(error) if isinstance(error, XpuRuntimeError) else f"{type(error).__name__}: {error}"
    memory = isinstance(error, MemoryError)
    return Claim(
        id=f"{section}.run",
        section=section,
        requested="the checks of this section run",
        observed="raised",
        verdict="inconclusive" if memory else "fail",
        code=ClaimCode.RAISED,
        reason=f"{'memory ran out: ' if memory else ''}{' '.join(text.split())[:1000]}",
    )
