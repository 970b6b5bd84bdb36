# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Search order for the shared libraries of vendors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from xpuruntime.runtime.libraries.distributions import distributions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["SearchFolder", "cached_libraries", "search_folders", "wheel_versions"]

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
    found: dict[str, SearchFolder] = {}
    for path, origin in (*_wheel_folders(paths, platform), *_system_folders(env, platform)):
        if path.is_dir():
            found.setdefault(str(path), SearchFolder(path=str(path), origin=origin))
    return tuple(found.values())


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
    found: dict[str, str] = {}
    for wheel in distributions(paths):
        if not wheel.name.startswith(("nvidia-", "tensorrt", "scipy-openblas")):
            continue
        for file in wheel.files() or ():
            if ".so" in file or file.lower().endswith((".dll", ".dylib")):
                found[os.path.realpath(Path(wheel.location, file))] = wheel.version
    return found
