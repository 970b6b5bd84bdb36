# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Library identity: soname, size and build ID of a shared library, and where its file is."""

from __future__ import annotations

import ctypes
import fnmatch
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from xpuruntime.errors import EngineError, EngineUnavailable, InputError
from xpuruntime.files.digests import file_digest
from xpuruntime.files.paths import reason_of
from xpuruntime.runtime.libraries.search import SearchFolder, cached_libraries, read_elf, search_folders, wheel_versions
from xpuruntime.runtime.machine import Library
from xpuruntime.runtime.packages import install_command

#: The distribution with operators for text, audio and images.
EXTENSIONS = "onnxruntime-extensions"


def mapped_libraries() -> dict[str, str]:
    """Return file name to path of the libraries that this process has mapped, sorted by path."""
    libraries: dict[str, str] = {}
    for path in mapped_paths():
        libraries.setdefault(os.path.basename(path), path)  # noqa: PTH119 - hot
    return libraries


def path_in_packages(path: str) -> str:
    """Return the path of a library relative to the folder of `sys.path` that it is in, else its absolute path."""
    for folder in sorted((entry for entry in sys.path if entry), key=len, reverse=True):
        prefix = os.path.join(folder, "")  # noqa: PTH118 - texts
        if path.startswith(prefix):
            return path[len(prefix) :]
        real = os.path.join(os.path.realpath(folder), "")  # noqa: PTH118 - texts
        if os.path.realpath(path).startswith(real):
            return os.path.realpath(path)[len(real) :]
    return path


def operator_library(stated: str) -> str | None:
    """Return the file of a library of operators for ONNX Runtime; ``None`` where there is none."""
    if stated != EXTENSIONS:
        return stated if Path(stated).is_file() else None
    spec = importlib.util.find_spec(EXTENSIONS.replace("-", "_"))
    folders = [Path(location) for location in (spec.submodule_search_locations or ())] if spec is not None else []
    files = (path for folder in folders for path in sorted(folder.glob("_extensions_pydll*")))
    return next((str(path) for path in files if path.suffix in (".so", ".pyd")), None)


def find_file(name: str, place: str, mapped: Mapping[str, str]) -> str | None:
    """Return the file that this process has mapped, or would map, as the library `name`; ``None`` if none is found."""
    file = mapped.get(name)
    if file is not None:
        return file
    if not place.startswith("/"):
        for folder in sys.path:
            path = Path(folder or ".", place)
            if path.is_file():
                return str(path)
    elif Path(place).is_file():
        return place
    others = _index().find_soname(name) if name.startswith("lib") else []
    return others[0].path if others else None


@functools.cache
def _index() -> LibraryIndex:
    return LibraryIndex()


def library_identity(path: str) -> dict[str, Any]:
    """Return ``soname``, ``size`` and ``build_id``; a file without build ID has ``sha256`` in its place."""
    try:
        facts = os.stat(path)  # noqa: PTH116 - hot
    except OSError as error:
        raise InputError(f"cannot read {path}: {reason_of(error)}") from error
    return dict(_identity(path, facts.st_size, facts.st_mtime_ns, facts.st_ino, facts.st_ctime_ns))


