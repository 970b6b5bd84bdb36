# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`load_planned`: from a plan to a model that runs, by way of the artifact cache and the accuracy probe."""

from __future__ import annotations

import hashlib
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from xpuruntime.engines.accuracy import ProbeRefusedError, check_accuracy, check_due, make_reference, read_reference
from xpuruntime.engines.artifact import PROBE, SCHEMA, calibration_digest, model_digest
from xpuruntime.engines.judging import judge
from xpuruntime.engines.precision import ProbeResult
from xpuruntime.errors import EngineError, ModelError, UnsupportedOperationError, XpuRuntimeError
from xpuruntime.evidence.records import Conversion
from xpuruntime.files.folders import cache_folder, not_private
from xpuruntime.files.paths import json_bytes, kind_of, with_home
from xpuruntime.inference.artifacts import SUFFIX
from xpuruntime.inference.building import Recipe, build, usable
from xpuruntime.planning.artifacts import compiled_keys

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.engines.accuracy import Reference
    from xpuruntime.engines.artifact import Artifact
    from xpuruntime.engines.base import Engine, Judgement, LoadedModel, Request
    from xpuruntime.planning import Plan
    from xpuruntime.policies import Policy
    from xpuruntime.runtime.machine import Machine

__all__ = ["Ready", "artifact_cache", "cache_key", "load_planned", "reference_of"]


class Ready(NamedTuple):
    """A model that runs, the plan with what was added to it, and what was found on the way.

    `artifact` is the one that it was loaded from; `proof` is of the accuracy probe.
    """

    loaded: LoadedModel
    plan: Plan
    artifact: Artifact | None
    proof: ProbeResult | None
    conversions: tuple[Conversion, ...]


def load_planned(recipe: Recipe, plan: Plan) -> Ready:
    """Load what was planned. Slow; leaves nothing behind when it fails.

    Raises
    ------
    XpuRuntimeError
        As `Engine.load` and `build`; EngineError where the accuracy probe is out of tolerance.
    """
    engine, request, judgement, machine = recipe
    cache = plan.control("execution.artifacts.cache")
    if request.artifact is None and cache is not None and cache.enforceability == "enforced":
        artifact, made, warning = _cached(recipe)
        request = msgspec.structs.replace(request, artifact=artifact)
        judgement = judge(engine, request, machine)
        if not judgement.verdict.accepted:
            raise UnsupportedOperationError(judgement.verdict.reason, engine=engine.name, device=request.device)
        how = "which was compiled now" if made else "from the cache"
        plan = msgspec.structs.replace(plan, notes=(*plan.notes, f"loaded from artifact {artifact.folder}, {how}"))
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
        told = (
            f"the probe of {request.model.path} is inconclusive: {proof.inconclusive}. Fix: pass inputs "
            "as calibration, of which the first becomes the probe, or to explain(); or state the sizes that the model "
            "takes in execution.shapes"
        )
        plan = msgspec.structs.replace(plan, warnings=(*plan.warnings, told))
    if proof is not None and not proof.passed:  # in a precision that nobody asked for: else it had been refused
        told = (
            f"{engine.name} computes float32 in {judgement.setting('computes')}, and on a probe input "
            f"{request.model.path} does not agree with fp32 on the CPU: {proof.figures}. Fix: find the node with "
            "`xrt compare`, or use another engine; with `accuracy` in the policy, such a session is refused"
        )
        plan = msgspec.structs.replace(plan, warnings=(*plan.warnings, told))
    return Ready(loaded, plan, request.artifact, proof, said)


def artifact_cache(policy: Policy) -> Path:
    """Return the folder that ``execution.artifacts.cache`` names; it may not exist yet."""
    stated = policy.execution.artifacts.cache
    if stated == "default":
        return cache_folder() / "artifacts"
    return with_home(stated, "execution.artifacts.cache")


