# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`compare_engines`: one model on several engines, each compared with fp32 on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from xpuruntime.argument_types import ARRAYS, COUNT, FLAG, MACHINE, NAMES, check_types
from xpuruntime.engines.accuracy import Reference, limits_of, make_reference
from xpuruntime.engines.base import Judgement, judge
from xpuruntime.engines.control_builder import REFERENCE
from xpuruntime.engines.registry import EngineRegistry, known_engines
from xpuruntime.errors import EngineError, InputError, ModelError, XpuRuntimeError
from xpuruntime.evidence.tolerances import ProbeResult, Tolerance, compare_within
from xpuruntime.inference.comparison import Comparison, DriftReport, EngineRow, measure_drift
from xpuruntime.inference.explain import measure
from xpuruntime.inference.intermediates import Divergence, find_divergence
from xpuruntime.inference.loading import reference_of
from xpuruntime.inference.plan_request import calibration_of, plan_request
from xpuruntime.inference.session_arguments import SessionArguments
from xpuruntime.runtime.telemetry import log_step

if TYPE_CHECKING:
    import os

    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.inference.session import InferenceSession
    from xpuruntime.inference.session_arguments import PolicyLike
    from xpuruntime.planning import Plan
    from xpuruntime.policies import Policy
    from xpuruntime.policies.execution_policy import Precision
    from xpuruntime.runtime.machine import Machine


def compare_engines(
    model: str | os.PathLike[str],
    engines: Sequence[str] | None = None,
    *,
    device: str | None = None,
    precision: Precision | None = None,
    inputs: Mapping[str, Any] | None = None,
    policy: PolicyLike | None = None,
    calibration: Any = None,
    runs: int = 20,
    search: bool = True,
    layers: bool = False,
    registry: EngineRegistry | None = None,
    machine: Machine | None = None,
) -> Comparison:
    """Run a model on several engines and compare each with fp32 on the CPU.

    Parameters
    ----------
    model : str, path, bytes or onnx.ModelProto
        An ONNX model.
    engines : sequence of str, optional
        Names, or ``"engine@device"``; default: all that ``engine: auto`` may choose.
    device : str, optional
        For those that state none; default: what the policy says, where each engine takes its first of ``"auto"``.
    precision : str, optional
    inputs : mapping of str to array, optional
        Default: generated from the model's shapes, the same each time.
    policy : Policy, path, mapping, or ``"auto"``, optional
        For all of them. Its ``accuracy`` states the tolerance; without it, that of the precision holds.
    calibration : optional
        As for `InferenceSession`.
    runs : int
        Timed runs of each engine, after a few that are not counted.
    search : bool
        Look for the first node out of tolerance on engines that differ. Runs the model some ten times more. With
        `layers`, the first layer out of tolerance is named in its place, so that there is one answer.
    layers : bool
        Measure how far every layer is from the reference: `EngineRow.drift`. Loads each engine once more, with the
        tensors of all layers as outputs.
    registry : EngineRegistry, optional
    machine : Machine, optional

    Returns
    -------
    Comparison
        Printable. An engine that cannot run the model is a row with the reason.

    Raises
    ------
    InputError
        No engine is named, none has the name that is given, or the inputs do not fit the model.
    ModelError
        The model cannot be used.
    XpuRuntimeError
        The reference does not run it.

    Examples
    --------
    >>> import xpuruntime as xrt
    >>> table = xrt.compare_engines(xrt.demo_model_path(), ["onnxruntime", "null"], device="cpu")
    >>> [row.status for row in table.rows]
    ['agrees', 'differs']
    """
    from xpuruntime.engines.model import with_shapes
    from xpuruntime.engines.registry import read_model
    from xpuruntime.planning import PlanRequest
    from xpuruntime.runtime.snapshot import machine_snapshot

    types = {
        "runs": COUNT, "engines": NAMES, "inputs": ARRAYS, "machine": MACHINE, "search": FLAG, "layers": FLAG,
    }  # fmt: skip
    arguments = {**locals(), "engines": None if isinstance(engines, str) else engines}
    check_types(types, arguments, optional=("engines", "inputs", "machine"))
    if runs < 1:
        msg = f"runs must be at least 1, got {runs}"
        raise InputError(msg)
    known = known_engines(registry)
    names = (
        tuple(engines) if engines is not None else tuple(e.name for e in known if e.automatic and "onnx" in e.formats)
    )
    if not names or isinstance(engines, str):
        msg = f"engines is a list of names, such as ['onnxruntime', 'openvino'], got {engines!r}"
        raise InputError(msg)
    pairs = [_split(name) for name in names]
    for engine, _ in pairs:
        try:
            known.get(engine)
        except EngineError as error:
            raise InputError(error.reason, fix=error.fix) from None
    base = SessionArguments(device=device, policy=policy, precision=precision).checked().merged()
    info = with_shapes(read_model(model), base)
    request = PlanRequest(model=info, calibration=calibration_of(calibration, base, info))
    if info.format != "onnx":
        msg = f"{info.path} is of the format {info.format}, and engines are compared on ONNX models; export it first"
        raise ModelError(msg)
    on_cpu = request.on("cpu", base)
    reference = make_reference(on_cpu, None, machine or machine_snapshot(), inputs)
    bench = _Bench(request, base, known, machine, reference, runs, search, layers)
    return Comparison(
        model=info.path,
        reference=REFERENCE,
        inputs=reference.origin,
        rows=tuple(_rows(bench, pairs)),
        layers=layers,
    )


