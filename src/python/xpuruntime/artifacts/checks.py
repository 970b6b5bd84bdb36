# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Fit of a compiled artifact: whether it may be loaded for what is asked, and what becomes of the keys about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.engines.base import Refusal
from xpuruntime.engines.quantization.judge import calibration_digest
from xpuruntime.evidence.records import Control, Verdict, VerdictCode
from xpuruntime.policies import Policy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.artifacts.manifest import Artifact
    from xpuruntime.engines.base import Engine, Judgement, Request
    from xpuruntime.runtime.machine import Machine

__all__ = ["artifact_controls", "compiled_keys", "foreign_artifact", "refuse_compiling", "stale_artifact"]

#: Keys that the plan and the session answer themselves: an artifact is the same whatever they say.
_PLAN_KEYS = (
    "mode",
    "accuracy",
    "execution.engine",
    "execution.device",
    "execution.fallback",
    "execution.artifacts",
)
#: The calibration inputs of an artifact are compared by their digest.
_INPUTS = "calibration."
_OPTIONS = "execution.provider_options."
_AGAIN = "compile the model again: xrt compile MODEL -o FOLDER"


def compiled_keys(engine: Engine, policy: Policy) -> dict[str, Any]:
    """Return the stated keys of a policy that change what `engine` compiles."""
    free = (*_PLAN_KEYS, *engine.runtime_keys)
    own = tuple(f"{_OPTIONS}{name}." for name in (engine.name, *engine.aliases))
    return {
        key: value
        for key, value in policy.stated().items()
        if not any(key == path or key.startswith((f"{path}.", f"{path}[")) for path in free)
        and (not key.startswith(_OPTIONS) or key.startswith(own))
        and not key.startswith(_INPUTS)
    }


def foreign_artifact(artifact: Artifact, engine: str, device: str) -> Verdict | None:
    """Return the refusal of a candidate that the artifact was not made for, or ``None``."""
    manifest = artifact.manifest
    if manifest.engine == engine and _family(manifest.device) == _family(device):
        return None
    return Refusal(
        VerdictCode.ARTIFACT_FOREIGN,
        f"the artifact {artifact.folder} was compiled by {manifest.engine} for {manifest.device}",
        f"leave engine and device out, or compile the model for {engine}@{device}",
    ).verdict(engine, device)


def stale_artifact(engine: Engine, request: Request, judgement: Judgement, machine: Machine) -> Verdict | None:
    """Return the refusal of an artifact that does not fit policy or target, or ``None``. Pure."""
    artifact = request.artifact
    if artifact is None:
        return None
    manifest = artifact.manifest
    before, now = compiled_keys(engine, Policy.coerce(manifest.policy)), compiled_keys(engine, request.policy)
    policy = _differences(before, now, "its policy said", "and is asked for now")
    target = _differences(
        manifest.target, engine.target(request, judgement, machine), "it was compiled for", "and here is"
    )
    inputs = []
    if request.calibration is not None and calibration_digest(request) != manifest.calibration:
        inputs.append(
            "it was not quantized with calibration inputs, and some are given"
            if manifest.calibration is None
            else "it was quantized with other calibration inputs"
        )
    if not policy and not target and not inputs:
        return None
    return Refusal(
        VerdictCode.ARTIFACT_STALE,
        f"the artifact {artifact.folder} does not fit: " + "; ".join((*policy, *inputs, *target)),
        _AGAIN if target else f"ask for the same, or {_AGAIN}",
    ).verdict(engine.name, request.device)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], stored: str, current: str) -> list[str]:
    def show(value: Any) -> str:
        return "nothing" if value is None else str(value)

    return [
        f"{stored} {key} {show(before.get(key))} {current} {show(now.get(key))}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]


def _family(device: str) -> str:
    return device.partition(":")[0]


def refuse_compiling(engine: Engine, request: Request, judgement: Judgement) -> Verdict | None:
    """Return the refusal of a request that is to be compiled and cannot be, or ``None``."""
    if judgement.uncompilable is None or request.purpose != "compile":
        return None
    return Refusal(
        VerdictCode.COMPILE_UNSUPPORTED,
        judgement.uncompilable,
        "load the model itself, or compile it without that",
    ).verdict(engine.name, request.device)


def artifact_controls(engine: Engine, request: Request, judgement: Judgement) -> dict[str, Control]:
    """Return the controls of the stated keys of ``execution.artifacts``; they mean the same for every engine."""
    policy, artifact = request.policy, request.artifact
    artifacts = policy.execution.artifacts
    controls = {}
    for key in policy.stated():
        if not key.startswith("execution.artifacts."):
            continue
        requested = str(getattr(artifacts, key.rpartition(".")[2]))
        resolved, level, reason, fix = requested, "enforced", "", None
        if artifact is not None:
            resolved, reason = "-", f"the session is made from the artifact {artifact.folder}, and keeps no other"
        elif artifacts.cache == "off":
            reason = "nothing is kept"
        elif not engine.compiles:
            resolved, level = "-", "unsupported"
            reason = f"{engine.name} makes no compiled artifact: the model is loaded anew each time"
            fix = "name an engine that compiles, or leave the key out"
        elif judgement.uncompilable is not None:
            resolved, level, reason = "-", "unsupported", judgement.uncompilable
            fix = "change what cannot be compiled, or leave the key out"
        elif key.endswith(".cache"):
            reason = "the first session compiles the model and keeps it; later ones load that"
        else:
            reason = "an artifact in the cache that is damaged or does not fit is " + (
                "made again" if artifacts.stale == "rebuild" else "refused"
            )
        controls[key] = Control(
            key=key,
            requested=requested,
            resolved=resolved,
            enforceability=level,  # type: ignore[arg-type]
            reason=reason,
            fix=fix,
        )
    return controls
