# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Journal`: values of a long search, on disk as they are known, so that a stopped search goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from xpuruntime.errors import InputError
from xpuruntime.files.paths import json_bytes, reason_of, user_path

_HEAD, _END = "request", "end"
_LARGEST = 1 << 30


class Journal:
    """Values of one search, in memory and, where a path is given, in a file whose lines carry digests.

    `kind` says of what search, as in ``"tune_journal/2"``.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, kind: str, request: dict[str, Any], *, resume: bool = False
    ) -> None:
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
            self._open(self.path, {"schema": f"xpuruntime.{kind}", **request}, resume=resume)
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
            line, self._digest = _line(
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

    def _open(self, path: Path, head: dict[str, Any], *, resume: bool) -> None:
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
        entries: list[dict[str, Any]] = []
        for number, line in enumerate(data.splitlines(keepends=True), 1):
            try:
                entry = json.loads(line)
                del entry["sha256"]
            except (ValueError, KeyError, TypeError):
                entry = {}
            reason = "this is no line of a search"
            if entry.keys() == {"key", "value", "device", "elapsed"}:
                reason = "this line was changed after it was written, or one before it was removed"
                expected, self._digest = _line(entry, self._digest)
                if line == expected:
                    entries.append(entry)
                    continue
            raise InputError(f"{path}:{number}: {reason}. Fix: remove the file and start again")
        return entries

    def _check_same(self, path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
        differs = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if differs:
            name = differs[0]
            raise InputError(
                f"the journal '{path}' is of another search: {', '.join(differs)} differ ({name} was "
                f"{_shown(before.get(name))} and is {_shown(now.get(name))}). Fix: remove it, or name another file"
            )


def _line(entry: Mapping[str, Any], digest: str) -> tuple[bytes, str]:
    """Return the line of an entry that follows one with this digest, ``""`` for the first, and its own digest."""
    body = json_bytes(entry)
    sealed = hashlib.sha256(digest.encode() + body).hexdigest()
    return body[:-1] + f',"sha256":"{sealed}"}}\n'.encode(), sealed


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
