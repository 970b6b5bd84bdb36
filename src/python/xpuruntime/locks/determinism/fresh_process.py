# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Runs of a session in a fresh process, which has another hash seed and another environment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.locks.worker_side.xrt_session_worker import read_arrays, write_arrays
from xpuruntime.runtime.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.inference import InferenceSession

    Array = np.ndarray[Any, Any]

__all__ = ["fresh_job", "run_fresh", "run_job", "why_not_fresh"]

#: A variable of no meaning, whose length moves the stack of the process.
_PADDING = "XPURUNTIME_RESTART_PADDING"
#: Seconds that one process may take.
_LIMIT = 1800.0


def why_not_fresh(session: InferenceSession) -> str | None:
    """Return why a session cannot be opened in a fresh process, or ``None``."""
    from xpuruntime.engines.registry import default_registry

    engine = session._engine
    if session.model.source is not None and not Path(session.model.file).exists():
        return "the model is a module of this process; export it to a file to test a restart"
    known = default_registry()
    if engine.name not in known or type(known.get(engine.name)) is not type(engine):
        return f"the engine {engine.name} is known to this process alone; install it as a plugin"
    return None


def fresh_job(session: InferenceSession, folder: Path, *, trust: bool) -> dict[str, Any]:
    """Return what opens the same session in a fresh process; its calibration is written into `folder`."""
    artifact = session._artifact
    execution = session.policy.execution.replace(
        engine=session.plan.engine, device=session.plan.device, fallback="error"
    )
    calibration = None
    if session._request.calibration is not None:
        samples = folder / "calibration"
        samples.mkdir()
        for index, sample in enumerate(session._request.calibration):
            np.savez(samples / f"{index:08}.npz", **sample)
        calibration = str(samples)
    stated = artifact is not None and session.policy.execution.artifacts.cache == "off"
    return {
        "model": str(artifact.folder if stated and artifact is not None else session.model.file),
        "policy": session.policy.replace(execution=execution).to_dict(),
        "trust": trust,
        "calibration": calibration,
    }


def run_fresh(job: Mapping[str, Any], feeds: Mapping[str, Array], number: int, folder: Path) -> dict[str, Array]:
    """Open the session in a fresh process and run it."""
    write_arrays(folder / "inputs", feeds)
    environment = {"PYTHONHASHSEED": str(number), _PADDING: "x" * (1021 * number)}
    with Worker(environment=environment, timeout=_LIMIT) as worker:
        worker.call(f"{__name__}:run_job", folder=str(folder), **job)
    return read_arrays(folder / "outputs")


def run_job(
    folder: str, model: str, policy: dict[str, Any], names: list[str], calibration: str | None, *, trust: bool
) -> None:
    """Run a session on the inputs in a folder, and write its outputs there: what the fresh process does."""
    import warnings

    from xpuruntime.errors import XpuRuntimeWarning
    from xpuruntime.inference import InferenceSession

    room = Path(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", XpuRuntimeWarning)
        with InferenceSession(model, policy=policy, trust=trust, calibration=calibration) as session:
            feeds = read_arrays(room / "inputs")
            outputs = dict(session.run(feeds))
            if names:
                outputs |= session.intermediates(feeds, names)
    write_arrays(room / "outputs", outputs)
