# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Files of an engine that read environment variables, and preloaded libraries that replace what it calls."""

from __future__ import annotations

import functools
import mmap
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from xpuruntime.errors import InputError
from xpuruntime.runtime.libraries.loading import library_identity
from xpuruntime.runtime.libraries.search import dynamic_symbols

PRELOAD = "LD_PRELOAD"
#: Engine to the packages that hold its files.
_FOLDERS = {
    "onnxruntime": ("onnxruntime",),
    "onnxruntime-genai": ("onnxruntime_genai", "onnxruntime"),
    "openvino": ("openvino",),
    "openvino-genai": ("openvino_genai", "openvino", "openvino_tokenizers"),
    "qnn": ("onnxruntime_qnn", "onnxruntime"),
    "tensorrt": ("tensorrt_libs", "tensorrt_rtx_libs", "tensorrt", "tensorrt_rtx"),
    "torch": ("torch",),
}
#: What reads a variable whose name begins so; of others every file of the engine may.
_READERS = {
    "OMP": r"lib(gomp|omp|iomp)", "GOMP": r"lib(gomp|omp|iomp)", "KMP": r"lib(gomp|omp|iomp)",
    "OPENBLAS": r"lib(scipy_)?openblas", "MKL": r"lib(mkl|torch_cpu)", "TBB": r"libtbb",
    "ONEDNN": r"lib(dnnl|torch_cpu|openvino_intel)", "DNNL": r"lib(dnnl|torch_cpu|openvino_intel)",
}  # fmt: skip
#: Whose names are put together in a process: a reader holds what follows the first underscore.
_PREFIXED = ("ONEDNN", "DNNL")
#: What goes on with a name.
_WORD = frozenset(bytes([byte]) for byte in b"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")
_LIBRARY = re.compile(r"\.(so|dylib|pyd|dll)\b", re.IGNORECASE)
#: Libraries of C, whose functions allocate, wait and read files, and prefixes of the same of C++, with what its
#: compilers generate in each library.
_C = ("libc.so.6", "libgcc_s.so.1", "libpthread.so.0", "libdl.so.2", "librt.so.1")
_GENERATED = (
    b"_Zn", b"_Zd", b"_ZNSt", b"_ZNKSt", b"_ZSt", b"_ZTISt", b"_ZTSSt", b"_ZTVSt", b"__cxa_", b"_init", b"_fini",
    b"_edata", b"_end", b"__bss_start",
)  # fmt: skip


@functools.cache
def _files(engine: str, search_path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the files of an engine with code, and the libraries that are in the environment of Python."""
    folders = [str(Path(sys.prefix, "lib"))] if _FOLDERS.get(engine) else []
    files = [str(path) for folder in folders for path in Path(folder).glob("lib*.*") if _LIBRARY.search(path.name)]
    for package in _FOLDERS.get(engine, ()):
        spec = PathFinder.find_spec(package, list(search_path))
        for root in (spec.submodule_search_locations or ()) if spec else ():
            for folder, _, names in (*os.walk(root), *os.walk(f"{root}.libs")):
                files += [os.path.join(folder, name) for name in names if name.endswith(".py") or _LIBRARY.search(name)]  # noqa: PTH118 - thousands
    return tuple(files)


@functools.cache
def is_read(variable: str, engine: str) -> bool:
    """Whether any file of an engine reads an environment variable; yes where the engine has no files here."""
    files = _files(engine, tuple(sys.path))
    prefix, _, rest = variable.partition("_")
    readers = re.compile(_READERS.get(prefix, ""))
    names = [name.encode() for name in ((variable, rest) if prefix in _PREFIXED else (variable,)) if name]
    return not files or any(
        _contains(path, names)
        for path in files
        if readers.match(os.path.basename(path))  # noqa: PTH119 - thousands
    )


def _contains(path: str, names: Iterable[bytes]) -> bool:
    try:
        with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return any(_has_word(content, name) or (path[-3:] != ".py" and _has_parts(content, name)) for name in names)
    except (OSError, ValueError):  # gone, or empty
        return False


def _has_word(content: mmap.mmap, name: bytes) -> bool:
    at = content.find(name)
    while at >= 0:
        if content[at + len(name) : at + len(name) + 1] not in _WORD:
            return True
        at = content.find(name, at + 1)
    return False


def _has_parts(content: mmap.mmap, name: bytes) -> bool:
    """Whether code may put a name together: compilers copy a text by its first and its last bytes."""
    size = 16 if len(name) > 16 else 8
    return len(name) > size and content.find(name[:size]) >= 0 and content.find(name[-size:]) >= 0


def package_libraries(engine: str) -> dict[str, str]:
    """Return file name to path of the libraries that an engine's packages bring, mapped or not."""
    files = _files(engine, tuple(sys.path))
    return {os.path.basename(path): path for path in files if _LIBRARY.search(path)}  # noqa: PTH119 - texts


def preloaded(environment: Mapping[str, str], mapped: Mapping[str, str], computing: Collection[str]) -> str:
    """Name those libraries of ``LD_PRELOAD`` that replace a function which computing libraries call, with their builds.

    Functions of C and C++ themselves, such as those of an allocator or a clock, compute nothing.
    """
    stated = re.split(r"[: ]+", environment.get(PRELOAD, ""))
    paths = [mapped[name] for name in map(os.path.basename, stated) if name in mapped]
    if not paths:
        return ""
    of_c = {name for library in _C if library in mapped for name in _symbols(mapped[library])}
    called = {name for path in computing for name in _symbols(path)} - of_c
    return ", ".join(_build(path) for path in dict.fromkeys(paths) if any(_replaced(path, called)))


def _replaced(path: str, called: Collection[bytes]) -> Iterator[bytes]:
    for name, defined in _symbols(path).items():
        if defined and name in called and not name.startswith(_GENERATED):
            yield name


def _build(path: str) -> str:
    facts = library_identity(path)
    return f"{facts['soname']} {facts.get('build_id') or facts['sha256']}"


@functools.cache
def _symbols(path: str) -> dict[bytes, bool]:
    try:
        return dynamic_symbols(path)
    except InputError:
        return {}
