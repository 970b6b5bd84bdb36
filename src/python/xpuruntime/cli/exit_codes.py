# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Errors of a command: which exit code each has, and which package imports what is not installed or fails."""

from __future__ import annotations

import enum
from types import TracebackType
from typing import TYPE_CHECKING

from xpuruntime.errors import (
    AccuracyError,
    CudaError,
    EngineError,
    InputError,
    LockError,
    ModelError,
    OutOfMemoryError,
    PlanError,
    PolicyError,
    UnsupportedOperationError,
    XpuRuntimeError,
)

if TYPE_CHECKING:
    from importlib.metadata import Distribution


class ExitCode(enum.IntEnum):
    """What a command's exit code means."""

    OK = 0
    NOT_HONOURED = 1
    BAD_INPUT = 2
    ENVIRONMENT = 3
    INCONCLUSIVE = 4
    BUG = 70
    INTERRUPTED = 130
    CLOSED_PIPE = 141


#: The first class that fits decides.
_CODES: tuple[tuple[type[BaseException], ExitCode], ...] = (
    (PolicyError, ExitCode.BAD_INPUT),
    (ModelError, ExitCode.BAD_INPUT),
    (InputError, ExitCode.BAD_INPUT),
    (UnsupportedOperationError, ExitCode.NOT_HONOURED),
    (PlanError, ExitCode.NOT_HONOURED),
    (LockError, ExitCode.NOT_HONOURED),
    (AccuracyError, ExitCode.NOT_HONOURED),
    (CudaError, ExitCode.ENVIRONMENT),
    (EngineError, ExitCode.ENVIRONMENT),
    (OutOfMemoryError, ExitCode.ENVIRONMENT),
    (XpuRuntimeError, ExitCode.ENVIRONMENT),
    (ImportError, ExitCode.ENVIRONMENT),
    (OSError, ExitCode.ENVIRONMENT),
    (MemoryError, ExitCode.ENVIRONMENT),
)


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code for an exception: an xpuruntime module that is missing is a bug, unless it is the core."""
    if isinstance(error, ImportError) and (error.name or "").startswith("xpuruntime") and "_core" not in str(error):
        return ExitCode.BUG
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.BUG)


_IMPORT_SYSTEM = frozenset({"importlib", "_frozen_importlib", "_frozen_importlib_external"})


def missing_module(error: ModuleNotFoundError) -> str | None:
    """Return the importing package, the missing module and the fix; ``None`` where the error has words of its own."""
    if error.name is None or str(error) != f"No module named {error.name!r}":
        return None
    importer = _importer(error.__traceback__)
    if importer is None:
        return None
    who, what = importer.partition(".")[0], error.name.partition(".")[0]
    from importlib import metadata

    distributions = metadata.packages_distributions()
    distribution = set(distributions.get(who, ()))
    if len(distribution) != 1:  # none, or a namespace of several
        return f"{importer} needs the module {error.name!r}, which is not installed. Fix: install it"
    package = metadata.distribution(distribution.pop())
    if what != error.name and what in distributions:  # a module of a package that is installed
        installed = " or ".join(f"{name} {metadata.version(name)}" for name in sorted(set(distributions[what])))
        return (
            f"{package.name} {package.version} needs the module {error.name!r}, which {installed} does not have. Fix: "
            f"install another version of it, or of {package.name}; `pip check` lists versions that do not fit"
        )
    needs = f"{package.name} {package.version} needs the module {error.name!r}, which is not installed"
    required = _requirement(package, what)
    if required is not None:
        return f"{needs} although {package.name} requires it. Fix: pip install {required!r}"
    return f"{needs}. Fix: install it, or another version of {package.name}; `pip check` lists what packages lack"


def broken_import(error: BaseException) -> str | None:
    """Return the module of another package that fails as it is imported, with the fix; ``None`` where none does."""
    trace = error.__traceback__
    while trace is not None:  # frames of the import system are left out of most traces
        frame = trace.tb_frame
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if frame.f_code.co_name == "<module>" and package not in ("xpuruntime", "__main__"):
            break
        trace = trace.tb_next
    else:
        return None
    from importlib import metadata

    names = sorted(set(metadata.packages_distributions().get(package, ())))
    what = " ".join((package, *(metadata.version(name) for name in names[:1])))
    fix = f"python -m pip install --force-reinstall {names[0]}" if names else f"repair or remove {package}"
    return f"{what} cannot be imported: {type(error).__name__}: {error}. Fix: {fix}"


def _importer(trace: TracebackType | None) -> str | None:
    importer = None
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__")
        if isinstance(name, str) and name.partition(".")[0] not in _IMPORT_SYSTEM:
            importer = name
        trace = trace.tb_next
    return importer


def _requirement(package: Distribution, module: str) -> str | None:
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    for line in package.requires or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if canonicalize_name(requirement.name) == canonicalize_name(module) and (
            requirement.marker is None or requirement.marker.evaluate()
        ):
            return f"{requirement.name}{requirement.specifier}"
    return None