@functools.lru_cache(maxsize=1024)
def _identity(path: str, size: int, *_: int) -> tuple[tuple[str, Any], ...]:
    elf = read_elf(path)
    soname = elf.soname or os.path.basename(path)  # noqa: PTH119 - a text
    if elf.build_id:
        return (("build_id", elf.build_id), ("size", size), ("soname", soname))
    try:
        digest = file_digest(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {reason_of(error)}") from error
    return (("sha256", digest), ("size", size), ("soname", soname))


#: File names of the libraries `loaded_libraries` lists by default.
VENDOR_PATTERNS = (
    "libcuda*", "libcublas*", "libcudnn*", "libcufft*", "libcurand*", "libcusolver*", "libcusparse*", "libcupti*",
    "libnvrtc*", "libnvJitLink*", "libnvinfer*", "libnvonnxparser*", "libnccl*", "libonnxruntime*",
    "onnxruntime_pybind11_state*", "libopenvino*", "libQnn*", "libtensorrt*", "libtorch*", "libamdhip*", "libmigraphx*",
    "libscipy_openblas.*",
)  # fmt: skip
#: Families of libraries that a vendor ships apart from the driver, and that `preload` follows.
_FAMILIES = r"lib(cu(blas|dart|dnn|fft|rand|solver|sparse|pti|tensor)|nv(rtc|JitLink|infer|onnxparser)|nccl)\w*\.so"
#: Libraries that CUDA providers open while running instead of linking them, by CUDA major version.
_DLOPENED = {
    12: ("libcudnn.so.9", "libcufft.so.11", "libnvrtc.so.12"),
    13: ("libcudnn.so.9", "libcufft.so.12", "libnvrtc.so.13"),
}


class LibraryIndex:
    """The places where libraries are found, listed once."""

    def __init__(
        self,
        places: Sequence[SearchFolder] | None = None,
        cache: Sequence[str] | None = None,
        platform: str = sys.platform,
    ) -> None:
        self.places = tuple(search_folders() if places is None else places)
        self.cache = tuple(cached_libraries() if cache is None else cache)
        self._platform = platform
        self._versions: dict[str, str] | None = None

    def find(self, name: str, major: int | None = None) -> list[Library]:
        """Return every file that is the library `name`, in search order, so that shadowing can be seen."""
        pattern = _file_pattern(name, self._platform)
        libraries: dict[str, Library] = {}
        for path, file_name, origin in self._files:
            match = pattern.fullmatch(file_name)
            if match is None:
                continue
            real = os.path.realpath(path)
            version = next((group for group in match.groups() if group), None) or _file_version(real)
            if major is not None and (version or "").split(".")[0] != str(major):
                continue
            known = libraries.get(real)
            if known is None or _name_rank(file_name) < _name_rank(known.name):
                libraries[real] = Library(name=file_name, path=real, version=self._version(real, origin), origin=origin)
        return list(libraries.values())

    def find_soname(self, soname: str) -> list[Library]:
        """Return every file that serves a soname such as ``"libcublasLt.so.13"``, in search order."""
        parsed = re.fullmatch(r"lib(.+?)\.so(?:\.(\d+))?[\d.]*", soname)
        if parsed is None:
            return []
        return self.find(parsed[1], int(parsed[2]) if parsed[2] else None)

    def describe(self) -> str:
        """Return the places searched, as one line for a message."""
        folders = [f"{folder.path} ({folder.origin})" for folder in self.places]
        return ", ".join([*folders, f"the linker's cache ({len(self.cache)} entries)"])

    @functools.cached_property
    def _files(self) -> list[tuple[str, str, str]]:
        files = []
        for folder in self.places:
            try:
                with os.scandir(folder.path) as entries:
                    files += sorted((entry.path, entry.name, folder.origin) for entry in entries)
            except OSError:
                continue
        return [*files, *((path, path.rpartition("/")[2], "ldconfig") for path in self.cache)]

    def _version(self, real: str, origin: str) -> str | None:
        version = _file_version(real)
        if origin == "wheel" and (version is None or "." not in version):
            if self._versions is None:
                self._versions = wheel_versions()
            return self._versions.get(real, version)
        return version


def find_library(name: str, major: int | None = None) -> list[Library]:
    """Return every file on this machine that is the library `name`, in search order.

    The order is the `nvidia-*` wheels, ``CUDA_HOME`` and ``CUDA_PATH``, ``LD_LIBRARY_PATH``, ``/usr/local/cuda`` and
    the cache of the dynamic linker. More than one entry means that the first shadows the others.
    """
    return LibraryIndex().find(name, major)


def loaded_libraries(patterns: Sequence[str] = VENDOR_PATTERNS, maps: str | None = None) -> tuple[Library, ...]:
    """Return the libraries that this process has really loaded."""
    libraries: list[Library] = []
    wheels: dict[str, str] | None = None
    for path in mapped_paths(maps):
        name = Path(path).name
        own_core = patterns is VENDOR_PATTERNS and name.startswith("_core.") and Path(path).parent.name == "xpuruntime"
        if not (own_core or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)):
            continue
        version, real = _file_version(name), os.path.realpath(path)
        origin = "system"
        if "site-packages" in path or "dist-packages" in path:
            origin = "package"
        if any(f"/{package}/" in path for package in ("nvidia", "tensorrt_libs", "scipy_openblas32")):
            wheels = wheel_versions() if wheels is None else wheels
            if real in wheels:
                version, origin = wheels[real], "wheel"
        libraries.append(with_build_id(Library(name=name, path=real, version=version, origin=origin)))
    return tuple(sorted(libraries, key=lambda library: (library.name, library.path)))


