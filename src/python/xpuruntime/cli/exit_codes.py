# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`ExitCode`: what a command's exit code means, and which exception has which."""

from __future__ import annotations

import enum

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

__all__ = ["ExitCode", "exit_code_of"]


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