def cache_key(recipe: Recipe) -> str:
    """Return the name of the artifact in a cache: a digest of all that makes a difference to it."""
    engine, request, judgement, machine = recipe
    parts = (
        SCHEMA,
        engine.name,
        request.device.partition(":")[0],
        model_digest(request.model),
        compiled_keys(engine, request.policy),
        engine.target(request, judgement, machine),
        calibration_digest(request),
    )
    text = json_bytes(parts, enc_hook=_plain, order="deterministic")
    return hashlib.sha256(text).hexdigest()


def _plain(value: object) -> object:
    return value.to_plain() if hasattr(value, "to_plain") else str(value)


def _cached(recipe: Recipe) -> tuple[Artifact, bool, str]:
    """Return the artifact of the cache, whether it was made now, and a warning or empty text.

    What is there is read without a lock. Of a folder that others may write to nothing is taken.
    """
    asked = recipe.request.policy.execution.artifacts
    folder = artifact_cache(recipe.request.policy) / f"{cache_key(recipe)}{SUFFIX}"
    if kind_of(folder) != "missing":
        _refuse_entry_of_others(folder)
        shared = not_private(folder.parent)
        if shared is not None:
            warning = (
                f"the artifact cache {str(folder.parent)!r} is not used, and the model was compiled again, since "
                f"another user may have written there: {shared}"
            )
            return build(recipe, folder, existing="remake")[0], True, warning
        try:
            return usable(recipe, folder), False, ""
        except (ModelError, EngineError) as error:
            if asked.stale != "rebuild":
                msg = f"{error} Or state execution.artifacts.stale: rebuild."
                raise type(error)(msg, engine=error.engine, device=error.device) from None
    artifact, made = build(recipe, folder, existing="rebuild" if asked.stale == "rebuild" else "use")
    return artifact, made, ""


def _refuse_entry_of_others(folder: Path) -> None:
    """Refuse an entry of a cache that another user may have put there. Raises XpuRuntimeError."""
    inside = folder.rglob("*") if kind_of(folder) == "folder" else ()
    for path in chain((folder,), inside):
        reason = not_private(path)
        if reason is not None:
            raise XpuRuntimeError(
                f"cannot use the entry {str(folder)!r} of the artifact cache, since another user may have written it: "
                f"{reason}"
            )


def _prove(
    engine: Engine, request: Request, judgement: Judgement, machine: Machine, loaded: LoadedModel
) -> tuple[ProbeResult | None, tuple[Conversion, ...]]:
    """Hold the model against its reference where that is due; an artifact that passed before is not held again."""
    check = check_due(request, judgement)
    if check is None:
        return None, ()
    what = "a probe input was compared with fp32 on the CPU"
    before = request.artifact.manifest.accuracy if request.artifact is not None else None
    if before is not None and before.passed and before.tolerance == check.tolerance:
        return before, (Conversion(what=what, reason=f"when the artifact was made: {before}", count=1),)
    try:
        reference = reference_of(engine, request, machine)
    except ProbeRefusedError as error:
        idle = ProbeResult(passed=True, outputs=(), tolerance=check.tolerance, not_run=str(error))
        return idle, (Conversion(what="not compared with fp32 on the CPU", reason=str(error), count=1),)
    except XpuRuntimeError as error:
        if check.refuses:
            raise
        return None, (Conversion(what="not compared with fp32 on the CPU", reason=str(error), count=1),)
    result = check_accuracy(request, engine.name, loaded, reference, check)
    origin = "" if reference.origin == "made up" else f" ({reference.origin})"
    return result, (Conversion(what=what, reason=f"{result}{origin}", count=1),)


def reference_of(
    engine: Engine, request: Request, machine: Machine, feeds: Mapping[str, Any] | None = None
) -> Reference:
    """Return the reference of a model: kept in the artifact, else made of the model itself, as for `feeds` always.

    Raises
    ------
    XpuRuntimeError
        As `make_reference`; EngineError where the model that an artifact was made from is not at hand.
    """
    artifact = request.artifact
    if artifact is None:
        return make_reference(request, engine, machine, feeds)
    if feeds is None and PROBE in artifact.manifest.files:
        return read_reference(artifact.folder / PROBE)
    return make_reference(_with_source(request, artifact), engine, machine, feeds)


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
