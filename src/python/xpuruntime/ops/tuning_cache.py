# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`TuningCache`: measured times of kernels, kept in a file between processes."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from xpuruntime import _core
from xpuruntime.runtime.files import replace_file
from xpuruntime.runtime.folders import cache_folder
from xpuruntime.runtime.json_reading import decode_json
from xpuruntime.runtime.locking import locked

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SCHEMA", "TuningCache", "tuning_path", "use_tuning_cache"]

#: The version of the file format that this release writes, and the only one it reads.
SCHEMA = "xpuruntime.tuning/1"
_PREFIX = "xpuruntime.tuning/"
_MAX_BYTES = 64 * 2**20
_MAX_ENTRIES = 10_000
#: Digits of a schema's version.
_DIGITS = 6


class _Time(msgspec.Struct, frozen=True):
    kernel: Annotated[str, msgspec.Meta(min_length=1)]
    config: str
    microseconds: Annotated[float, msgspec.Meta(gt=0)]


class _Entry(msgspec.Struct, frozen=True):
    times: Annotated[list[_Time], msgspec.Meta(min_length=1)]
    validators: dict[str, str]


class _File(msgspec.Struct):
    schema: str
    entries: dict[str, msgspec.Raw]


class _LaterError(Exception):
    """The file is of a later release."""


class _DamagedError(Exception):
    """The file cannot be read."""


class TuningCache:
    """Keeps measured times in a file, for all processes of a user.

    Nothing here raises: what went wrong is told as a note, which the decision concerned carries. The file is replaced
    as a whole, under a lock, with what other processes put there in the meantime. An entry holds only as long as all
    its validators (device, driver, versions of libraries and of this one) are the same. At most 10,000 entries are
    kept, the newest.

    Parameters
    ----------
    path : path
        The file; it and its folder are made when something is put.
    lock_seconds : float
        How long to wait for other processes; after that an entry is not kept.
    """

    def __init__(self, path: str | os.PathLike[str], *, lock_seconds: float = 5.0) -> None:
        self.path = Path(path)
        self.lock_seconds = lock_seconds
        self._guard = threading.Lock()
        self._read: tuple[int, int, int] | None = None
        self._entries: dict[str, msgspec.Raw] = {}
        self._trouble = ""

    def find(self, key: str, validators: Mapping[str, str]) -> tuple[dict[str, Any] | None, str]:
        """Return the entry of a key if it holds for these validators, and a note, empty where there is nothing to say.

        Parameters
        ----------
        key : str
        validators : mapping of str to str

        Returns
        -------
        entry : dict or None
            ``{"times": [{"kernel", "config", "microseconds"}, ...], "validators": {...}}``, the fastest first.
        note : str
        """
        with self._guard:
            self._refresh()
            raw = self._entries.get(key)
            if raw is None:
                return None, self._trouble
            try:
                entry = decode_json(raw, _Entry)
            except msgspec.MsgspecError as error:
                del self._entries[key]
                return None, f"the tuning cache {self.path} held a damaged entry for this, which is dropped: {error}"
            stale = [
                f"{name} was {entry.validators.get(name, 'not there')!r} and is {validators.get(name, 'not there')!r}"
                for name in sorted({*validators, *entry.validators})
                if validators.get(name) != entry.validators.get(name)
            ]
            if stale:
                del self._entries[key]
                return (
                    None,
                    f"the tuning cache {self.path} held a stale entry for this, which is dropped: " + ", ".join(stale),
                )
            return msgspec.to_builtins(entry), ""

    def put(self, key: str, entry: Mapping[str, Any]) -> str:
        """Keep an entry in place of the one of this key. Returns a note: why it was not kept, or empty.

        Parameters
        ----------
        key : str
        entry : dict
            As `find` returns it.
        """
        with self._guard:
            try:
                raw = msgspec.Raw(msgspec.json.encode(msgspec.convert(entry, _Entry)))
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with self._locked():
                    note = self._merge(key, raw)
            except (OSError, msgspec.MsgspecError, TimeoutError, _LaterError) as error:
                return f"the measured times are not kept in {self.path}: {_reason(error)}"
            return note

    def _merge(self, key: str, raw: msgspec.Raw) -> str:
        """Put the entry among those that the file holds now."""
        note = ""
        try:
            entries = self._load()
        except _DamagedError as error:
            entries, note = {}, f"the tuning cache {self.path} was damaged and is begun anew: {error}"
        entries.pop(key, None)
        entries[key] = raw
        for old in list(entries)[: max(len(entries) - _MAX_ENTRIES, 0)]:
            del entries[old]
        replace_file(self.path, msgspec.json.encode(_File(schema=SCHEMA, entries=entries)) + b"\n")
        self._read = None
        return note

    def _refresh(self) -> None:
        """Read the file again if it is another one than was read last."""
        try:
            status = self.path.stat()
            identity = (status.st_mtime_ns, status.st_size, status.st_ino)
        except FileNotFoundError:
            self._read, self._entries, self._trouble = None, {}, ""
            return
        except OSError as error:
            self._read, self._entries = None, {}
            self._trouble = f"the tuning cache {self.path} is not used: {_reason(error)}"
            return
        if identity == self._read:
            return
        self._read, self._entries, self._trouble = identity, {}, ""
        try:
            self._entries = self._load()
        except (_DamagedError, _LaterError, OSError) as error:
            self._trouble = f"the tuning cache {self.path} is not used: {_reason(error)}"

    def _load(self) -> dict[str, msgspec.Raw]:
        """Return the entries of the file, each still as text. Raises `_DamagedError`, `_LaterError`, OSError."""
        try:
            with self.path.open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return {}
        if len(data) > _MAX_BYTES:
            raise _DamagedError(f"it is larger than {_MAX_BYTES} bytes")
        try:
            found = decode_json(data, _File)
        except msgspec.MsgspecError as error:
            raise _DamagedError(f"it cannot be read ({error})") from None
        if found.schema != SCHEMA:
            version = found.schema.removeprefix(_PREFIX)
            later = version.isascii() and version.isdecimal() and len(version) <= _DIGITS
            if later and int(version) > int(SCHEMA.removeprefix(_PREFIX)):
                raise _LaterError(f"it is of a later release (schema {found.schema}); this one reads {SCHEMA}")
            raise _DamagedError(f"its schema is {found.schema[:40]!r}; this release reads {SCHEMA}")
        return found.entries

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        """Keep other processes out. Raises TimeoutError."""
        return locked(self.path.with_name(self.path.name + ".lock"), seconds=self.lock_seconds)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


def tuning_path(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file of the tuning cache, or ``None`` where it is turned off.

    ``XPURUNTIME_TUNING_CACHE`` names it, or is ``off``. Otherwise it is ``xpuruntime/tuning.json`` in the user's cache
    folder: ``XDG_CACHE_HOME``, ``~/.cache``, or on Windows ``LOCALAPPDATA``.
    """
    stated = environment.get("XPURUNTIME_TUNING_CACHE", "").strip()
    if stated.lower() == "off":
        return None
    if stated:
        return Path(stated).expanduser()
    return cache_folder(environment) / "tuning.json"


def use_tuning_cache() -> TuningCache | None:
    """Let the core's dispatcher keep measured times in the file of `tuning_path`; ``None`` where it is turned off."""
    path = tuning_path()
    cache = None if path is None else TuningCache(path)
    _core.Dispatcher.instance().set_tuning_store(cache)
    return cache
