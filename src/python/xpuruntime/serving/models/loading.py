# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Loading of a model: its versions on disk, its session, its warm-up, limits for a latency, and memory budgets."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from xpuruntime.artifacts.manifest import made_files
from xpuruntime.engines.model.file import refuse_missing
from xpuruntime.errors import InputError, LockError, ModelError, PolicyError
from xpuruntime.files.paths import reason_of
from xpuruntime.inference.calls import time_batches
from xpuruntime.inference.session import InferenceSession
from xpuruntime.policies import Policy
from xpuruntime.printable import bytes_text
from xpuruntime.runtime.telemetry import traced
from xpuruntime.serving.batching.settings import batch_sizes
from xpuruntime.serving.messages import ServingError, Status

if TYPE_CHECKING:
    from xpuruntime.engines.host_model import HostRunner
    from xpuruntime.engines.registry import EngineRegistry
    from xpuruntime.lockfile.measured import BatchTime
    from xpuruntime.lockfile.records import Lock
    from xpuruntime.serving.batching.layout import Layout
    from xpuruntime.serving.batching.settings import BatchSettings
    from xpuruntime.serving.models.model_settings import ModelSettings
    from xpuruntime.serving.models.settings import MemorySettings

_MODELS = (".onnx", ".pt2")
_VERSION = re.compile(r"[1-9][0-9]{0,17}")


def find_versions(source: str, wanted: str | tuple[int, ...]) -> dict[int, str]:
    """Return the versions of a model to serve, each with the path that a session is opened with."""
    path = Path(source)
    path_by_version = {1: path} if path.is_file() or made_files(path) is not None else _versions(path)
    if wanted == "latest":
        chosen = [max(path_by_version)]
    elif wanted == "all":
        chosen = sorted(path_by_version)
    else:
        chosen = [int(version) for version in wanted]
    missing = [version for version in chosen if version not in path_by_version]
    if missing:
        raise InputError(
            f"{source} has no version {missing[0]}; it has {', '.join(map(str, sorted(path_by_version)))}",
            fix="state one of these in versions, or latest",
        )
    if path_by_version.get(1) == path:
        return {1: source}
    return {version: str(_model_in(path_by_version[version])) for version in chosen}


def _versions(folder: Path) -> dict[int, Path]:
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        raise refuse_missing(str(folder)) from None
    except OSError as error:
        raise ModelError(
            f"{folder} cannot be read: {reason_of(error)}", fix="give a model file, or a folder that this user may read"
        ) from None
    versions = {int(name): folder / name for name in names if _VERSION.fullmatch(name)}
    if not versions:
        raise ModelError(
            f"{folder} is neither a compiled artifact nor a folder of versions. Fix: put each version into a folder "
            "1, 2, ... of it"
        )
    return versions


def _model_in(folder: Path) -> Path:
    if made_files(folder) is not None:
        return folder
    inside = sorted(folder.iterdir())
    models = [file for file in inside if file.suffix in _MODELS and file.is_file()]
    models += [subfolder for subfolder in inside if subfolder.is_dir() and made_files(subfolder) is not None]
    if len(models) != 1:
        names = f"several: {', '.join(model.name for model in models)}" if models else "none"
        raise ModelError(
            f"{folder} must hold one model ({', '.join(_MODELS)}, or a compiled artifact), and holds {names}. "
            "Fix: keep one"
        )
    return models[0]


def size_on_disk(path: str) -> int:
    """Return the bytes of a model file, without weights in other files, or of all files of an artifact."""
    model_path = Path(path)
    if model_path.is_dir():
        return sum(file.stat().st_size for file in model_path.rglob("*") if file.is_file())
    return model_path.stat().st_size


def _facts_of(session: InferenceSession) -> dict[str, Any]:
    return {"engine": session.plan.engine, "device": session.plan.device}


