# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Throw-away environments: one version of a package, and everything else as it is here."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import xpuruntime
from xpuruntime import _core
from xpuruntime.errors import EngineError, InputError
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.runtime.interruptible_waits import uninterrupted

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["InstallError", "link_this_package", "listed_versions", "make_environment", "versions_between"]

#: Seconds until pip is given up.
_LIST_SECONDS, _INSTALL_SECONDS = 120.0, 1200.0
_AVAILABLE = re.compile(r"^Available versions: (.+)$", re.MULTILINE)
_UNREACHED = re.compile(r"connection broken by (.+?)(?:: /.*)?$", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?\Z")


class InstallError(EngineError):
    """A version of a package cannot be installed here."""


def listed_versions(package: str, *, pre: bool = False) -> list[str]:
    """Return the versions of a package that pip's index has for this interpreter, the oldest first."""
    if _NAME.match(package) is None:
        raise InputError(f"{package!r} is not the name of a package, such as 'onnxruntime'")
    arguments = ["index", "versions", package, *(["--pre"] if pre else [])]
    code, out, error = _pip(arguments, _LIST_SECONDS)
    available = _AVAILABLE.search(out)
    if code == 0 and available is not None:
        return [version.strip() for version in available[1].split(",")][::-1]
    if (unreached := _UNREACHED.search(error)) is not None:
        msg = f"pip cannot list the versions of {package!r}: its index cannot be reached: {unreached[1][:300]}"
        raise EngineError(f"{msg}. Fix: restore the network, or name an index with PIP_INDEX_URL")
    if "No matching distribution" in error:
        msg = f"the package index of pip has no version of {package!r} for this Python, or does not answer"
        raise InputError(f"{msg}. Fix: try `pip index versions {package}`")
    raise EngineError(f"pip cannot list the versions of {package!r}: {_last_line(error)}")


def versions_between(versions: Sequence[str], good: str, bad: str) -> list[str]:
    """Return the versions from a good to a bad one, in this order; a bad version may be the older one."""
    for version in (good, bad):
        if version not in versions:
            near = ", ".join(versions[-8:])
            raise InputError(f"{version!r} is not among the versions that the package index has; the last are {near}")
    if good == bad:
        raise InputError(f"{good} is given as good and as bad. Fix: give GOOD..BAD, such as 1.23.2..1.32.0")
    first, last = versions.index(good), versions.index(bad)
    return list(versions[first : last + 1]) if first < last else list(versions[last : first + 1])[::-1]


def make_environment(folder: Path, package: str, version: str, extra: Sequence[str]) -> str:
    """Return the interpreter of an environment, in a new folder, with a version of a package and `extra` requirements.

    They are installed, without what they depend on, into an empty virtual environment. All else is what this process
    imports, through links: so nothing but the version is another one. Packages of this process that bring the same
    modules are left out.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    options = ["--no-deps", "--no-input", "--quiet", "--target", str(site)]
    code, _, error = _pip(["install", *options, f"{package}=={version}", *extra], _INSTALL_SECONDS)
    if code != 0:
        raise InstallError(f"{package} {version} cannot be installed: {_last_line(error)}")
    _link_the_rest(site, folder / "rest")
    return str(folder / "bin" / "python")


def _link_the_rest(site: Path, rest: Path) -> None:
    """Link what this process imports into a folder, without what the environment has of its own."""
    own = {
        path.name
        for path in site.iterdir()
        if not path.is_dir() or path.name.endswith(".dist-info") or (path / "__init__.py").exists()
    }
    replaced = {_canonical(dist.metadata["Name"]) for dist in metadata.distributions(path=[str(site)])}
    rest.mkdir()
    link_this_package(rest / "xpuruntime")
    for place in map(Path, dict.fromkeys(sys.path)):
        if place.name not in ("site-packages", "dist-packages") or not place.is_dir():
            continue
        hidden = set(own)
        for dist in metadata.distributions(path=[str(place)]):
            tops = {file.parts[0] for file in dist.files or () if file.parts and file.parts[0] != ".."}
            records = {name for name in tops if name.endswith((".dist-info", ".egg-info"))}
            modules = {name for name in tops - records if not name.endswith(".libs")}
            if _canonical(dist.metadata["Name"]) in replaced or modules & own:
                hidden |= records
        for path in place.resolve().iterdir():
            target = rest / path.name
            if path.name not in hidden and path.suffix != ".pth" and not target.exists():
                target.symlink_to(path)
    (site / "_rest.pth").write_text(f"{rest}\n", encoding="utf-8")


def link_this_package(target: Path) -> None:
    """Link this package into a new folder: sources and compiled core of an editable installation are apart."""
    target.mkdir(parents=True)
    for place in (*map(Path, xpuruntime.__path__), Path(str(_core.__file__)).parent):
        for path in place.iterdir():
            link = target / path.name
            if not link.exists() and (path.suffix != ".so" or path.name.startswith("_core")):
                link.symlink_to(path)


def _canonical(name: str | None) -> str:
    return re.sub(r"[-_.]+", "-", name or "").lower()


def _pip(arguments: Sequence[str], seconds: float) -> tuple[int, str, str]:
    """Run pip; it and what it starts end with this call, however that ends, and leave no temporary files behind."""
    started: list[subprocess.Popen[str]] = []
    with ScratchFolder("pip") as folder:
        env = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_COLOR": "1"}
        env |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), folder)

        def start() -> None:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "pip", *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True, env=env,
                )
            )  # fmt: skip

        try:
            uninterrupted(start)
            out, error = started[0].communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return 1, "", f"pip took more than {seconds:g} s"
        finally:
            for process in started:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()
    if "No module named pip" in error:
        raise EngineError(f"{sys.executable} has no pip. Fix: {sys.executable} -m ensurepip")
    return started[0].returncode, out, error


def _last_line(text: str) -> str:
    lines = [line.removeprefix("ERROR: ").strip() for line in text.splitlines() if line.startswith("ERROR")]
    lines = lines or [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else "pip said nothing"
