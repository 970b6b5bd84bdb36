# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Measurements`: measurements on one or more devices, recalled from the journal where it has them."""

from __future__ import annotations

import functools
import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from xpuruntime import _core
from xpuruntime.errors import InputError
from xpuruntime.files.paths import json_bytes, reason_of, user_path
from xpuruntime.files.reading import DamagedLineError, journal_line, read_journal_lines
from xpuruntime.measuring.statistics import CandidateCode
from xpuruntime.runtime.interruptible_waits import BackgroundCall, ConditionVariable
from xpuruntime.tuning.trial import CandidateFailed, DeviceLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from xpuruntime.tuning.trial_executors import Executor

__all__ = [
    "SCHEMA",
    "Journal",
    "Measurements",
]

T = TypeVar("T")


class _Stopped(Exception):  # noqa: N818  of threads, whose cause is raised elsewhere
    """Another thread failed, or the user ended the search."""


class Measurements:
    """The executors of a search and its journal: what is in the journal is not measured again."""

    def __init__(
        self,
        journal: Journal,
        executors: Sequence[Executor],
        clock: Callable[[], float],
        cancel: Callable[[], bool] | None = None,
    ) -> None:
        self.clock = clock
        self._journal, self._executors, self._cancel = journal, list(executors), cancel
        self._gone: list[Executor] = []
        #: What was measured once more, and why.
        self.notes: list[str] = []
        self._stopped = False
        self._losing = threading.Lock()

    @property
    def executors(self) -> list[Executor]:
        """The executors whose device is there, in order."""
        return [executor for executor in self._executors if executor not in self._gone]

    @property
    def main_executor(self) -> Executor:
        """The first of them, where everything is measured that is not spread."""
        return self.executors[0]

    @property
    def cancelled(self) -> bool:
        """Whether the search is to end."""
        return self._cancel is not None and self._cancel()

    def due(self, key: str, deadline: float) -> bool:
        """Whether something may be measured: it was before, or there is time left."""
        return self._journal.has(key) or (self.clock() < deadline and not self.cancelled)

    def device(self, key: str) -> str | None:
        """Return the name of the device that something was measured on at last."""
        return self._journal.device(_retry_key(key)) or self._journal.device(key)

    def measure(self, executor: Executor, key: str, measure: Callable[[], Any]) -> Any:
        """Recall a measurement, or make it. One whose device goes away is made once more, on another device."""
        measurement = self._recall_or_measure(executor, key, measure)
        if isinstance(measurement, dict) and measurement.get("another"):
            self.notes.append(f"{measurement['lost']}; {key} was measured once more, on another one")
            measurement = self._recall_or_measure(executor, _retry_key(key), measure)
        if isinstance(measurement, dict) and "lost" in measurement:
            raise CandidateFailed(CandidateCode.NODE_LOST, measurement["lost"])
        if isinstance(measurement, dict) and "failed" in measurement:
            raise CandidateFailed(*measurement["failed"])
        return measurement

    def run_in_parallel(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Do jobs at the same time, one for each executor, and return what they do. One that raises ends the others."""
        if len(jobs) == 1:
            return [jobs[0]()]
        doing: list[BackgroundCall[T]] = []
        try:
            results: list[T] = self._run_all(jobs, doing)
        except BaseException:
            for call in doing:
                call.done.wait()
            raise
        return results

    def _in_parallel(self, jobs: Sequence[Callable[[], T]], doing: list[BackgroundCall[T]]) -> list[T]:
        lock = threading.Lock()
        changed = ConditionVariable(lock)
        ended = 0
        failed: list[BaseException] = []

        def watched(job: Callable[[], T]) -> T:
            nonlocal ended
            try:
                return job()
            except BaseException as error:
                failed.append(error)
                raise
            finally:
                with lock:
                    ended += 1
                    changed.notify_all()

        for number, job in enumerate(jobs):
            doing.append(BackgroundCall(functools.partial(watched, job), f"xpuruntime-tune_{number}"))
        changed.wait_for(lambda: bool(failed) or ended == len(jobs))
        if failed:
            raise failed[0]
        return [future.result() for future in doing]

    def _stop(self) -> None:
        self._stopped = True
        for executor in self._executors:
            executor.kill()

    _run_all = _core.guarded(_in_parallel, _stop)

    def _recall_or_measure(self, executor: Executor, key: str, measure: Callable[[], Any]) -> Any:
        result = self._journal.recall(key) if self._journal.has(key) else self._measure_now(executor, key, measure)
        if isinstance(result, dict) and "lost" in result and not result["another"] and executor not in self._gone:
            self._gone.append(executor)
        return result

    def _measure_now(self, executor: Executor, key: str, measure: Callable[[], Any]) -> Any:
        device = executor.device.name
        try:
            measurement = measure()
        except CandidateFailed as failed:
            measurement = {"failed": [failed.code, failed.reason]}
        except DeviceLost as lost:
            if self._stopped:
                raise _Stopped from lost
            measurement = self._replace_device(executor, str(lost))
        if self._stopped:
            raise _Stopped
        return self._journal.record(key, measurement, self.clock(), device)

    def _replace_device(self, executor: Executor, reason: str) -> dict[str, Any]:
        """Have an executor go on elsewhere, and return what the journal says of it."""
        why_not = executor.replace_device()
        with self._losing:
            if why_not and len(self.executors) == 1:
                raise DeviceLost(f"{reason}; {why_not}. Fix: go on with --resume when there is a device again")
            if why_not:
                self._gone.append(executor)
        return {"lost": f"{reason}; {why_not}" if why_not else reason, "another": not why_not}


def _retry_key(key: str) -> str:
    """Return the key of a measurement that is made once more."""
    return f"{key}/again"


SCHEMA = "xpuruntime.tune_journal/2"

_HEAD, _END = "request", "end"
_LARGEST = 1 << 30


class Journal:
    """Measurements of one search, in memory and, where a path is given, in a file."""

    def __init__(self, path: str | os.PathLike[str] | None, request: dict[str, Any], *, resume: bool = False) -> None:
        self.path = None if path is None else user_path(path, "the journal")
        self.elapsed = 0.0
        self.resumed = 0
        self._values: dict[str, Any] = {}
        self._devices: dict[str, str | None] = {}
        self._lock = threading.Lock()
        self._digest = ""
        self._descriptor: int | None = None
        if self.path is None:
            if resume:
                raise InputError("a search is resumed from its journal, and none is named. Fix: name it")
            return
        try:
            self._open(self.path, request, resume=resume)
        except OSError as error:
            self.close()
            raise InputError(f"cannot use the journal '{self.path}': {reason_of(error)}") from error
        except BaseException:
            self.close()
            raise

    def has(self, key: str) -> bool:
        """Whether a value was recorded."""
        return key in self._values

    def recall(self, key: str) -> Any:
        """Return a value that was recorded; ``None`` where there is none."""
        return self._values.get(key)

    def device(self, key: str) -> str | None:
        """Return the device that a value was measured on."""
        return self._devices.get(key)

    def record(self, key: str, value: Any, elapsed: float, device: str | None = None) -> Any:
        """Keep a value, and write it before anything else happens. Return it as it will be recalled."""
        with self._lock:
            self.elapsed = max(self.elapsed, round(float(elapsed), 3))
            line, self._digest = journal_line(
                {"key": key, "value": value, "device": device, "elapsed": self.elapsed}, self._digest
            )
            if self._descriptor is not None:
                try:
                    left = memoryview(line)
                    while left:
                        left = left[os.write(self._descriptor, left) :]
                except OSError as error:
                    msg = f"cannot write the journal '{self.path}': {reason_of(error)}. What is in it can be resumed"
                    raise InputError(msg) from error
            self._values[key], self._devices[key] = json.loads(line)["value"], device
            return self._values[key]

    def finish(self, elapsed: float) -> None:
        """Say that the search ended, so that the file may be replaced."""
        if not self.has(_END):
            self.record(_END, True, elapsed)

    def close(self) -> None:
        """Close the file, which stays; once is enough."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, path: Path, request: dict[str, Any], *, resume: bool) -> None:
        from filelock import lock_descriptor

        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
        self._descriptor = os.open(path, flags, 0o666)
        if not path.is_file():
            raise InputError(f"the journal '{path}' is not a regular file. Fix: name another")
        if not lock_descriptor(self._descriptor, blocking=False):
            raise InputError(f"another process writes the journal '{path}'. Fix: wait for it, or name another file")
        data = _read(self._descriptor)
        complete = data[: data.rfind(b"\n") + 1]
        if data and not complete.startswith(b'{"key":"request"') and not b'{"key":"request"'.startswith(data[:16]):
            raise InputError(f"'{path}' is not the journal of a search. Fix: name another file")
        entries = self._replayed(path, complete)
        if entries and not resume:
            if entries[-1]["key"] != _END:
                msg = f"the journal '{path}' is of a search that did not end. Fix: go on with it (resume), or remove it"
                raise InputError(msg)
            complete, entries, self._digest = b"", [], ""
        os.ftruncate(self._descriptor, len(complete))  # a last line that was cut off was never recalled
        os.lseek(self._descriptor, 0, os.SEEK_END)
        head = {"schema": SCHEMA, **request}
        if not entries:
            self.record(_HEAD, head, 0.0)
            return
        self._check_same(path, entries[0]["value"], json.loads(json_bytes(head)))
        self._values = {entry["key"]: entry["value"] for entry in entries}
        self._devices = {entry["key"]: entry["device"] for entry in entries}
        self.elapsed = float(entries[-1]["elapsed"])
        self.resumed = len(entries) - 1

    def _replayed(self, path: Path, data: bytes) -> list[dict[str, Any]]:
        """Return the entries, each of which must follow from the one before."""
        try:
            entries, _, self._digest = read_journal_lines(data)
        except DamagedLineError as error:
            raise InputError(f"{path}:{error.number}: {error}. Fix: remove the file and start again") from None
        for number, entry in enumerate(entries, 1):
            if entry.keys() != {"key", "value", "device", "elapsed"}:
                raise InputError(f"{path}:{number}: this is no line of a search. Fix: remove the file and start again")
        return entries

    def _check_same(self, path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
        differs = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if differs:
            name = differs[0]
            raise InputError(
                f"the journal '{path}' is of another search: {', '.join(differs)} differ ({name} was "
                f"{_shown(before.get(name))} and is {_shown(now.get(name))}). Fix: remove it, or name another file"
            )


def _read(descriptor: int) -> bytes:
    parts, size = [], 0
    os.lseek(descriptor, 0, os.SEEK_SET)
    while part := os.read(descriptor, 1 << 20):
        parts.append(part)
        size += len(part)
        if size > _LARGEST:
            raise InputError(f"a journal of more than {_LARGEST >> 20} MiB is not read. Fix: begin a new one")
    return b"".join(parts)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
