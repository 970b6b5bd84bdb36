# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Build of the addon with the headers of the installed PyTorch: ``python -m xpuruntime.pytorch.build_addon``.

The addon has the kernels that PyTorch's dispatcher calls without Python while a policy holds. It is built for one
version of PyTorch, and kept in the user's cache under a key of that version, Python's ABI and the sources.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

import xpuruntime
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeError
from xpuruntime.files.paths import cache_folder, make_private, not_private
from xpuruntime.files.writing import locked, publish_folder, staging

#: What builds it.
COMMAND = "python -m xpuruntime.pytorch.build_addon"
#: The extension module.
MODULE = "_torch_addon"
_FILE = f"{MODULE}.so"
_UNITS = ("torch/addon/module.cpp", "torch/addon/operators.cpp")
_HEADERS = ("torch/addon_abi.h", "torch/addon/facts.h", "torch/addon/guard.h", "bindings/gil.h")
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden")
#: Seconds to wait for another process that builds the same addon.
_PATIENCE = 1800.0


def _sources() -> Path:
    """Return the folder of the C++ sources: in an installed package, or in a checkout."""
    package = Path(xpuruntime.__file__).resolve().parent
    for folder in (package / "csrc", *(parent / "src" / "cpp" for parent in package.parents[1:3])):
        if all((folder / name).is_file() for name in (*_UNITS, *_HEADERS)):
            return folder
    msg = f"this installation has no sources of the addon for PyTorch below {package / 'csrc'}"
    raise UnsupportedOperationError(f"{msg}. Fix: reinstall xpuruntime", engine="torch")


def _options() -> list[str]:
    options = [*_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    if torch.backends.cuda.is_built():
        options.append("-DXPURUNTIME_TORCH_WITH_CUDA")
    return options


def key() -> str:
    """Return what the addon for this process is kept under: versions of PyTorch and Python, and a digest of sources."""
    digest = hashlib.sha256()
    folder = _sources()
    for name in (*_UNITS, *_HEADERS):
        digest.update((folder / name).read_bytes())
    build = (*_options(), str(torch.version.git_version), str(torch.version.cuda), str(torch.version.hip))
    digest.update("\0".join(build).encode())
    text = f"torch{torch.__version__}-{sysconfig.get_config_var('SOABI')}-{digest.hexdigest()[:16]}"
    return re.sub(r"[^A-Za-z0-9.+_-]", "_", text)


def places() -> tuple[list[Path], Path]:
    """Return where the addon for this process may be: in folders of the package, and in the user's cache."""
    name = key()
    packages = [Path(folder) / "pytorch" / "addons" / name / _FILE for folder in xpuruntime.__path__]
    return packages, cache_folder() / "torch_addons" / name / _FILE


def build(into: Path | None = None) -> Path:
    """Build the addon for this process, unless it is there, and return its file."""
    folder = (places()[1].parent.parent if into is None else into).resolve()
    target = folder / key()
    if into is None:
        make_private(folder)
        if (reason := not_private(folder)) is not None:
            raise UnsupportedOperationError(reason, engine="torch")
    else:
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / f"{target.name}.lock", seconds=_PATIENCE):
        if not (target / _FILE).is_file():
            with staging(target) as room:
                new = room / target.name
                new.mkdir()
                _compile(_sources(), room, new / _FILE)
                publish_folder(new, target, check=_replace_any)
    return target / _FILE


def _replace_any(old: Path) -> None:
    """Accept that a folder without a finished addon is replaced."""


def _compiler() -> list[str]:
    stated = shlex.split(os.environ.get("CXX", ""))
    for words in (stated, ["c++"], ["g++"], ["clang++"]):
        if words and shutil.which(words[0]) is not None:
            return words
    msg = "the addon for PyTorch needs a C++ compiler, and neither c++, g++ nor clang++ is on PATH"
    raise UnsupportedOperationError(f"{msg}. Fix: install g++ 11 or newer, or set CXX", engine="torch")


def _compile(folder: Path, room: Path, result: Path) -> None:
    compiler = _compiler()
    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    if not (include / "ATen" / "ATen.h").is_file():
        msg = f"this PyTorch {torch.__version__} has no headers in {include}"
        raise UnsupportedOperationError(f"{msg}. Fix: install a wheel of pytorch.org", engine="torch")
    includes = [include, include / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include"))]
    options = [*_options(), *(word for include in includes for word in ("-isystem", str(include)))]
    options += [f"-I{folder / 'bindings'}"]
    jobs = []
    objects = []
    for name in _UNITS:
        objects.append(room / f"{Path(name).stem}.o")
        jobs.append(_start([*compiler, *options, "-c", str(folder / name), "-o", str(objects[-1])]))
    _finish(jobs)
    libraries = ["c10", "torch", "torch_cpu", "torch_python"]
    if torch.backends.cuda.is_built():
        libraries += ["c10_cuda", "torch_cuda"]
    link = [*compiler, "-shared", "-o", str(result), *map(str, objects), f"-L{torch_folder / 'lib'}"]
    _finish([_start([*link, *(f"-l{name}" for name in libraries)])])


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")


def _finish(jobs: list[subprocess.Popen[str]]) -> None:
    try:
        for job in jobs:
            said, _ = job.communicate()
            if job.returncode != 0:
                lines = [line for line in said.splitlines() if "error" in line] or said.splitlines()[-10:]
                msg = f"the addon for PyTorch {torch.__version__} cannot be compiled"
                why = "\n  ".join(lines[:10])
                fix = "a C++20 compiler (g++ 11 or clang 14 and newer) builds it; CXX names one"
                raise UnsupportedOperationError(f"{msg}. Fix: {fix}. It said:\n  {why}", engine="torch")
    finally:
        for job in jobs:
            if job.poll() is None:
                job.kill()
                job.wait()


def main(arguments: list[str] | None = None) -> int:
    """Build the addon, and print its file."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="keep it there, for a wheel; default: the cache")
    try:
        sys.stdout.write(f"{build(parser.parse_args(arguments).into)}\n")
    except (XpuRuntimeError, OSError) as error:
        sys.stderr.write(f"{COMMAND}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
