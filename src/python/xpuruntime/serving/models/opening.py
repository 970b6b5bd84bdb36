# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Opening the session of a served model, and the inputs that it is warmed up with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.errors import PolicyError
from xpuruntime.inference.session import InferenceSession
from xpuruntime.policies import Policy

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from xpuruntime.engines.registry import EngineRegistry
    from xpuruntime.lockfile.records import Lock
    from xpuruntime.serving.batching.layout import Layout
    from xpuruntime.serving.models.model_settings import ModelSettings

__all__ = ["batch_feeds", "locked_size", "open_session", "warmup_sizes"]


def open_session(path: str, settings: ModelSettings, registry: EngineRegistry | None = None) -> InferenceSession:
    """Open a model under the policy and the lock of its settings.

    Under ``shapes: fixed`` the session has ``execution.static_batch``, whose check that rows do not depend on each
    other it passes, or does not open.

    Raises
    ------
    LockError
        The lock does not hold.
    PolicyError
        ``shapes: fixed``, and the lock or artifact is of another batch size.
    XpuRuntimeError
        As `InferenceSession`.
    """
    rows = settings.batching.max_batch_size if settings.batching.shapes == "fixed" else None
    given: dict[str, Any] = {"device": settings.device, "trust": settings.trust, "registry": registry}
    if settings.lock is not None:
        session = InferenceSession(path, policy=settings.policy, lock=settings.lock, **given)
    elif rows is None:
        session = InferenceSession(path, policy=settings.policy, **given)
    else:
        session = InferenceSession(path, policy=_with_rows(path, settings, rows), **given)
    found = session.policy.execution.static_batch
    if rows is not None and found != rows:
        session.close()
        of = f"the lock {settings.lock}" if settings.lock is not None else f"the artifact {path}"
        raise PolicyError(
            f"batching.shapes: 'fixed' runs {rows} rows, and {of} was made with execution.static_batch: {found}. "
            f"Fix: make it again under a policy with execution.static_batch: {rows}"
        )
    return session


def _with_rows(path: str, settings: ModelSettings, rows: int) -> Policy | None:
    """Return the policy that holds, with a static batch; ``None`` for an artifact, whose own policy holds."""
    from xpuruntime.artifacts.reading import find_artifact
    from xpuruntime.engines.model import read_model
    from xpuruntime.inference.embedded_policy import carried_policy
    from xpuruntime.inference.session_arguments import SessionArguments

    if settings.policy is not None:
        policy: Policy | None = Policy.load(settings.policy)
    elif find_artifact(path) is not None:
        return None
    else:
        policy = carried_policy(read_model(path, trust=settings.trust), SessionArguments(trust=settings.trust)).policy
    policy = policy or Policy()
    return policy.replace(execution=policy.execution.replace(static_batch=rows))


def locked_size(lock: Lock | None, device: str, settings: ModelSettings) -> int:
    """Return the bytes that a lock has of a session on a device with batches of at least this size; 0: it has none."""
    memory = None if lock is None else lock.measured.memory
    if memory is None or memory.device != device or memory.rows < max(settings.batching.max_batch_size, 1):
        return 0
    return memory.bytes


def warmup_sizes(layout: Layout) -> Iterator[dict[str, int]]:
    """Yield the sizes of padded inputs that executions can have, as the rules state them; one empty one without."""
    steps = max((len(info.padding.sizes) for info in layout.inputs.values() if info.padding is not None), default=0)
    for step in range(max(steps, 1)):
        yield {
            name: info.padding.sizes[min(step, len(info.padding.sizes) - 1)]
            for name, info in layout.inputs.items()
            if info.padding is not None and info.padding.sizes
        }


def batch_feeds(
    session: InferenceSession, layout: Layout, rows: int, sizes: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Return probe inputs of a batch size, with padded inputs in given sizes. Strings are ``"0"``."""
    from xpuruntime.engines.cuda_arrays import host_copies
    from xpuruntime.engines.precision import probe_feeds
    from xpuruntime.engines.precision.probe import probe_shape

    strings = {
        one.name: np.full(probe_shape(one), "0", object) for one in session.model.inputs if one.dtype == "string"
    }
    feeds = {}
    for name, array in host_copies(probe_feeds(session.model, overrides=strings)).items():
        info = layout.inputs[name]
        if info.batch is not None:
            array = np.take(array, np.arange(rows) % array.shape[info.batch], axis=info.batch)
        if info.padding is not None and sizes and name in sizes:
            axis = info.padding.axis
            array = np.take(array, np.arange(sizes[name]) % array.shape[axis], axis=axis)
        feeds[name] = np.asarray(array, order="C")
    return feeds
