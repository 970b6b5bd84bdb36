# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`load_planned`: from a plan to a model that runs, by way of the artifact cache and the accuracy probe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.accuracy import (
    Reference,
    check_accuracy,
    check_due,
    make_reference,
    read_reference,
    unconverted,
)
from xpuruntime.engines.base import Engine, Judgement, LoadedModel, Recipe, Request, judge
from xpuruntime.engines.model.external import model_digest
from xpuruntime.errors import EngineError, ModelError, UnsupportedOperationError, XpuRuntimeError
from xpuruntime.evidence.records import Conversion
from xpuruntime.runtime.telemetry import log_decision, traced

if TYPE_CHECKING:
    from xpuruntime.artifacts.manifest import Artifact
    from xpuruntime.evidence.tolerances import ProbeResult
    from xpuruntime.planning import Plan
    from xpuruntime.runtime.machine import Machine


class LoadResult(msgspec.Struct, frozen=True):
    """A model that runs, the plan with what was added to it, and what was found on the way.

    `artifact` is the one that it was loaded from; `proof` is of the accuracy probe.
    """

    loaded: LoadedModel
    plan: Plan
    artifact: Artifact | None
    proof: ProbeResult | None
    conversions: tuple[Conversion, ...]


def _facts_of(ready: LoadResult) -> dict[str, Any]:
    return {"engine": ready.plan.engine, "device": ready.plan.device}


@traced("load", _facts_of)
def load_planned(recipe: Recipe, plan: Plan) -> LoadResult:
    """Load what was planned. Slow; leaves nothing behind when it fails."""
    engine, request, judgement, machine = recipe
    cache = plan.control("execution.artifacts.cache")
    if request.artifact is None and cache is not None and cache.enforceability == "enforced":
        from xpuruntime.artifacts.store import cached

        artifact, compiled, warning = cached(recipe)
        request = msgspec.structs.replace(request, artifact=artifact)
        judgement = judge(engine, request, machine)
        if not judgement.verdict.accepted:
            raise UnsupportedOperationError(judgement.verdict.reason, engine=engine.name, device=request.device)
        how = "which was compiled now" if compiled else "from the cache"
        note = f"loaded from artifact {artifact.folder}, {how}"
        facts = {"artifact": artifact.folder, "compiled": bool(compiled)}
        log_decision("load", "INFO", "artifact", note, engine=engine.name, device=request.device, **facts)
        plan = msgspec.structs.replace(plan, notes=(*plan.notes, note))
        if warning:
            plan = msgspec.structs.replace(plan, warnings=(*plan.warnings, warning))
    loaded = engine.load(request, judgement, machine)
    try:
        size = request.policy.execution.static_batch
        if size is not None:
            from xpuruntime.inference.static_batch import StaticBatchModel

            loaded = StaticBatchModel(loaded, request.model, size)
            loaded.check()
        proof, said = _prove(engine, request, judgement, machine, loaded)
    except BaseException:
        loaded.close()
        raise
    if proof is not None and proof.inconclusive is not None:
        from xpuruntime.evidence.tolerances import RANDOM_FIX

        inputs = (
            "pass inputs as calibration, of which the first becomes the probe, or to explain(); or state the sizes "
            "that the model takes in execution.shapes"
        )
        fix = RANDOM_FIX if request.model.random_outputs else inputs
        told = f"the probe of {request.model.path} is inconclusive: {proof.inconclusive}. Fix: {fix}"
        plan = msgspec.structs.replace(plan, warnings=(*plan.warnings, told))
    if proof is not None and not proof.passed:  # in a precision that nobody asked for: else it had been refused
        told = (
            f"{engine.name} computes float32 in {judgement.setting('computes')}, and on a probe input "
            f"{request.model.path} does not agree with fp32 on the CPU: {proof.figures}. Fix: find the node with "
            "`xrt compare`, or use another engine; with `accuracy` in the policy, such a session is refused"
        )
        plan = msgspec.structs.replace(plan, warnings=(*plan.warnings, told))
    return LoadResult(loaded, plan, request.artifact, proof, said)


def _prove(
    engine: Engine, request: Request, judgement: Judgement, machine: Machine, loaded: LoadedModel
) -> tuple[ProbeResult | None, tuple[Conversion, ...]]:
    """Hold the model against its reference where that is due; an artifact that passed before is not held again."""
    check = check_due(request, judgement)
    if check is None:
        return None, ()
    from xpuruntime.engines.precision.probe import ProbeRefusedError
    from xpuruntime.evidence.tolerances import ProbeResult

    what = "a probe input was compared with fp32 on the CPU"
    before = request.artifact.manifest.accuracy if request.artifact is not None else None
    if before is not None and before.passed and before.tolerance == check.tolerance:
        return before, (Conversion(what=what, reason=f"when the artifact was made: {before}", count=1),)
    try:
        reference = reference_of(engine, request, machine)
    except ProbeRefusedError as error:
        idle = ProbeResult(passed=True, outputs=(), tolerance=check.tolerance, not_run=error.reason)
        return idle, (Conversion(what="not compared with fp32 on the CPU", reason=error.reason, count=1),)
    except XpuRuntimeError as error:
        if check.refuses:
            raise
        return None, (Conversion(what="not compared with fp32 on the CPU", reason=str(error), count=1),)
    result = check_accuracy(request, engine.name, loaded, reference, check)
    origin = "" if reference.origin == "generated" else f" ({reference.origin})"
    return result, (Conversion(what=what, reason=f"{result}{origin}", count=1),)


def reference_of(
    engine: Engine, request: Request, machine: Machine, feeds: Mapping[str, Any] | None = None
) -> Reference:
    """Return the reference of a model: kept in the artifact, else made of the model itself, as for `feeds` always."""
    artifact = request.artifact
    if artifact is None:
        return make_reference(request, engine, machine, feeds)
    from xpuruntime.artifacts.manifest import PROBE

    if feeds is None and PROBE in artifact.manifest.files:
        return read_reference(artifact.folder / PROBE)
    return make_reference(_with_source(request, artifact), engine, machine, feeds)


def reference_model_of(engine: Engine, request: Request, machine: Machine) -> LoadedModel:
    """Return the model that a reference is made by, loaded, in fp32 on the CPU."""
    return unconverted(
        request if request.artifact is None else _with_source(request, request.artifact), engine, machine
    )


def _with_source(request: Request, artifact: Artifact) -> Request:
    """Return the request with the model that an artifact was made from, which must still be where it was."""
    from xpuruntime.engines.model import inspect_model

    info = request.model
    try:
        if info is artifact.manifest.model:  # it was read back, and no file
            info = inspect_model(info.path)
        if model_digest(info) == artifact.manifest.model_sha256:
            return msgspec.structs.replace(request, model=info, artifact=None)
        reason = f"{info.path} is another model by now"
    except ModelError as error:
        reason = str(error)
    msg = (
        f"the accuracy of the artifact {artifact.folder} cannot be checked: it keeps no reference, and the model that "
        f"it was made from is not at hand: {reason} Fix: compile it again under a policy that states "
        "`accuracy`, or leave `accuracy` out"
    )
    raise EngineError(msg, engine=artifact.manifest.engine, device=request.device)
