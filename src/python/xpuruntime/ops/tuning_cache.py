# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`TuningCache`: measured times of kernels, kept in a file between processes."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import os
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from xpuruntime import _core
from xpuruntime.errors import InputError
from xpuruntime.files.paths import cache_folder, checked, make_private, not_private, reason_of, with_home
from xpuruntime.files.reading import decode_json, read_regular
from xpuruntime.files.writing import locked, replace_file
from xpuruntime.runtime.libraries.loading import mapped_paths, with_build_id
from xpuruntime.runtime.machine import Library

#: The version of the file format that this release writes, and the only one it reads.
SCHEMA = "xpuruntime.tuning/1"
_PREFIX = "xpuruntime.tuning/"
#: How every xpuruntime file begins, also one that a tool has formatted; another one is never replaced.
_BEGINNING = re.compile(rb'\s*\{\s*"schema"\s*:\s*"xpuruntime\.tuning/')
_CUT = b'{"schema":"xpuruntime.tuning/'
_MAX_BYTES = 64 * 2**20
_MAX_ENTRIES = 10_000
#: Digits of a schema's version.
_DIGITS = 6


class _Time(msgspec.Struct, frozen=True, omit_defaults=True):
    kernel: Annotated[str, msgspec.Meta(min_length=1)]
    config: str
    microseconds: Annotated[float, msgspec.Meta(gt=0)]
    ratio: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    low: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    high: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    verdict: str = ""


class _Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    times: Annotated[list[_Time], msgspec.Meta(min_length=1)]
    validators: dict[str, str]
    rounds: Annotated[int, msgspec.Meta(ge=0)] = 0
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    undecided: bool = False


class _File(msgspec.Struct):
    schema: str
    entries: dict[str, msgspec.Raw]


class _LaterError(Exception):
    """The file is of a later release."""


class _DamagedError(Exception):
    """The file cannot be read."""


class _ForeignError(Exception):
    """The file is no tuning cache."""


class _SharedError(Exception):
    """Another user may have written the file."""


class TuningCache:
    """Keeps measured times in a file, for all processes of a user.

    Nothing here raises: what went wrong becomes a note, which the decision concerned carries. The file is replaced
    as a whole, under a lock, with what other processes put there in the meantime. An entry holds only as long as all
    its validators (device, driver, versions of libraries and of this one) are the same. At most 10,000 entries are
    kept, the newest.
    """

    def __init__(self, path: str | os.PathLike[str], *, lock_seconds: float = 5.0) -> None:
        self.path = Path(path)
        self.lock_seconds = lock_seconds
        self._guard = threading.Lock()
        self._read: tuple[int, int, int] | None = None
        self._entries: dict[str, msgspec.Raw] = {}
        self._trouble = ""

    def find(self, key: str, validators: Mapping[str, str]) -> tuple[dict[str, Any] | None, str]:
        """Return the entry of a key if it holds for these validators, and a note, which may be empty."""
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
        """Keep an entry in place of the one of this key. Returns a note: why it was not kept, or empty."""
        with self._guard:
            try:
                raw = msgspec.Raw(msgspec.json.encode(msgspec.convert(entry, _Entry)))
                make_private(self.path.parent)
                self._check_private()
                with self._locked():
                    note = self._merge(key, raw)
            except (OSError, msgspec.MsgspecError, TimeoutError, _LaterError, _ForeignError, _SharedError) as error:
                return f"the measured times are not kept in {self.path}: {reason_of(error)}"
            return note

    def _merge(self, key: str, raw: msgspec.Raw) -> str:
        note = ""
        try:
            entries = self._load()
        except _DamagedError as error:
            entries, note = {}, f"the tuning cache {self.path} was damaged and is started anew: {error}"
        entries.pop(key, None)
        entries[key] = raw
        for old in list(entries)[: max(len(entries) - _MAX_ENTRIES, 0)]:
            del entries[old]
        replace_file(self.path, msgspec.json.encode(_File(schema=SCHEMA, entries=entries)) + b"\n")
        self._read = None
        return note

    def _refresh(self) -> None:
        try:
            checked(self.path)
            status = self.path.stat()
            identity = (status.st_mtime_ns, status.st_size, status.st_ino)
        except FileNotFoundError:
            self._read, self._entries, self._trouble = None, {}, ""
            return
        except OSError as error:
            self._read, self._entries = None, {}
            self._trouble = f"the tuning cache {self.path} is not used: {reason_of(error)}"
            return
        if identity == self._read:
            return
        self._read, self._entries, self._trouble = identity, {}, ""
        try:
            self._entries = self._load()
        except (_DamagedError, _LaterError, _ForeignError, _SharedError, OSError) as error:
            self._trouble = f"the tuning cache {self.path} is not used: {reason_of(error)}"

    def _load(self) -> dict[str, msgspec.Raw]:
        """Return the entries of the file, each still as text. Raises the errors of this module, and OSError."""
        self._check_private()
        try:
            data = read_regular(self.path, _MAX_BYTES)
        except FileNotFoundError:
            return {}
        if not _is_ours(data):
            raise _ForeignError("it is no tuning cache, and stays as it is. Fix: name another file")
        try:
            document = decode_json(data, _File)
        except msgspec.MsgspecError as error:
            raise _DamagedError(f"it cannot be read ({error})") from None
        if document.schema != SCHEMA:
            version = document.schema.removeprefix(_PREFIX)
            later = version.isascii() and version.isdecimal() and len(version) <= _DIGITS
            if later and int(version) > int(SCHEMA.removeprefix(_PREFIX)):
                raise _LaterError(f"it is of a later release (schema {document.schema}); this one reads {SCHEMA}")
            raise _DamagedError(f"its schema is {document.schema[:40]!r}; this release reads {SCHEMA}")
        return document.entries

    def _check_private(self) -> None:
        """Refuse times that another user may have put there: they decide which kernels run. Raises `_SharedError`."""
        reason = not_private(self.path.parent) or not_private(self.path)
        if reason is not None:
            raise _SharedError(f"another user may have written it: {reason}")

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        return locked(self.path.with_name(self.path.name + ".lock"), seconds=self.lock_seconds)


