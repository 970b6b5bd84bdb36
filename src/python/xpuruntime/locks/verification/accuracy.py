# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Claims of accuracy, generation and determinism."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from xpuruntime.errors import XpuRuntimeError
from xpuruntime.evidence.tolerances import RANDOM_FIX
from xpuruntime.generation import SessionLogprobs, check_gates
from xpuruntime.inference.comparing import compare_session
from xpuruntime.inference.loading import reference_model_of
from xpuruntime.locks.determinism import session_determinism
from xpuruntime.locks.verification.claims import Claim, ClaimCode, ClaimVerdict
from xpuruntime.locks.verification.metrics import metric_claim, metric_not_given
from xpuruntime.policies.execution_policy import DETERMINISM_GRADES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xpuruntime.evidence.determinism import GradeTest
    from xpuruntime.evidence.tolerances import OutputFigures, Tolerance
    from xpuruntime.generation import Gate
    from xpuruntime.locks.verification.claims import Subject

__all__ = ["accuracy_claims", "determinism_claims", "generation_claims"]

_FIX = "find the node with `xrt compare`, keep it in fp32 by a rule in kernels.rules, or widen `accuracy` in the policy"
_OTHER_INPUTS = "give inputs with --input for which the output has other values"


def accuracy_claims(subject: Subject) -> Iterator[Claim]:
    """Compare each output with the reference, then compute the metrics."""
    key = "accuracy" if subject.policy.accuracy is not None else "execution.precision"
    for claim in _outputs(subject):
        yield subject.placed(claim, key)
    for metric in subject.metrics:
        yield subject.placed(metric_claim(metric, subject.session), f"verify.metrics.{metric.name}")
    names = {metric.name for metric in subject.metrics}
    for name in (metric for metric in subject.limits.metrics if metric not in names):
        yield subject.placed(metric_not_given(name, subject.limits.metrics[name]), f"verify.metrics.{name}")


def _outputs(subject: Subject) -> Iterator[Claim]:
    try:
        session = compare_session(subject.session, subject.feeds)
    except XpuRuntimeError as error:  # the reference does not run: nothing is known of the outputs
        requested = "every output within the tolerance of its precision"
        yield _not_compared("outputs", requested, error.reason, "give inputs that the model takes with --input")
        return
    if session.not_run is not None or not session.outputs:
        reason = session.not_run or "the model has no output"
        yield _not_compared("outputs", _requested(session.tolerance), reason, _OTHER_INPUTS)
    for output in session.outputs:
        if output.name in subject.session.model.random_outputs:
            yield _not_compared(
                output.name, _requested(session.tolerance), f"{output.undecided} in this output", RANDOM_FIX
            )
        else:
            yield _output(output, session.tolerance)


def _output(figures_of: OutputFigures, tolerance: Tolerance) -> Claim:
    stated = {"max_abs": figures_of.max_abs, "max_rel": figures_of.max_rel, "cosine": figures_of.cosine}
    observed = f"max {figures_of.max_abs:.3g}, rel {figures_of.max_rel:.3g}, cosine "
    observed += "undefined" if figures_of.cosine is None else f"{figures_of.cosine:.6f}"
    figures = {name: value for name, value in stated.items() if value is not None and value < float("inf")}
    requested = _requested(tolerance)
    if figures_of.undecided:
        claim = _not_compared(figures_of.name, requested, f"{figures_of.undecided} in this output", _OTHER_INPUTS)
        return msgspec.structs.replace(claim, observed=observed, figures=figures)
    return Claim(
        id=f"accuracy.{figures_of.name}",
        section="accuracy",
        requested=requested,
        observed=observed,
        verdict="pass" if figures_of.passed else "fail",
        code=ClaimCode.OK if figures_of.passed else ClaimCode.OUT_OF_TOLERANCE,
        reason="within the tolerance of fp32 on the CPU" if figures_of.passed else figures_of.reason,
        fix=None if figures_of.passed else _FIX,
        figures=figures,
    )


def _not_compared(name: str, requested: str, reason: str, fix: str) -> Claim:
    return Claim(
        id=f"accuracy.{name}",
        section="accuracy",
        requested=requested,
        observed="not compared",
        verdict="inconclusive",
        code=ClaimCode.NOT_COMPARED,
        reason=reason,
        fix=fix,
    )


