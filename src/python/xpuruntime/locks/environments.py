# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Environments: sessions in another interpreter, and throw-away environments that differ in one package."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import venv
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xpuruntime
from xpuruntime import _core
from xpuruntime.errors import (
    EngineError,
    EngineFailed,
    EngineUnavailable,
    InputError,
    LockError,
    ModelError,
    PlanError,
    PolicyError,
    UnsupportedOperationError,
    XpuRuntimeError,
)
from xpuruntime.evidence import Report
from xpuruntime.files.paths import kind_of
from xpuruntime.files.reading import open_regular
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.lockfile.canonical import load_lock
from xpuruntime.runtime.interruptible_waits import uninterrupted
from xpuruntime.runtime.worker import FailureKind, Worker, WorkerFailure

if TYPE_CHECKING:
    from xpuruntime.lockfile.records import Lock

MODULE = "xrt_session_worker"


def session_worker(python: str | os.PathLike[str], *packages: Path) -> Worker:
    """Start a worker; `packages` are folders that it imports from as well."""
    return Worker(python, pythonpath=[*packages, Path(__file__).with_name("worker_side")])


_PREFIX = "py:"
#: Of the errors of a worker, those that are raised here as what they are; the first that fits.
_KINDS: tuple[type[XpuRuntimeError], ...] = (
    PolicyError,
    ModelError,
    InputError,
    EngineUnavailable,
    EngineFailed,
    UnsupportedOperationError,
    PlanError,
    LockError,
)
#: What the first kilobytes of a lock have: its keys are sorted, and the schema is the last one.
_HEAD, _LOCK = 4096, re.compile(rb'^\s*\{\s*"digest": "sha256:')


class FileSide(NamedTuple):
    """A saved report, by the path that was given."""

    name: str

    def report(self) -> Report:
        """Read it. Raises `InputError` where it is none."""
        return Report.load(self.name)


class LockSide(NamedTuple):
    """A lock, by the path that was given."""

    name: str

    def lock(self) -> Lock:
        """Read it. Raises `LockError` where it is cut off, was edited, or is of a later release."""
        return load_lock(self.name)


class PythonSide(NamedTuple):
    """An interpreter, by what was given, ``"here"`` or ``"py:PATH"``."""

    name: str
    python: str


def read_side(text: str) -> FileSide | LockSide | PythonSide:
    """Read an argument as a side."""
    if text == "here":
        return PythonSide(text, sys.executable)
    if text.startswith(_PREFIX):
        return PythonSide(text, str(Path(text[len(_PREFIX) :]).expanduser()))
    if kind_of(text) != "file":
        fix = (
            "give a report that `xrt explain --json` printed, a lock, `here`, or `py:` and the path of a Python "
            "interpreter"
        )
        raise InputError(f"{text!r} is neither a file nor an interpreter", fix=fix)
    with open_regular(text) as file:
        is_lock = _LOCK.search(file.read(_HEAD)) is not None
    return LockSide(text) if is_lock else FileSide(text)


def start_worker(side: PythonSide, folder: Path) -> Worker:
    """Start the interpreter of a side, with its own xpuruntime where it has one, else with this one."""
    worker = session_worker(side.python)
    failure = worker.attempt(f"{MODULE}:load_core", called="load_core").failure
    if failure is None:
        return worker
    worker.close()
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    there = ".".join(worker.facts["python"].split(".")[:2])
    if here != there:
        msg = (
            f"{side.name} runs Python {there} and has no xpuruntime of its own that can be used "
            f"({failure.reason}); the one of this process is built for Python {here}: install xpuruntime there"
        )
        raise EngineError(msg)
    root = folder / f"package-{len([*folder.iterdir()])}"
    link_this_package(root / "xpuruntime")
    worker = session_worker(side.python, root)
    failure = worker.attempt(f"{MODULE}:load_core", called="load_core").failure
    if failure is not None:
        worker.close()
        msg = f"xpuruntime cannot be used in {side.name}: {_reason(failure)}. Fix: install there what is missing"
        raise EngineError(msg)
    return worker


def call(worker: Worker, name: str, function: str, **arguments: Any) -> Any:
    """Call a function of `xrt_session_worker`; an error names the side, unless that is empty.

    Raises
    ------
    XpuRuntimeError
        Of the same kind as the worker's where that is bad input, a refusal or a failed engine, else an `EngineError`.
    """
    try:
        return worker.call(f"{MODULE}:{function}", called=function, **arguments)
    except WorkerFailure as failure:
        kind = next((kind for kind in _KINDS if kind.__name__ in failure.exceptions), EngineError)
        fix = "install it there" if "ModuleNotFoundError" in failure.exceptions else None
        reason = f"{name}: {_reason(failure)}" if name else _reason(failure)
        raise kind(reason, fix=fix) from failure


def _reason(failure: WorkerFailure) -> str:
    if failure.kind is FailureKind.EXCEPTION:
        return failure.reason
    return str(failure)


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
    for folder in map(Path, dict.fromkeys(sys.path)):
        if folder.name not in ("site-packages", "dist-packages") or not folder.is_dir():
            continue
        hidden = set(own)
        for dist in metadata.distributions(path=[str(folder)]):
            tops = {file.parts[0] for file in dist.files or () if file.parts and file.parts[0] != ".."}
            records = {name for name in tops if name.endswith((".dist-info", ".egg-info"))}
            modules = {name for name in tops - records if not name.endswith(".libs")}
            if _canonical(dist.metadata["Name"]) in replaced or modules & own:
                hidden |= records
        for path in folder.resolve().iterdir():
            target = rest / path.name
            if path.name not in hidden and path.suffix != ".pth" and not target.exists():
                target.symlink_to(path)
    (site / "_rest.pth").write_text(f"{rest}\n", encoding="utf-8")


def link_this_package(target: Path) -> None:
    """Link this package into a new folder: sources and compiled core of an editable installation are apart."""
    target.mkdir(parents=True)
    for folder in (*map(Path, xpuruntime.__path__), Path(str(_core.__file__)).parent):
        for path in folder.iterdir():
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
