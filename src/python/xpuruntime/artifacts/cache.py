# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Cache of compiled artifacts: a folder for each digest of all that makes a difference to one."""

from __future__ import annotations

import hashlib
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from xpuruntime.artifacts.checks import compiled_keys
from xpuruntime.artifacts.manifest import SCHEMA
from xpuruntime.artifacts.reading import SUFFIX
from xpuruntime.artifacts.store import build, usable
from xpuruntime.engines.model.file_digests import model_digest
from xpuruntime.engines.quantisation.judge import calibration_digest
from xpuruntime.errors import EngineError, ModelError, XpuRuntimeError
from xpuruntime.files.paths import cache_folder, json_bytes, kind_of, not_private, with_home

if TYPE_CHECKING:
    from xpuruntime.artifacts.manifest import Artifact
    from xpuruntime.engines.judging import Recipe
    from xpuruntime.policies import Policy

__all__ = ["artifact_cache", "cache_key", "cached"]


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


def cached(recipe: Recipe) -> tuple[Artifact, bool, str]:
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
