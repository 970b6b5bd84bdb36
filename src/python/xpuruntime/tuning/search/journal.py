# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Journal`: append-only log of measurements, from which a killed search resumes.

A line is a JSON object with a key, a value, the device that it was measured on, the seconds that the search had taken,
and a digest over the line and the one before. What was measured is recalled by its key and not measured again: all
decisions follow from it. Several threads may write.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import InputError
from xpuruntime.files.paths import json_bytes, reason_of, user_path
from xpuruntime.files.reading import DamagedLineError, journal_line, read_journal_lines

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["SCHEMA", "Journal"]

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
        whole = data[: data.rfind(b"\n") + 1]
        if data and not whole.startswith(b'{"key":"request"') and not b'{"key":"request"'.startswith(data[:16]):
            raise InputError(f"'{path}' is not the journal of a search. Fix: name another file")
        entries = self._replayed(path, whole)
        if entries and not resume:
            if entries[-1]["key"] != _END:
                msg = f"the journal '{path}' is of a search that did not end. Fix: go on with it (resume), or remove it"
                raise InputError(msg)
            whole, entries, self._digest = b"", [], ""
        os.ftruncate(self._descriptor, len(whole))  # a last line that was cut off was never recalled
        os.lseek(self._descriptor, 0, os.SEEK_END)
        head = {"schema": SCHEMA, **request}
        if not entries:
            self.record(_HEAD, head, 0.0)
            return
        self._check_same(path, entries[0]["value"], json.loads(json_bytes(head)))
        self._values = {one["key"]: one["value"] for one in entries}
        self._devices = {one["key"]: one["device"] for one in entries}
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