def _is_ours(data: bytes) -> bool:
    """Whether a file is a tuning cache, if damaged: cut off anywhere, or of zeros, as some file systems leave it."""
    return _BEGINNING.match(data) is not None or _CUT.startswith(data) or not data.strip(b"\0")


class _NoTuningCache:
    """Stands for a tuning cache that has no place; every decision that would have used it says why."""

    def __init__(self, reason: str) -> None:
        self._note = f"measured times are not kept: {reason}; XPURUNTIME_TUNING_CACHE=off says so without this note"

    def find(self, key: str, validators: Mapping[str, str]) -> tuple[None, str]:
        del key, validators
        return None, self._note

    def put(self, key: str, entry: Mapping[str, Any]) -> str:
        del key, entry
        return self._note


def tuning_path() -> Path | None:
    """Return the file of the tuning cache, or ``None`` where it is turned off.

    ``XPURUNTIME_TUNING_CACHE`` names it, or is ``off``. Otherwise it is ``xpuruntime/tuning.json`` in the user's cache
    folder: ``XDG_CACHE_HOME``, or the system's.
    """
    stated = os.environ.get("XPURUNTIME_TUNING_CACHE", "").strip()
    if stated.lower() == "off":
        return None
    if stated:
        return with_home(stated, "the tuning cache")
    return cache_folder() / "tuning.json"


class _WithBuilds:
    """The cache of the core's tuner: its entries hold for the same builds of xpuruntime and of the libraries alone."""

    def __init__(self, cache: TuningCache | _core.TuningStore) -> None:
        self._cache = cache
        self._builds: dict[str, dict[str, str]] = {}

    def find(self, key: str, validators: Mapping[str, str]) -> tuple[dict[str, Any] | None, str]:
        entry, note = self._cache.find(key, self._all(validators))
        if entry is not None:
            entry["validators"] = dict(validators)
        return entry, note

    def put(self, key: str, entry: Mapping[str, Any]) -> str:
        return self._cache.put(key, {**entry, "validators": self._all(entry["validators"])})

    def _all(self, validators: Mapping[str, str]) -> dict[str, str]:
        held = {**validators, "core": core_build()}
        for backend in BACKEND_LIBRARIES.keys() & validators.keys():
            if not self._builds.get(backend):
                self._builds[backend] = mapped_builds(BACKEND_LIBRARIES[backend])
            held |= self._builds[backend]
        if "driver" in validators:
            held |= mapped_builds(("libcuda.so*",))
        return held


def use_tuning_cache(before: _core.TuningStore | None = None) -> TuningCache | None:
    """Let the core's dispatcher keep measured times in the file of `tuning_path`; ``None`` where there is none.

    Where a store is stated, it stands before the file; times that the dispatcher knows are forgotten then.
    """
    dispatcher = _core.Dispatcher.instance()
    try:
        path = tuning_path()
    except InputError as error:
        dispatcher.set_tuning_store(_NoTuningCache(str(error)) if before is None else _WithBuilds(before))
        return None
    cache = None if path is None else TuningCache(path)
    first = before or cache
    dispatcher.set_tuning_store(None if first is None else _WithBuilds(first))
    if before is not None:
        dispatcher.forget_measurements()
    return cache


#: Backends of the core to patterns of the libraries that have their kernels, loaded once one of them can serve.
BACKEND_LIBRARIES = {
    "cublas": ("libcublas.so*", "libcublasLt.so*"),
    "cudnn": ("libcudnn.so*",),
    "cpu": ("libscipy_openblas.so*",),
}


@functools.lru_cache(maxsize=256)
def build_of(path: str) -> str:
    """Return the build ID of a library's file; of one without, its size."""
    name = os.path.basename(path)  # noqa: PTH119 - a text
    library = with_build_id(Library(name=name, path=path, version=None, origin="system"))
    return library.build_id or f"{library.size} bytes"


def core_build() -> str:
    """Return the build of xpuruntime's own kernels: another one whenever they are compiled anew."""
    return build_of(str(_core.__file__))


def mapped_builds(patterns: Sequence[str]) -> dict[str, str]:
    """Return file name to build of the libraries that this process has mapped under one of these names."""
    builds = {}
    for path in mapped_paths():
        name = os.path.basename(path)  # noqa: PTH119 - a text
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            builds[name] = build_of(os.path.realpath(path))
    return builds
