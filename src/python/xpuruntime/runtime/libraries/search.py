# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Files of shared libraries: the folders that are searched, in order, and what their ELF headers say."""

from __future__ import annotations

import os
import re
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from xpuruntime.errors import InputError
from xpuruntime.files.paths import reason_of
from xpuruntime.files.reading import open_regular
from xpuruntime.runtime.packages import distributions

#: Packages whose wheels carry libraries: `nvidia` in both layouts (`nvidia/cu13/lib`, `nvidia/cublas/lib`), TensorRT,
#: and OpenBLAS, which the kernels for the CPU use.
_WHEELS = ("nvidia", "tensorrt_libs", "scipy_openblas32")
_LDCONFIG = ("/sbin/ldconfig", "/usr/sbin/ldconfig")


class SearchFolder(msgspec.Struct, frozen=True, kw_only=True):
    """A folder that is searched, and why: ``"wheel"``, ``"default"`` or the variable that names it."""

    path: str
    origin: str


def search_folders(
    environ: Mapping[str, str] | None = None, paths: Sequence[str] | None = None, platform: str = sys.platform
) -> tuple[SearchFolder, ...]:
    """List the folders that exist and may hold vendor libraries, in the order they are searched."""
    env = os.environ if environ is None else environ
    folders: dict[str, SearchFolder] = {}
    for path, origin in (*_wheel_folders(paths, platform), *_system_folders(env, platform)):
        if path.is_dir():
            folders.setdefault(str(path), SearchFolder(path=str(path), origin=origin))
    return tuple(folders.values())


def _wheel_folders(paths: Sequence[str] | None, platform: str) -> Iterator[tuple[Path, str]]:
    inner = ("bin", "bin/x86_64") if platform == "win32" else ("lib",)
    for package in _WHEELS:
        spec = PathFinder.find_spec(package, None if paths is None else list(paths))
        for root in (spec.submodule_search_locations or ()) if spec else ():
            if package != "nvidia":
                yield Path(root, "lib") if package == "scipy_openblas32" else Path(root), "wheel"
                continue
            try:
                parts = sorted(Path(root).iterdir())
            except OSError:
                continue
            yield from ((part / name, "wheel") for part in parts for name in inner)


def _system_folders(env: Mapping[str, str], platform: str) -> Iterator[tuple[Path, str]]:
    inner = ("bin", "bin/x64") if platform == "win32" else ("lib64", "lib")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if env.get(name):
            yield from ((Path(env[name]) / part, name) for part in inner)
    variable = {"win32": "PATH", "darwin": "DYLD_LIBRARY_PATH"}.get(platform, "LD_LIBRARY_PATH")
    for part in env.get(variable, "").split(";" if platform == "win32" else ":"):
        if part:
            yield Path(part), variable
    if platform.startswith("linux"):
        yield from ((Path("/usr/local/cuda") / part, "default") for part in inner)