@traced("open", _facts_of)
def open_session(
    path: str, settings: ModelSettings, registry: EngineRegistry | None = None, device: str | None = None
) -> InferenceSession:
    """Open a model under the policy and the lock of its settings.

    Under ``shapes: fixed`` the session has ``execution.static_batch``, whose check that rows do not depend on each
    other it passes, or does not open.
    """
    rows = settings.batching.max_batch_size if settings.batching.shapes == "fixed" else None
    options: dict[str, Any] = {"device": device or settings.device, "trust": settings.trust, "registry": registry}
    if settings.lock is not None:
        session = InferenceSession(path, policy=settings.policy, lock=settings.lock, **options)
    elif rows is None:
        session = InferenceSession(path, policy=settings.policy, **options)
    else:
        session = InferenceSession(path, policy=_with_rows(path, settings, rows), **options)
    static_batch = session.policy.execution.static_batch
    if rows is not None and static_batch != rows:
        session.close()
        of = f"the lock {settings.lock}" if settings.lock is not None else f"the artifact {path}"
        raise PolicyError(
            f"batching.shapes: 'fixed' runs {rows} rows, and {of} was made with execution.static_batch: "
            f"{static_batch}. "
            f"Fix: make it again under a policy with execution.static_batch: {rows}"
        )
    return session


def _with_rows(path: str, settings: ModelSettings, rows: int) -> Policy | None:
    """Return the policy that holds, with a static batch; ``None`` for an artifact, whose own policy holds."""
    from xpuruntime.artifacts.manifest import find_artifact
    from xpuruntime.engines.registry import read_model
    from xpuruntime.inference.session_arguments import carried_policy

    if settings.policy is not None:
        policy: Policy | None = Policy.load(settings.policy)
    elif find_artifact(path) is not None:
        return None
    else:
        policy, _ = carried_policy(read_model(path, trust=settings.trust))
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
        input_.name: np.full(probe_shape(input_), "0", object)
        for input_ in session.model.inputs
        if input_.dtype == "string"
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


class Limits(NamedTuple):
    """What was chosen, and of what."""

    p99: float
    met: bool
    max_batch_size: int
    max_queue_delay_us: int
    curve: tuple[BatchTime, ...]
    source: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "p99_us": round(self.p99 * 1e6),
            "met": self.met,
            "max_batch_size": self.max_batch_size,
            "max_queue_delay_us": self.max_queue_delay_us,
            "rule": "delay + 2 x the longest execution of the batch size <= p99; delay <= the median execution",
            "source": self.source,
            "curve": [
                {
                    "batch_size": point.rows,
                    "median_us": round(point.median_us),
                    "longest_us": round(point.longest_us),
                    "runs": point.runs,
                }
                for point in self.curve
            ],
        }


def measure_curve(
    session: InferenceSession, layout: Layout, batching: BatchSettings, runner: HostRunner
) -> tuple[BatchTime, ...]:
    """Return times of executions by batch size, in the largest sizes of padded inputs."""
    *_, sizes = warmup_sizes(layout)
    most = max(batching.max_batch_size, 1)
    rows = (most,) if batching.shapes == "fixed" else batch_sizes(most)
    return time_batches(runner, lambda point: batch_feeds(session, layout, point, sizes), rows)


def locked_curve(lock: Lock | None, layout: Layout, batching: BatchSettings) -> tuple[BatchTime, ...] | str:
    """Return the times that a lock has of executions as this model is served, or why it has none."""
    if lock is None:
        return "the model has no lock"
    times = lock.measured.batches
    if not times:
        return "the lock has no times of batches"
    most = max(batching.max_batch_size, 1)
    shapes = lock.identity.shapes[0].inputs
    for name, info in layout.inputs.items():
        if info.padding is not None and info.padding.sizes:
            largest, size = max(info.padding.sizes), shapes[name][info.padding.axis] if name in shapes else 0
            if size < largest:
                return f"the lock has times of {name!r} with {size} elements, and it is padded to {largest}"
    if batching.shapes == "fixed":
        curve = tuple(time for time in times if time.rows == most)
        return curve or f"the lock has no times of {most} rows, which every execution has"
    return tuple(time for time in times if time.rows <= most) or f"the lock has no times of {most} rows or fewer"


def curve_of(
    session: InferenceSession, layout: Layout, settings: ModelSettings, runner: HostRunner, path: str
) -> tuple[tuple[BatchTime, ...], str]:
    """Return times by batch size, and where they are from: the lock, or this process."""
    assert settings.slo is not None
    lock = session.lock
    if settings.slo.curve != "load":
        curve = locked_curve(lock, layout, settings.batching)
        if not isinstance(curve, str):
            assert lock is not None
            provenance = lock.provenance
            return (
                curve,
                f"lock {lock.digest}, made {provenance.created or 'at an unknown time'} by {provenance.command or '?'}",
            )
        if settings.slo.curve == "lock":
            most = max(settings.batching.max_batch_size, 1)
            sizes = (most,) if settings.batching.shapes == "fixed" else batch_sizes(most)
            raise LockError(
                f"slo.curve: 'lock', but {curve}. Fix: xrt lock {path or 'MODEL'} -o {settings.lock or 'LOCK'} "
                f"--batches {','.join(map(str, sizes))}, or state curve: load"
            )
    return measure_curve(session, layout, settings.batching, runner), "measured when the model was loaded"