def mapped_paths(maps: str | None = None) -> list[str]:
    """Return the paths of the libraries that this process has mapped, sorted; `maps` as for `loaded_libraries`."""
    if maps is None:
        try:
            maps = Path("/proc/self/maps").read_text(errors="surrogateescape")
        except OSError:
            return []
    paths = {line.split(None, 5)[5].removesuffix(" (deleted)") for line in maps.splitlines() if "/" in line}
    return sorted(path for path in paths if ".so" in os.path.basename(path))  # noqa: PTH119 - thousands of lines


def with_build_id(library: Library) -> Library:
    """Return a library with the size and build ID of its file, as far as that can be read; takes microseconds."""
    try:
        size = Path(library.path).stat().st_size
    except OSError:
        return library
    try:
        build_id = read_elf(library.path).build_id
    except InputError:
        build_id = None
    return msgspec.structs.replace(library, size=size, build_id=build_id)


def libraries_needed_by(path: str | Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the vendor libraries that a provider file needs, read from the file itself."""
    linked = tuple(soname for soname in read_elf(path).needed if re.match(_FAMILIES, soname))
    major = next((int(name.rsplit(".", 1)[1]) for name in linked if name.startswith("libcudart.so.")), None)
    later = tuple(name for name in _DLOPENED.get(major or 0, ()) if name not in linked)
    return linked, later


def preload(
    sonames: Sequence[str], *, extra: str = "cuda", index: LibraryIndex | None = None, optional: bool = False
) -> tuple[Library, ...]:
    """Load libraries, and what they need of the same vendor, so that an engine finds them by soname.

    A library that the process has already loaded is kept: two copies never meet. The others are loaded from the first
    place that works, in the order of `find_library`.
    """
    if not sys.platform.startswith("linux"):
        return ()
    places = index or LibraryIndex()
    done: dict[str, Library | None] = {}
    for soname in sonames:
        try:
            _load(soname, places, done, extra)
        except EngineError:
            if not optional:
                raise
    return tuple(library for soname in sonames if (library := done.get(soname)) is not None)


def _load(soname: str, index: LibraryIndex, done: dict[str, Library | None], extra: str) -> None:
    if soname in done:
        return
    done[soname] = None
    if _is_loaded(soname):
        done[soname] = _loaded_as(soname)
        return
    failures: list[str] = []
    for library in index.find_soname(soname):
        try:
            for needed in read_elf(library.path).needed:
                if re.match(_FAMILIES, needed):
                    _load(needed, index, done, extra)
            ctypes.CDLL(library.path, mode=ctypes.RTLD_GLOBAL)
        except (OSError, InputError, EngineError) as error:
            failures.append(f"{library.path}: {error}")
            continue
        done[soname] = library
        return
    del done[soname]
    why = "; ".join(failures) if failures else "it was not found"
    raise EngineUnavailable(
        f"{soname} cannot be loaded: {why}. Searched: {index.describe()}. "
        f"Fix: {install_command(extra)}, or put its folder on LD_LIBRARY_PATH"
    )


def _is_loaded(soname: str) -> bool:
    try:
        ctypes.CDLL(soname, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return True


def _loaded_as(soname: str) -> Library:
    stem = soname.split(".so")[0]
    libraries = loaded_libraries((f"{stem}.so*",))
    return (
        libraries[0] if libraries else Library(name=soname, path=soname, version=_file_version(soname), origin="loaded")
    )


def _file_pattern(name: str, platform: str) -> re.Pattern[str]:
    word = re.escape(name)
    if platform == "win32":
        return re.compile(rf"{word}(?:64)?(?:_(\d+))?(?:_\d+)*\.dll", re.IGNORECASE)
    if platform == "darwin":
        return re.compile(rf"lib{word}(?:\.(\d[\d.]*))?\.dylib")
    return re.compile(rf"lib{word}\.so(?:\.(\d[\d.]*))?")


def _name_rank(name: str) -> tuple[bool, int]:
    """Order names of one file: a soname such as ``libz.so.1`` before ``libz.so.1.2`` and before ``libz.so``."""
    return _file_version(name) is None and ".so" in name, len(name)


def _file_version(path: str) -> str | None:
    match = re.search(r"\.so\.(\d[\d.]*)$", path)
    return match[1] if match else None