def cached_libraries() -> tuple[str, ...]:
    """Return the paths in the cache of the dynamic linker, empty where there is none."""
    import subprocess

    program = next((path for path in _LDCONFIG if Path(path).exists()), None)
    if program is None:
        return ()
    try:
        done = subprocess.run([program, "-p"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(re.findall(r"=> (\S.*)$", done.stdout, flags=re.MULTILINE))


def wheel_versions(paths: Sequence[str] | None = None) -> dict[str, str]:
    """Map the real path of every shared library in a vendor's wheel to the version of that wheel."""
    versions: dict[str, str] = {}
    for wheel in distributions(paths):
        if not wheel.name.startswith(("nvidia-", "tensorrt", "scipy-openblas")):
            continue
        for file in wheel.files() or ():
            if ".so" in file or file.lower().endswith((".dll", ".dylib")):
                versions[os.path.realpath(Path(wheel.location, file))] = wheel.version
    return versions


#: Kind, address, offset in the file, and size.
_Segment = tuple[int, int, int, int]
_PT_LOAD, _PT_DYNAMIC, _PT_NOTE = 1, 2, 4
_SHT_DYNSYM = 11
_NT_GNU_BUILD_ID = 3
_DT_NULL, _DT_NEEDED, _DT_STRTAB, _DT_STRSZ, _DT_SONAME = 0, 1, 5, 10, 14
#: No dynamic section or string table of a real library comes near this; a larger one is a corrupt file.
_MOST = 64 << 20
#: Bytes that are read at once of a name.
_BLOCK = 256
_Facts = TypeVar("_Facts")


class ElfFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One file: its soname, the sonames it needs, and its build ID as hex digits."""

    soname: str | None
    needed: tuple[str, ...]
    build_id: str | None = None


def read_elf(path: str | Path) -> ElfFacts:
    """Read the dynamic section and the build ID of an ELF file, and nothing else of it, whatever its size."""
    return _opened(path, _read)


def dynamic_symbols(path: str | Path) -> dict[bytes, bool]:
    """Return the names that an ELF file has for the dynamic linker, and whether it defines them or takes them."""
    return _opened(path, _read_symbols)


def _opened(path: str | Path, read: Callable[[BinaryIO], _Facts]) -> _Facts:
    try:
        with open_regular(path) as file:
            return read(file)
    except OSError as error:
        raise InputError(f"cannot read {path}: {reason_of(error)}") from error
    except (struct.error, ValueError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} is not a shared library that this machine can load: {error}. Fix: name one"
        ) from error


def _header(file: BinaryIO) -> tuple[str, bool, tuple[int, ...]]:
    ident = file.read(16)
    if ident[:4] != b"\x7fELF" or len(ident) < 16 or ident[4] not in (1, 2) or ident[5] not in (1, 2):
        raise ValueError("it does not begin as an ELF file does")
    wide, order = ident[4] == 2, "<" if ident[5] == 1 else ">"
    header = struct.Struct(order + ("HHIQQQIHHHHHH" if wide else "HHIIIIIHHHHHH"))
    return order, wide, header.unpack(file.read(header.size))


def _read_symbols(file: BinaryIO) -> dict[bytes, bool]:
    order, wide, fields = _header(file)
    section = struct.Struct(order + ("IIQQQQIIQQ" if wide else "IIIIIIIIII"))
    sections = []
    for index in range(fields[11]):
        file.seek(fields[5] + index * fields[10])
        sections.append(section.unpack(file.read(section.size)))
    symbols: dict[bytes, bool] = {}
    for _, kind, _, _, offset, size, link, *_ in sections:
        if kind != _SHT_DYNSYM or link >= len(sections):
            continue
        _, _, _, _, names_at, names_size, *_ = sections[link]
        if max(size, names_size) > _MOST:
            raise ValueError("its table of symbols is impossibly large")
        file.seek(names_at)
        names = file.read(names_size)
        file.seek(offset)
        entry = struct.Struct(order + ("IBBHQQ" if wide else "IIIBBH"))
        raw = file.read(size)
        for values in entry.iter_unpack(raw[: len(raw) // entry.size * entry.size]):
            at, defined = values[0], values[3] if wide else values[5]
            symbols[names[at : names.find(b"\0", at)]] = defined != 0
    return symbols


def _segments(file: BinaryIO) -> tuple[str, bool, list[_Segment]]:
    """Return the byte order, whether the file is 64-bit, and kind, address, offset and size of each segment."""
    order, wide, fields = _header(file)
    offset, entry_size, count = fields[4], fields[8], fields[9]
    segments: list[_Segment] = []
    for index in range(count):
        file.seek(offset + index * entry_size)
        if wide:
            kind, _, at, address, _, size, *_ = struct.unpack(order + "IIQQQQQQ", file.read(56))
        else:
            kind, at, address, _, size, *_ = struct.unpack(order + "IIIIIIII", file.read(32))
        segments.append((kind, address, at, size))
    return order, wide, segments


def _read(file: BinaryIO) -> ElfFacts:
    order, wide, segments = _segments(file)
    build_id = _build_id(file, order, segments)
    dynamic = [(at, size) for kind, _, at, size in segments if kind == _PT_DYNAMIC]
    if not dynamic:
        return ElfFacts(soname=None, needed=(), build_id=build_id)
    loads = [(address, at, size) for kind, address, at, size in segments if kind == _PT_LOAD]
    facts = _dynamic(file, order + ("qQ" if wide else "iI"), dynamic[-1], loads)
    return msgspec.structs.replace(facts, build_id=build_id)


def _build_id(file: BinaryIO, order: str, segments: list[_Segment]) -> str | None:
    """Return the build ID in the notes, or ``None``."""
    head = struct.Struct(order + "III")
    for kind, _, at, size in segments:
        if kind != _PT_NOTE:
            continue
        if size > _MOST:
            raise ValueError("its notes are impossibly large")
        file.seek(at)
        raw = file.read(size)
        start = 0
        while start + head.size <= len(raw):
            name_size, value_size, what = head.unpack_from(raw, start)
            name = start + head.size
            value = name + (name_size + 3) // 4 * 4
            if (
                what == _NT_GNU_BUILD_ID
                and raw[name : name + name_size] == b"GNU\0"
                and 0 < value_size <= len(raw) - value
            ):
                return raw[value : value + value_size].hex()
            start = value + (value_size + 3) // 4 * 4
    return None


def _dynamic(file: BinaryIO, form: str, where: tuple[int, int], loads: list[tuple[int, int, int]]) -> ElfFacts:
    entry = struct.Struct(form)
    if where[1] > _MOST:
        raise ValueError("its dynamic section is impossibly large")
    file.seek(where[0])
    raw = file.read(where[1])
    if len(raw) < where[1]:
        raise ValueError("it is truncated")
    tags: list[tuple[int, int]] = []
    for start in range(0, len(raw) - entry.size + 1, entry.size):
        tag, value = entry.unpack_from(raw, start)
        if tag == _DT_NULL:
            break
        tags.append((tag, value))
    first = dict(reversed(tags))
    if _DT_STRTAB not in first:
        return ElfFacts(soname=None, needed=())
    address, size = first[_DT_STRTAB], first.get(_DT_STRSZ, 0)
    if size > _MOST:
        raise ValueError("its string table is impossibly large")
    base = next((at + address - start for start, at, length in loads if start <= address < start + length), None)
    if base is None:
        raise ValueError("its string table lies outside the file")
    file.seek(max(base + size - 1, 0))
    if not file.read(1):
        raise ValueError("it is truncated")

    def text(index: int) -> str:
        file.seek(base + index)
        data = b""
        while b"\0" not in data:
            block = file.read(max(0, min(size - index - len(data), _BLOCK)))
            if not block:
                raise ValueError("a name lies outside its string table")
            data += block
        return data.partition(b"\0")[0].decode()

    return ElfFacts(
        soname=text(first[_DT_SONAME]) if _DT_SONAME in first else None,
        needed=tuple(text(value) for tag, value in tags if tag == _DT_NEEDED),
    )