def _rows(bench: _Bench, pairs: Sequence[tuple[str, str | None]]) -> Iterator[EngineRow]:
    began = time.monotonic()
    for number, (engine, device) in enumerate(pairs, 1):
        left = (time.monotonic() - began) / (number - 1) * (len(pairs) - number + 1) if number > 1 else None
        log_step(engine if device is None else f"{engine}@{device}", number, len(pairs), left)
        yield bench.row(engine, device)


def answers_of(
    request: Any,
    plan: Plan,
    policy: Policy,
    machine: Machine,
    feeds: Mapping[str, Any],
    registry: EngineRegistry | None = None,
) -> Callable[[ModelInfo], Mapping[str, Any]]:
    """Return what runs a model on the engine of a plan, and raises `XpuRuntimeError` alone.

    `request` is a `PlanRequest`; the model takes the place of its own.
    """
    engine = known_engines(registry).get(plan.engine)

    def answer(model: ModelInfo) -> Mapping[str, Any]:
        placed = msgspec.structs.replace(request, model=model).on(plan.device, policy)
        judgement = judge(engine, placed, machine)
        if not judgement.verdict.accepted:
            raise XpuRuntimeError(judgement.verdict.reason, engine=engine.name, device=plan.device)
        try:
            loaded = engine.load(placed, judgement, machine)
            try:
                return dict(loaded.run(feeds))
            finally:
                loaded.close()
        except XpuRuntimeError:
            raise
        except Exception as error:  # an engine of someone else's may raise anything
            msg = f"{type(error).__name__}: {error}"
            raise XpuRuntimeError(msg, engine=engine.name, device=plan.device) from error

    return answer


def _split(name: str) -> tuple[str, str | None]:
    engine, at, device = name.strip().partition("@")
    if not engine or (at and not device):
        raise InputError(f"{name!r} is no engine", fix="write a name such as openvino, or openvino@cpu")
    return engine, device or None


