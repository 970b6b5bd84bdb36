# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`ModelSlot`: one name of a server: loading, reloading, unloading and evicting what is served under it."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import PolicyError, XpuRuntimeError
from xpuruntime.inference.plan_request import plan
from xpuruntime.lockfile.canonical import load_lock
from xpuruntime.runtime.interruptible_waits import BackgroundCall, uninterrupted
from xpuruntime.serving.batching.requests import answer, fail
from xpuruntime.serving.messages import InferResponse, ServingError, Status, without_folders
from xpuruntime.serving.models.loading import find_versions, locked_size, size_on_disk
from xpuruntime.serving.models.version import ServedVersion

if TYPE_CHECKING:
    from xpuruntime.engines.registry import EngineRegistry
    from xpuruntime.inference.session import InferenceSession
    from xpuruntime.serving.messages import InferRequest
    from xpuruntime.serving.models.loading import MemoryBudget
    from xpuruntime.serving.models.model_settings import ModelSettings
    from xpuruntime.serving.monitoring.records import RequestLog

#: Seconds after which a deadline is looked at, at the latest.
_TICK = 0.05


class Pending:
    """Requests of a model that is being loaded for them."""

    def __init__(
        self, name: str, limit: int, load: Callable[[], None], infer: Callable[[InferRequest], Future[InferResponse]]
    ) -> None:
        self._name, self._limit, self._load, self._infer = name, limit, load, infer
        self._lock = threading.Lock()
        self._waiting: list[tuple[InferRequest, Future[InferResponse]]] = []
        self._loading = self._closed = False

    def add(self, request: InferRequest) -> Future[InferResponse]:
        """Take a request, and load the model unless that goes on already."""
        future: Future[InferResponse] = Future()
        with self._lock:
            if self._closed:
                raise stopping()
            self._waiting = [waiter for waiter in self._waiting if not waiter[1].done()]
            if self._limit and len(self._waiting) >= self._limit:
                raise ServingError(
                    Status.RESOURCE_EXHAUSTED,
                    f"model {self._name!r} is being loaded, and {self._limit} requests wait for it already. Fix: retry",
                    retry_after=1.0,
                )
            self._waiting.append((request, future))
        self.wake()
        return future

    def wake(self) -> None:
        """Load the model unless that goes on already. Returns at once."""
        with self._lock:
            if self._loading or self._closed:
                return
            self._loading = True
        threading.Thread(target=self._work, name=f"xpuruntime-load-{self._name}", daemon=True).start()
        threading.Thread(target=self._expire, name=f"xpuruntime-load-{self._name}-timer", daemon=True).start()

    def close(self) -> None:
        """Fail what waits."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            fail(future, stopping())

    def _work(self) -> None:
        error: Exception | None = None
        try:
            self._load()
        except Exception as failure:  # whatever it was, those who wait get an answer
            error = ServingError(Status.UNAVAILABLE, str(failure), retry_after=getattr(failure, "retry_after", None))
        with self._lock:
            self._loading = False
            waiting, self._waiting = self._waiting, []
        for request, future in waiting:
            if error is not None:
                fail(future, error)
            else:
                _hand_over(self._infer, request, future)

    def _expire(self) -> None:
        while True:
            time.sleep(_TICK)
            now = time.monotonic()
            with self._lock:
                if not self._loading:
                    return
                late = [request for request in self._waiting if _is_late(request[0], now)]
                self._waiting = [request for request in self._waiting if not _is_late(request[0], now)]
            for _, future in late:
                fail(future, _late_error(self._name))


def stopping() -> ServingError:
    """Return the error of requests that reach a server while it stops."""
    return ServingError(Status.UNAVAILABLE, "the server is being stopped. Fix: ask another one")


def _is_late(request: InferRequest, now: float) -> bool:
    return request.deadline is not None and request.deadline <= now


def _late_error(name: str) -> ServingError:
    return ServingError(
        Status.DEADLINE_EXCEEDED,
        f"model {name!r}: the deadline passed while it was being loaded. Fix: allow more time, or load it at startup",
    )


def _hand_over(
    infer: Callable[[InferRequest], Future[InferResponse]], request: InferRequest, future: Future[InferResponse]
) -> None:
    if future.done():
        return
    try:
        inner = infer(request)
    except Exception as error:
        fail(future, error)
        return

    def forward(done: Future[InferResponse]) -> None:
        if done.cancelled():
            future.cancel()
        elif (error := done.exception()) is not None:
            fail(future, error)
        else:
            answer(future, done.result())

    future.add_done_callback(lambda outer: inner.cancel() if outer.cancelled() else None)
    inner.add_done_callback(forward)


#: Seconds that unloading waits for the answers of a model beyond its longest execution.
_GRACE = 5.0
#: Seconds after a failed load in which no request starts another one.
_PAUSE = 5.0


class ModelSlot:
    """What is served under one name."""

    def __init__(
        self,
        name: str,
        settings: ModelSettings,
        budget: MemoryBudget,
        *,
        session: InferenceSession | None = None,
        registry: EngineRegistry | None,
        log: RequestLog | None,
        changed: Callable[[], None],
        infer: Callable[[InferRequest], Future[InferResponse]],
    ) -> None:
        self.name, self.settings = name, settings
        #: The versions that are served, by the name in a request, newest first; "" is the newest. Replaced as a whole.
        self.served: Mapping[str, ServedVersion] = {}
        self.last_used = time.monotonic()
        self._budget, self._session, self._registry, self._log = budget, session, registry, log
        self._changed = changed
        self._changing = threading.RLock()
        self._asleep = settings.load == "on_demand"
        #: Whether it was unloaded on purpose, so that nobody waits for it.
        self.withdrawn = False
        self._state, self._reason = ("UNAVAILABLE" if self._asleep else "LOADING"), "it is not loaded yet"
        #: Why the last load failed, as it was raised below; ``None`` after one that did not.
        self.failure: BaseException | None = None
        self._failed_at: float | None = None
        self._closed = False
        self._sizes: dict[int, int] = {}
        self._pending = Pending(name, settings.batching.max_queue_size, self._load_once, infer)

    @property
    def loaded(self) -> tuple[ServedVersion, ...]:
        """The versions that are served, newest first."""
        return tuple(version for name, version in self.served.items() if name)

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that are served, oldest first."""
        return tuple(sorted(version.version for version in self.loaded))

    def wait(self, request: InferRequest) -> Future[InferResponse] | None:
        """Queue a request, for which nothing is served, behind the load that it begins; ``None`` where it can go on.

        Raises ServingError where nothing will be served either, or the version that it names is not.
        """
        if not self.served and self._may_wake():
            return self._pending.add(request)
        self.version(request.version)
        return None

    def version(self, version: str = "") -> ServedVersion:
        """Return a version that is served, the newest where none is named."""
        served = self.served
        if not served:
            if self._may_wake():
                self._pending.wake()
            raise self.unavailable()
        if version not in served:
            raise ServingError(
                Status.NOT_FOUND,
                f"model {self.name!r} has no version {version[:32]!r}; it has {', '.join(map(str, self.versions))}. "
                "Fix: ask for one of them, or for none",
            )
        return served[version]

    def ready(self, version: str = "") -> tuple[bool, str]:
        """Return whether the model makes progress, else why not."""
        loaded = self.loaded
        if not loaded:
            if self._asleep and self._failed_at is None and not self._closed:
                return True, ""  # the next request loads it
            return False, f"model {self.name!r}: {self._reason}"
        chosen = (self.version(version),) if version else loaded
        for served in chosen:
            good, reason = served.progress()
            if not good:
                return False, reason
        return True, ""

    def index(self) -> list[dict[str, Any]]:
        """Return ``name``, ``version``, ``state``, ``reason`` of each version."""
        loaded = self.loaded
        if loaded:
            return [
                {"name": self.name, "version": str(served.version), "state": "READY", "reason": ""}
                for served in sorted(loaded, key=lambda version: version.version)
            ]
        return [{"name": self.name, "version": "", "state": self._state, "reason": self._reason}]

    def try_load(self) -> bool:
        """Load the model; return whether it is served. Why not is in `index`."""
        try:
            self.load()
        except ServingError:
            return False
        return True

    def load(self) -> None:
        """Load or reload the model. Slow."""
        new: list[ServedVersion] = []
        with self._changing:
            try:
                self._load(new)
            except BaseException:
                uninterrupted(self._drop_unused, new)
                raise

    def _load(self, new: list[ServedVersion]) -> None:
        old = self.loaded
        if self._session is not None and old:
            raise ServingError(
                Status.UNIMPLEMENTED,
                f"model {self.name!r} was given as an open session, which is not reloaded. Fix: serve its file",
            )
        if not old:
            self._state, self._reason = "LOADING", "it is being loaded"
        try:
            self._open(new)
        except Exception as error:  # an engine may raise anything
            failed = self._failed(error, old)
            cause = error.__cause__ if isinstance(error, ServingError) else error
            self.failure = failed if cause is None else cause
            raise failed from cause
        del old
        uninterrupted(self._exchange, new).result()
        self._changed()

    def _exchange(self, new: list[ServedVersion]) -> BackgroundCall[None]:
        old = self.loaded
        self._failed_at, self._closed, self._asleep, self.withdrawn = None, False, False, False
        self.failure = None
        newest_first = sorted(new, key=lambda version: -version.version)
        self.served = {"": newest_first[0], **{str(version.version): version for version in newest_first}}
        self._state, self._reason = "READY", ""
        self.last_used = time.monotonic()
        new.clear()
        return self._retiring(old)

    def _drop_unused(self, versions: Sequence[ServedVersion]) -> None:
        if self._state == "LOADING":
            self._state, self._reason = "UNAVAILABLE", "its loading was interrupted"
        for version in versions:
            if version not in self.loaded:
                version.close()
        if self._session is None:
            self._hold(self.loaded)

    def unload(self) -> None:
        """Refuse new requests, answer those that were accepted, and free the model."""
        BackgroundCall(self._unload, f"xpuruntime-close-{self.name}").result()

    def _unload(self) -> None:
        with self._changing:
            self._asleep, self.withdrawn = False, True
            self._put_away("it was unloaded")
            self._changed()

    def try_evict(self) -> bool:
        """Unload the model if no request is in it, and load it again with the next one; return whether it is out."""
        if not self._changing.acquire(blocking=False):
            return False
        try:
            loaded = self.loaded
            if self._session is not None or any(version.batcher.unanswered for version in loaded):
                return False
            self._asleep = True
            self._put_away("it was evicted for another model; the next request loads it")
            return True
        finally:
            self._changing.release()

    def close(self, drain: float) -> None:
        """Take no request any more, answer those that were accepted within so many seconds, and release the model."""
        self._closed = True
        self._pending.close()
        with self._changing:
            self._asleep = False
            self._put_away("the server is being stopped", drain)

    def _open(self, opened_versions: list[ServedVersion]) -> None:
        settings = self.settings
        if self._session is not None:
            opened_versions.append(ServedVersion(self.name, 1, "", settings, session=self._session, log=self._log))
            opened_versions[-1].start()
            return
        paths = find_versions(settings.source, settings.versions)
        device = self._reserve(paths)
        for version, path in paths.items():
            opened_versions.append(
                ServedVersion(self.name, version, path, settings, registry=self._registry, log=self._log, device=device)
            )
            opened_versions[-1].start()
            self._sizes[version] = opened_versions[-1].memory["bytes"]
        self._hold(opened_versions)

    def _hold(self, loaded: Sequence[ServedVersion]) -> None:
        if loaded:
            self._budget.hold(self, loaded[0].device, sum(version.memory["bytes"] for version in loaded))
        else:
            self._budget.release(self)

    def _reserve(self, paths: dict[int, str]) -> str | None:
        """Take memory before anything is loaded; beside what is served during a reload. Return on which device."""
        if not self._budget.limited:
            return None
        settings = self.settings
        if settings.devices:
            raise PolicyError(
                f"model {self.name!r} has devices: [{', '.join(settings.devices)}], and memory.budget counts a model "
                "on one device. Fix: leave memory.budget out, or state a model for each device"
            )
        where = plan(
            next(iter(paths.values())),
            policy=settings.policy,
            device=settings.device,
            lock=settings.lock,
            trust=settings.trust,
        )
        locked = locked_size(load_lock(settings.lock), where.device, settings) if settings.lock is not None else 0
        size = sum(self._sizes.get(version) or locked or size_on_disk(path) for version, path in paths.items())
        size += sum(version.memory["bytes"] for version in self.loaded)
        self._budget.hold(self, where.device, size)
        return where.device

    def _failed(self, error: Exception, old: Sequence[ServedVersion]) -> ServingError:
        text = without_folders(str(error) if isinstance(error, XpuRuntimeError) else f"{type(error).__name__}: {error}")
        self._failed_at = time.monotonic()
        if not old:
            self._state, self._reason = "UNAVAILABLE", text
        served = "; the version that was loaded before is served on" if old else ""
        code = error.code if isinstance(error, ServingError) else Status.INVALID_ARGUMENT
        return ServingError(code, f"model {self.name!r} does not load: {text}{served}")

    def _put_away(self, reason: str, drain: float | None = None) -> None:
        uninterrupted(self._withdraw, reason, drain).result()
        self._budget.release(self)
        self._state = "UNAVAILABLE"

    def _withdraw(self, reason: str, drain: float | None) -> BackgroundCall[None]:
        old, self.served = self.loaded, {}
        self._state, self._reason = "UNLOADING", reason
        return self._retiring(old, drain)

    def _retiring(self, old: Sequence[ServedVersion], drain: float | None = None) -> BackgroundCall[None]:
        return BackgroundCall(functools.partial(self._retire, old, drain), f"xpuruntime-close-{self.name}")

    def _retire(self, old: Sequence[ServedVersion], drain: float | None = None) -> None:
        for version in old:
            version.drain(self.settings.max_execution + _GRACE if drain is None else drain)
            version.close()

    def _may_wake(self) -> bool:
        if not self._asleep or self._closed:
            return False
        return self._failed_at is None or time.monotonic() - self._failed_at > _PAUSE

    def _load_once(self) -> None:
        with self._changing:
            if not self.served:
                self.load()

    def unavailable(self) -> ServingError:
        """Return the error of a request while nothing is served."""
        later = self._state == "LOADING" or self._asleep
        return ServingError(
            Status.UNAVAILABLE,
            f"model {self.name!r} is not served: {self._reason or 'it is being exchanged'}",
            retry_after=1.0 if later else None,
        )
