# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`compile_model`: a model compiled for one engine and target, into a folder that sessions start from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

from xpuruntime.argument_types import FLAG, check_types
from xpuruntime.artifacts.store import build, copy_artifact
from xpuruntime.engines.base import Recipe
from xpuruntime.engines.registry import EngineRegistry, known_engines
from xpuruntime.files.paths import user_path
from xpuruntime.inference.plan_request import plan_session, warn_of
from xpuruntime.inference.session_arguments import SessionArguments

if TYPE_CHECKING:
    import os

    from xpuruntime.artifacts.manifest import Artifact
    from xpuruntime.inference.session_arguments import PolicyAliases, PolicyLike
    from xpuruntime.policies.execution_policy import Precision
    from xpuruntime.runtime.machine import Machine


def compile_model(
    model: Any,
    output: str | os.PathLike[str],
    policy: PolicyLike | None = None,
    *,
    device: str | None = None,
    engine: str | Sequence[str] | None = None,
    precision: Precision | None = None,
    lock: str | os.PathLike[str] | None = None,
    frozen: bool = False,
    overwrite: bool = False,
    calibration: Any = None,
    registry: EngineRegistry | None = None,
    machine: Machine | None = None,
    **aliases: Unpack[PolicyAliases],
) -> Artifact:
    """Compile a model once, into a folder that `InferenceSession` starts from without the slow part.

    Parameters but these are those of `InferenceSession`.

    Parameters
    ----------
    output : str or path
        The folder to make, by custom ``model.xrt``. It appears whole or not at all.
    overwrite : bool
        Replace an artifact that is there. Nothing else is replaced: no other folder, and none in which lie files that
        are not of the artifact, or the model.

    Returns
    -------
    Artifact
        ``artifact.folder`` and ``artifact.manifest``, which says what it is tied to.

    Raises
    ------
    InputError
        The folder is there already, or is no artifact that may be replaced.
    UnsupportedOperationError
        No engine that the policy allows compiles, or none for this device; every candidate and its reason is named.
    EngineError
        The compilation failed, or the result is out of tolerance on a probe input.
    XpuRuntimeError
        As `InferenceSession`; or the folder cannot be written.

    Notes
    -----
    Where the device is on this machine, the result is loaded once, and compared with fp32 on the CPU where an accuracy
    is due. An engine that compiles ahead of time does so for a device that is not here; the probe input then travels
    in the artifact, and is run where it is loaded.

    Examples
    --------
    >>> import tempfile, xpuruntime as xrt
    >>> folder = tempfile.mkdtemp()
    >>> artifact = xrt.compile_model(xrt.demo_model_path(), f"{folder}/digits.xrt", device="cpu")
    >>> with xrt.InferenceSession(artifact.folder) as session:
    ...     session.plan.candidate
    'onnxruntime@cpu'
    """
    check_types({"overwrite": FLAG}, {"overwrite": overwrite})
    path = user_path(output, "the artifact")
    engines = known_engines(registry)
    arguments = SessionArguments(policy, device, engine, precision, lock, frozen).with_aliases(aliases, "compile_model")
    planned = plan_session(model, arguments, engines, machine, calibration=calibration, purpose="compile")
    plan = planned.plan
    warn_of(plan)
    wanted = planned.request.on(plan.device, planned.policy)
    recipe = Recipe(engines.get(plan.engine), wanted, planned.judgement, planned.machine)
    return build(recipe, path, existing="replace" if overwrite else "refuse")[0]


def save_compiled(recipe: Recipe, output: str | os.PathLike[str], *, overwrite: bool) -> Artifact:
    """Write the artifact of an open session; see `InferenceSession.save_compiled`."""
    check_types({"overwrite": FLAG}, {"overwrite": overwrite})
    path = user_path(output, "the artifact")
    if recipe.request.artifact is not None:
        return copy_artifact(recipe.request.artifact, path, overwrite=overwrite)
    return build(recipe, path, existing="replace" if overwrite else "refuse")[0]