def generation_claims(subject: Subject) -> Iterator[Claim]:
    """Compare what the session says about the next tokens of held-out texts with what the reference says."""
    limits, session = subject.limits.generation, subject.session
    if limits is None:
        return
    try:
        candidate = SessionLogprobs(session.run, session.model)
        reference = reference_model_of(session._engine, session._request, session._machine)
        try:
            report = check_gates(SessionLogprobs(reference.run, session.model), candidate, limits)
        finally:
            reference.close()
    except XpuRuntimeError as error:
        for name in ("top1", "kl", "perplexity"):
            if getattr(limits, name) is not None:
                claim = _not_compared(name, f"{name} {getattr(limits, name)}", error.reason, error.fix or _FIX)
                claim = msgspec.structs.replace(claim, id=f"generation.{name}", section="generation")
                yield subject.placed(claim, f"verify.generation.{name}")
        return
    for gate in report.gates:
        yield subject.placed(_gate_claim(gate), f"verify.generation.{gate.name}")


def _gate_claim(gate: Gate) -> Claim:
    verdicts: dict[str, tuple[ClaimVerdict, ClaimCode, str | None]] = {
        "pass": ("pass", ClaimCode.OK, None),
        "fail": ("fail", ClaimCode.OUT_OF_TOLERANCE, _FIX),
        "inconclusive": ("inconclusive", ClaimCode.NOT_COMPARED, "write more texts, or longer texts"),
        "reported": ("skipped", ClaimCode.NOT_APPLICABLE, None),
    }
    verdict, code, fix = verdicts[gate.verdict]
    return Claim(
        id=f"generation.{gate.name}",
        section="generation",
        requested=gate.requested,
        observed=gate.observed,
        verdict=verdict,
        code=code,
        reason=gate.reason,
        fix=fix,
        figures=gate.figures,
    )


def _requested(tolerance: Tolerance) -> str:
    return f"rtol {tolerance.rtol:g}, atol {tolerance.atol:g}, cosine {tolerance.cosine:g}"


_DETERMINISM_FIX = "find the node with `xrt determinism`, or ask for a lower grade"


def determinism_claims(subject: Subject) -> Iterator[Claim]:
    """Test the higher of the grades of ``verify.determinism`` and ``execution.determinism``, and those below it."""
    stated = {
        "verify.determinism": subject.limits.determinism,
        "execution.determinism": subject.policy.execution.determinism,
    }
    key, grade = max(stated.items(), key=lambda item: DETERMINISM_GRADES.index(item[1]))
    if grade == "none":
        return
    inputs = subject.feeds if subject.own_inputs else None
    determinism = session_determinism(subject.session, grade, inputs=inputs, trust=subject.trust)
    broken = any(test.verdict == "failed" for test in determinism.tests)
    for test in determinism.tests:
        yield subject.placed(_grade_claim(test, broken=broken), key)


def _grade_claim(test: GradeTest, *, broken: bool) -> Claim:
    untested: tuple[ClaimVerdict, ClaimCode] = (
        ("skipped", ClaimCode.NOT_APPLICABLE) if broken else ("inconclusive", ClaimCode.NOT_TESTED)
    )
    verdicts: dict[str, tuple[ClaimVerdict, ClaimCode]] = {
        "passed": ("pass", ClaimCode.OK),
        "failed": ("fail", ClaimCode.NONDETERMINISTIC),
        "not_applicable": ("skipped", ClaimCode.NOT_APPLICABLE),
        "not_tested": untested,
    }
    verdict, code = verdicts[test.verdict]
    first = test.first_difference
    figures = {"trials": float(test.trials)}
    if first is not None and first.ulp_max is not None:
        figures["ulp_max"] = float(first.ulp_max)
    return Claim(
        id=f"determinism.{test.grade}",
        section="determinism",
        requested="the same bits",
        observed=f"{test.verdict.replace('_', ' ')}, {test.trials} results compared",
        verdict=verdict,
        code=code,
        reason=test.reason if first is None else f"{test.reason}; first difference: {first}",
        fix=_DETERMINISM_FIX if verdict == "fail" else None,
        figures=figures,
    )
