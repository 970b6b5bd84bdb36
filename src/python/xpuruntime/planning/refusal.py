# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Error for a request that no candidate can run: it names every candidate, its reason and its fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.errors import (
    CudaError,
    EngineError,
    EngineUnavailable,
    PolicyError,
    UnsupportedOperationError,
    XpuRuntimeError,
)
from xpuruntime.evidence.verdict_codes import VerdictCode
from xpuruntime.runtime.install_commands import reinstall_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xpuruntime.evidence.records import Control, Verdict
    from xpuruntime.planning.candidates import EngineCandidate

__all__ = ["control_lines", "refusal"]

_ENGINE_CODES = frozenset({VerdictCode.ENGINE_MISSING, VerdictCode.ENGINE_BROKEN, VerdictCode.LIBRARY_MISSING})
#: Of engines that do not count where another one is broken: they are not there, or never had the device.
_ELSEWHERE = frozenset(
    {VerdictCode.ENGINE_MISSING, VerdictCode.DEVICE_UNSUPPORTED, VerdictCode.FORMAT_UNSUPPORTED, VerdictCode.NOT_NAMED}
)
_ARTIFACT_CODES = frozenset({VerdictCode.ARTIFACT_FOREIGN, VerdictCode.ARTIFACT_STALE})


def refusal(
    candidates: Sequence[EngineCandidate],
    verdicts: Sequence[Verdict],
    unmet: Mapping[str, Sequence[Control]],
    model_path: str,
) -> XpuRuntimeError:
    """Build the error for a request that nothing can run."""
    absent = [v for v in verdicts if v.code == VerdictCode.DEVICE_MISSING and v.candidate.endswith("@auto")]
    counted = [verdict for verdict in verdicts if verdict not in absent] or verdicts
    codes = {verdict.code for verdict in counted}
    device, engine = _one({c.device for c in candidates}), _one({c.engine for c in candidates})
    if not verdicts:
        return EngineUnavailable(
            f"nothing can run {model_path}: no engine is registered. "
            f"Fix: {reinstall_command()}, which registers those that come with it"
        )
    text = f"nothing can run {model_path}: " + _summary({verdict.code for verdict in verdicts}, len(verdicts))
    lines = [_verdict_line(verdict) for verdict in verdicts]
    for name, controls in unmet.items():
        lines.append(f"  keys that {name} does not enforce, and mode is strict:")
        lines.extend(f"  {line}" for line in control_lines(controls))
    message = "\n".join([text, *lines])

    if len(absent) == len(verdicts):  # engines were named, and there is none of their devices
        return EngineUnavailable(message, engine=engine)
    if codes <= {VerdictCode.ENGINE_UNKNOWN, VerdictCode.OPTION_INVALID}:
        return PolicyError(message, engine=engine)
    cuda = [c.device.startswith("cuda") for c in candidates]
    if VerdictCode.DEVICE_MISSING in codes and (all(cuda) or (codes == {VerdictCode.DEVICE_MISSING} and any(cuda))):
        return CudaError(message, device=device, engine=engine)
    if VerdictCode.DEVICE_MISSING in codes and codes <= _ELSEWHERE | {VerdictCode.DEVICE_MISSING}:
        return EngineUnavailable(message, device=device, engine=engine)
    if codes - _ELSEWHERE and codes - _ELSEWHERE <= {VerdictCode.LIBRARY_MISSING, VerdictCode.ENGINE_BROKEN}:
        return EngineUnavailable(message, device=device, engine=engine)  # one engine could, once its fault is fixed
    if codes & _ARTIFACT_CODES:
        return EngineError(message, device=device, engine=engine)
    if codes <= _ENGINE_CODES:
        return EngineUnavailable(message, device=device, engine=engine)
    return UnsupportedOperationError(message, device=device, engine=engine)


def control_lines(controls: Sequence[Control], mode: str = "strict") -> list[str]:
    """Return one line for each key: what was asked, what can be done, why, and the fix.

    Under strict, another mode is a fix of each.
    """
    lines = []
    for control in controls:
        told = f"  {control.key}: {control.requested} is {control.enforceability}: {_sentence(control.reason)}"
        lines.append(f"{told} Fix: {control.fix}" + ", or use mode: prefer" * (mode == "strict"))
    return lines


def _summary(codes: set[str], count: int) -> str:
    if codes == {VerdictCode.NOT_ENFORCEABLE}:
        return "mode is strict, and a key of the policy cannot be enforced"
    if codes == {VerdictCode.ENGINE_UNKNOWN}:
        return "the policy names an engine that is not registered"
    return "the one candidate was rejected" if count == 1 else f"all {count} candidates were rejected"


def _verdict_line(verdict: Verdict) -> str:
    fix = f" Fix: {verdict.fix}" if verdict.fix else ""
    return f"  {verdict.candidate}: {verdict.code}: {_sentence(verdict.reason)}{fix}"


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else text + "."


def _one(values: set[str]) -> str | None:
    return next(iter(values)) if len(values) == 1 else None