class _Bench(NamedTuple):
    request: Any
    base: Policy
    registry: EngineRegistry
    machine: Machine | None
    reference: Reference
    runs: int
    search: bool
    layers: bool

    def row(self, engine: str, device: str | None) -> EngineRow:
        policy = self.base.with_overrides(engine=engine, device=device)
        execution = policy.execution.replace(fallback="error")
        policy = policy.replace(execution=execution)
        where, precision = str(execution.device), execution.precision
        try:
            (plan, judgement), machine = plan_request(self.request, policy, self.registry, self.machine)
        except XpuRuntimeError as error:
            return EngineRow(engine=engine, device=where, precision=precision, status="rejected", reason=_said(error))
        named: dict[str, Any] = {"engine": plan.engine, "device": plan.device, "precision": plan.precision}
        try:
            result, latency = self._run(plan, judgement, policy, machine)
        except XpuRuntimeError as error:
            return EngineRow(**named, status="failed", reason=str(error), notes=plan.warnings)
        except Exception as error:  # an engine of someone else's may raise anything, and the others go on
            return EngineRow(**named, status="failed", reason=f"{type(error).__name__}: {error}", notes=plan.warnings)
        notes, drift, divergence = plan.warnings, None, None
        if self.layers:
            try:
                drift = self._drift(plan, policy, machine, result)
            except XpuRuntimeError as error:
                notes = (*notes, f"the drift of layers could not be measured: {error}")
        if self.search and not result.passed:
            why = _measured_instead(drift, plan.precision)
            if why:
                notes = (*notes, f"the first node was not looked for by bisection: {why}")
            else:
                try:
                    divergence = self._search(plan, policy, machine, result)
                except XpuRuntimeError as error:  # the table stands without it
                    notes = (*notes, f"the first node could not be looked for: {error}")
        judged = [output for output in result.outputs if output.name not in self.request.model.random_outputs]
        worst = max(judged, key=lambda figures: (not figures.passed, figures.max_rel), default=None)
        return EngineRow(
            **named,
            status="differs" if not result.passed else "inconclusive" if result.inconclusive else "agrees",
            reason=result.inconclusive or result.figures,
            max_abs=None if worst is None else result.max_abs,
            max_rel=None if worst is None else worst.max_rel,
            cosine=result.cosine,
            median_us=latency,
            tolerance=result.tolerance,
            divergence=divergence,
            notes=notes,
            outputs=result.outputs,
            drift=drift,
        )

    def _run(self, plan: Plan, judgement: Judgement, policy: Policy, machine: Machine) -> tuple[ProbeResult, float]:
        placed = self.request.on(plan.device, policy)
        loaded = self.registry.get(plan.engine).load(placed, judgement, machine)
        try:
            feeds = self.reference.feeds
            limits = limits_of(placed, judgement.setting("computes"))
            result = compare_within(
                self.reference.outputs, dict(loaded.run(feeds)), limits, self.request.model.random_outputs
            )
            return result, measure(lambda: loaded.run(feeds), self.runs).median_us
        finally:
            loaded.close()

    def _search(self, plan: Plan, policy: Policy, machine: Machine, failing: ProbeResult) -> Divergence | None:
        answer = self._answers(plan, policy, machine)
        return find_divergence(self.request.model, self.reference.feeds, failing, failing.tolerance, answer)

    def _drift(self, plan: Plan, policy: Policy, machine: Machine, result: ProbeResult) -> DriftReport:
        answer = self._answers(plan, policy, machine)
        return measure_drift(self.request.model, self.reference.feeds, result.tolerance, answer, agreed=result.passed)

    def _answers(self, plan: Plan, policy: Policy, machine: Machine) -> Callable[[ModelInfo], Mapping[str, Any]]:
        return answers_of(self.request, plan, policy, machine, self.reference.feeds, self.registry)


def _measured_instead(drift: DriftReport | None, precision: str) -> str:
    """Return why the drift of layers takes the place of a search, which could name another node; empty where not."""
    if drift is None or not drift.layers:
        return ""
    if drift.first is not None:
        return "the layers were measured, and the first of them that is out of tolerance is named"
    if precision == "int8":
        return (
            "under int8 every cut of the graph quantizes otherwise, and of the layers that were measured none is out "
            "of tolerance"
        )
    return ""


def _said(error: XpuRuntimeError) -> str:
    lines = str(error).splitlines()
    return " ".join(line.strip() for line in (lines[1:] or lines))


def compare_session(session: InferenceSession, inputs: Mapping[str, Any] | None) -> ProbeResult:
    """Run a session and the model as it is, in fp32 on the CPU, and compare within the tolerance of the session."""
    request = session._request
    reference = reference_of(session._engine, request, session._machine, inputs)
    answer = session.run(reference.feeds)
    return compare_within(reference.outputs, answer, tolerance_of(session), session.model.random_outputs)


def tolerance_of(session: InferenceSession) -> Tolerance:
    """Return how far from the reference the outputs of a session may be."""
    return limits_of(session._request, session.plan.settings.get("computes"))
