# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`LoadedModel`: a model loaded by one engine, with its bindings and what an instrumented run of it observes."""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import msgspec

from xpuruntime.engines.binding import Binding
from xpuruntime.engines.input_binding import check_call, chosen_outputs
from xpuruntime.errors import XpuRuntimeError
from xpuruntime.runtime.session_registry import instrumented_method, keep_in_child
from xpuruntime.runtime.telemetry import log_refusal

if TYPE_CHECKING:
    from concurrent.futures import Future

    from xpuruntime.engines.host_model import HostRunner
    from xpuruntime.engines.run_threads import QueueLimits, RunThreads
    from xpuruntime.evidence.kernel_records import KernelDecision
    from xpuruntime.evidence.memory_over_time import LiveBytes
    from xpuruntime.evidence.records import Boundary, Conversion, KeySeen, Timeline, Unit

__all__ = ["Binding", "LoadedModel", "Observed", "closed"]


def closed(*_: Any, **__: Any) -> NoReturn:
    """Refuse a call: what stands in for `run` after `close`."""
    msg = "this session is closed; open a new InferenceSession"
    raise XpuRuntimeError(msg)


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What an instrumented run saw, before it is compared with the request."""

    units: tuple[Unit, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    effective: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    partial: bool = False
    keys: dict[str, KeySeen] = {}
    run_us: tuple[float, ...] = ()
    units_us: tuple[float, ...] = ()
    outside_us: dict[str, float] = {}
    cut_us: float = 0.0
    decisions: tuple[KernelDecision, ...] = ()
    live: tuple[LiveBytes, ...] = ()
    timeline: Timeline | None = None


_THREADS = 4


class _Closed:
    """The threads of a model that was closed before it ran asynchronously."""

    closed = True

    def close(self) -> None:
        """Do nothing: there are no threads."""

    def submit(self, *_: Any, **__: Any) -> NoReturn:
        closed()


class LoadedModel(ABC):
    """A model loaded by one engine, ready to run. Safe to call from many threads."""

    _threads: RunThreads | _Closed | None = None
    #: Whether this is a child of the process that loaded the model: threads of the engine are missing, and the native
    #: model is never ended.
    forked: bool = False

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Make a model that children of this process keep."""
        new = super().__new__(cls)
        keep_in_child(new)
        return new

    @abstractmethod
    def run(self, feeds: Mapping[str, Any], stream: Any = None) -> dict[str, Any]:
        """Return output name to array of the caller's own kind; see `InferenceSession`."""

    def checked_run(
        self, feeds: Any = None, stream: Any = None, outputs: Sequence[str] | None = None, **other: Any
    ) -> dict[str, Any]:
        """Run as a session is called: with a choice of outputs, and calls of ONNX Runtime's form refused."""
        try:
            check_call(feeds, other)
            results = self.run(feeds, stream)
            return results if outputs is None else _select(results, chosen_outputs(outputs, list(results)))
        except XpuRuntimeError as error:
            log_refusal("run", error)
            raise

    def runner(self) -> Callable[..., dict[str, Any]]:
        """Return the hot path: `checked_run`, as short as the engine can make it. It keeps the model alive."""
        return self.checked_run

    def host_runner(self) -> HostRunner | None:
        """Return what runs arrays of the host for a server, or ``None`` where `run` does it as well."""
        return None

    def run_async(
        self,
        feeds: Mapping[str, Any],
        stream: Any = None,
        *,
        limits: QueueLimits | None = None,
        outputs: Sequence[str] | None = None,
    ) -> Future[dict[str, Any]]:
        """Start a run and return at once; see `InferenceSession.run_async`. `outputs` are some of the model's.

        By default, `run` is called by a few threads of the model. Arrays on a device are run by the calling thread, and
        the future is done at once: there `run` only queues the work, in the order of the caller's stream.
        """
        run = instrumented_method(self, "run")
        if outputs is not None:
            run = functools.partial(_run_selected, run, outputs)
        if stream is not None or _on_device(feeds):
            from xpuruntime.engines.run_threads import InterruptibleFuture

            done: Future[dict[str, Any]] = InterruptibleFuture()
            done.set_running_or_notify_cancel()
            try:
                done.set_result(run(feeds, stream))
            except Exception as error:
                if self._threads is not None and self._threads.closed:
                    closed()
                done.set_exception(error)
            return done
        threads = self.run_threads(max(1, min(_THREADS, os.cpu_count() or 1)))
        arrays = dict(feeds) if hasattr(feeds, "keys") else feeds
        return threads.submit(run, arrays, limits=limits)

    def run_threads(self, count: int) -> RunThreads | _Closed:
        """Return the threads that run this model asynchronously; the first call says how many, at most."""
        from xpuruntime.engines.run_threads import RunThreads

        threads = self._threads
        return self.__dict__.setdefault("_threads", RunThreads(count)) if threads is None else threads

    def stop_async(self) -> None:
        """Cancel the asynchronous runs that have not begun, and wait for those that have. Called before `close`."""
        self.__dict__.setdefault("_threads", _Closed()).close()  # where there are none yet, none are made any more

    @abstractmethod
    def bind(self, inputs: Mapping[str, Any] | None, outputs: Mapping[str, Any] | None, stream: Any = None) -> Binding:
        """Fix the buffers; see `InferenceSession.bind`. On the CPU a `stream` is refused."""

    @abstractmethod
    def observe(self, feeds: Mapping[str, Any], runs: int) -> Observed:
        """Run an instrumented copy of the model `runs` times and report what ran. Slow; never on the hot path.

        Call `xpuruntime.evidence.documents.checkpoint` when the copy is loaded, after its cold run and after its
        counted runs: the report then shows the memory that was held at each.
        """

    def intermediates(self, feeds: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any] | None:
        """Run once and return tensors inside of the model by name; see `InferenceSession.intermediates`.

        ``None``, the default, where they can only be had by loading the model with more outputs.
        """
        del feeds, names
        return None

    def whole_batch(self, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return inputs as the engine itself gets them: padded where the policy states ``execution.static_batch``."""
        return feeds

    @abstractmethod
    def conversions(self) -> Sequence[Conversion]:
        """Return what was converted or copied so far, each with a count."""

    def memory(self) -> dict[str, int]:
        """Return bytes held by owner, such as ``{"weights": ..., "pool": ...}``, as far as the engine reports it."""
        return {}

    def release_idle(self) -> None:
        """Have the next run give back what the engine keeps of memory between runs, where it can."""
        return

    def graph_refusal(self) -> str | None:
        """Return why the engine loaded the model without CUDA graphs although the policy prefers one, or ``None``."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent; running afterwards raises. Called in a thread of its own."""

    def restore_thread(self) -> None:
        """Undo, after `close`, what opening the model changed in the calling thread alone. Nothing by default."""
        return


def _run_selected(run: Callable[..., dict[str, Any]], outputs: Sequence[str], *arguments: Any) -> dict[str, Any]:
    return _select(run(*arguments), outputs)


def _select(results: dict[str, Any], outputs: Sequence[str]) -> dict[str, Any]:
    return {name: results[name] for name in outputs}


def _on_device(feeds: Mapping[str, Any]) -> bool:
    if not hasattr(feeds, "values"):
        return False
    try:
        return any(
            hasattr(feed, "__dlpack_device__") and int(feed.__dlpack_device__()[0]) not in _HOST
            for feed in feeds.values()
        )
    except Exception:  # of the caller's own class: `run` says what is wrong with it
        return False


#: DLPack's numbers of memory that the CPU reads: its own, and pinned memory of CUDA and ROCm.
_HOST = (1, 3, 11)
