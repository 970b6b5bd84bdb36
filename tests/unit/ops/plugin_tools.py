# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Plugins for tests: packages that are written or installed into a folder, libraries that are built, processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from xpuruntime.ops.plugins import include_folder

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "kernel_plugin"


def compiler() -> str:
    result = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if result is None:
        pytest.skip("there is no C++ compiler")
    return result


def build_library(source: Path, library: Path, *options: str) -> Path:
    """Build a library of kernels as the guide says."""
    command = [compiler(), "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    command += ["-fvisibility=hidden", f"-I{include_folder()}", "-o", str(library), str(source), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return library


def install_example(folder: Path) -> Path:
    """Install the example into a folder of its own, with pip."""
    compiler()
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    command += ["--no-build-isolation", "--no-deps", "--target", str(folder), str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def write_package(folder: Path, name: str, code: str, function: str = "register") -> Path:
    """Write a package as pip would install it: a module with an entry point."""
    facts = folder / f"{name}-1.5.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (facts / "entry_points.txt").write_text(f"[xpuruntime.kernels]\n{name} = {name}:{function}\n")
    (folder / f"{name}.py").write_text(code)
    return folder


def environment(*folders: Path, **more: str) -> dict[str, str]:
    """Return the environment with folders of packages, and measured times kept nowhere."""
    path = os.pathsep.join(map(str, folders))
    return {**os.environ, "PYTHONPATH": path, "XPURUNTIME_TUNING_CACHE": "off", **more}


def python(code: str, *folders: Path, warnings: str = "error", **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, with folders of packages."""
    command = [sys.executable, "-W", warnings, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(*folders, **more), check=False, timeout=240
    )


def xrt(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, with a folder of packages."""
    command = [sys.executable, "-c", "from xpuruntime.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment(folder), check=False, timeout=240)