def choose_limits(curve: Sequence[BatchTime], p99: float, source: str = "") -> Limits:
    """Choose the largest batch whose requests stay within a latency, and the delay that is left.

    A request may arrive just after an execution has begun, so it waits for that one, for the delay, and for its own:
    the delay and twice the longest execution must fit. Waiting longer than an execution gains nothing, since what
    arrives during one is put together anyway.
    """
    p99_us = 1e6 * p99
    fitting = [point for point in curve if 2 * point.longest_us <= p99_us]
    if not fitting:
        least = min(curve, key=lambda point: point.rows)
        return Limits(p99, False, least.rows, 0, tuple(curve), source)
    best = max(fitting, key=lambda point: point.rows)
    delay_us = max(0.0, min(best.median_us, p99_us - 2 * best.longest_us))
    return Limits(p99, True, best.rows, int(delay_us) if best.rows > 1 else 0, tuple(curve), source)


class Evictable(Protocol):
    """What takes memory."""

    name: str
    last_used: float

    def try_evict(self) -> bool:
        """Unload it if nobody uses it; return whether it is unloaded."""
        ...


class MemoryBudget:
    """Memory of all models of a server, by device. Safe to call from many threads.

    Sizes are those that were measured when a model was loaded; before that, of its file.
    """

    def __init__(self, settings: MemorySettings) -> None:
        self._settings = settings
        self._lock = threading.RLock()
        self._held: dict[Evictable, tuple[str, int]] = {}
        #: Models that were evicted so far.
        self.evictions = 0

    @property
    def limits(self) -> dict[str, int]:
        """Most bytes by device."""
        return dict(self._settings.budget)

    @property
    def limited(self) -> bool:
        """Whether a device has a limit."""
        return bool(self._settings.budget)

    def used(self) -> dict[str, int]:
        """Return bytes by device."""
        with self._lock:
            usage = dict.fromkeys(self._settings.budget, 0)
            for device, size in self._held.values():
                usage[device] = usage.get(device, 0) + size
            return usage

    def hold(self, model: Evictable, device: str, size: int) -> None:
        """Take memory for a model, and evict others where there is not enough; a model that had some has this now."""
        with self._lock:
            before = self._held.pop(model, None)
            limit = self._settings.budget.get(device)
            while limit is not None and self._used(device) + size > limit:
                if self._permanent(device) + size > limit or not self._evict_one(device):
                    refusal = self._refusal(model, device, size, limit)
                    if before is not None:
                        self._held[model] = before
                    raise refusal
            self._held[model] = (device, size)

    def release(self, model: Evictable) -> None:
        """Give back what a model has."""
        with self._lock:
            self._held.pop(model, None)

    def _used(self, device: str) -> int:
        return sum(size for where, size in self._held.values() if where == device)

    def _may_go(self, model: Evictable) -> bool:
        return self._settings.evict != "none" and model.name not in self._settings.keep

    def _permanent(self, device: str) -> int:
        return sum(size for held, (where, size) in self._held.items() if where == device and not self._may_go(held))

    def _evict_one(self, device: str) -> bool:
        candidates = [held for held, (where, _) in self._held.items() if where == device and self._may_go(held)]
        for held in sorted(candidates, key=lambda candidate: candidate.last_used):
            if held.try_evict():
                self._held.pop(held, None)
                self.evictions += 1
                return True
        return False

    def _refusal(self, model: Evictable, device: str, size: int, limit: int) -> ServingError:
        others = [
            f"{slot.name} {bytes_text(held)}{' (kept)' if slot.name in self._settings.keep else ''}"
            for slot, (where, held) in self._held.items()
            if where == device
        ]
        return ServingError(
            Status.RESOURCE_EXHAUSTED,
            f"model {model.name!r} takes {bytes_text(size)} on {device}, whose budget is {bytes_text(limit)} "
            f"({limit} bytes), and no other model can go now: {', '.join(others) or 'there is none'}. "
            "Fix: raise memory.budget, or serve fewer models",
            retry_after=1.0,
        )
