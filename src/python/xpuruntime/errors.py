# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The exception tree.

Every message names the thing, the reason and the fix, with control characters as escapes::

    XpuRuntimeError                        every error this library raises
     ├── CudaError                         a CUDA call failed, or the CUDA device asked for is missing
     ├── OutOfMemoryError (MemoryError)    an allocation failed or would pass a limit; the session still works
     ├── UnsupportedOperationError         what was asked cannot be done here; under `strict`, not honoured
     ├── PolicyError (ValueError)          a policy has an unknown key, a bad value, or is not a policy
     ├── ModelError (ValueError)           a model file is missing, corrupt, or refers outside its folder
     ├── InputError (ValueError)           an argument is wrong: name, dtype, rank, shape, layout
     ├── EngineError                       an engine cannot be used, or did not do what it was asked
     │    ├── EngineUnavailable            it, a library or a device that it needs is not here or cannot be loaded
     │    ├── EngineFailed                 it failed while loading, compiling or running a model
     │    └── AccuracyError                results are out of tolerance, so the model is not used
     ├── PlanError                         a plan does not fit the model, policy, machine or engine it is opened with
     ├── LockError                         a lock cannot be read, or does not match what is here
     ├── QueueFullError                    as many asynchronous runs wait as may
     └── DeadlineError (TimeoutError)      an asynchronous run did not begin in time, and does not run

    XpuRuntimeWarning (UserWarning)        what a `prefer` policy could not enforce
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

from xpuruntime.printable import printable

__all__ = [
    "AccuracyError",
    "CudaError",
    "DeadlineError",
    "EngineError",
    "EngineFailed",
    "EngineUnavailable",
    "InputError",
    "LockError",
    "ModelError",
    "OutOfMemoryError",
    "PlanError",
    "PolicyError",
    "QueueFullError",
    "UnsupportedOperationError",
    "XpuRuntimeError",
    "XpuRuntimeWarning",
]

#: Packages whose lines no warning points at.
_INSIDE = frozenset({"xpuruntime", "torch", "contextlib", "functools"})


class XpuRuntimeError(Exception):
    """Base of every error this library raises.

    Parameters
    ----------
    message : str
        What is wrong, why, and how to fix it.
    fix : str, optional
        How to fix it, where `message` does not say so: the text of the error is then ``"message. Fix: fix"``.
    device : str, optional
        The device concerned, such as ``"cuda:0"``.
    engine : str, optional
        The engine concerned, such as ``"onnxruntime"``.
    status : int or str, optional
        The vendor's own status code.

    Attributes
    ----------
    reason : str
        `message` without its last full stop, for messages that give a fix of their own.
    """

    def __init__(
        self,
        message: str,
        *,
        fix: str | None = None,
        device: str | None = None,
        engine: str | None = None,
        status: int | str | None = None,
    ) -> None:
        reason = printable(message).removesuffix(".") if isinstance(message, str) else str(message)
        if fix is not None:
            fix = printable(fix)
            message = f"{reason}{'' if reason.endswith('?') else '.'} Fix: {fix}"
        super().__init__(printable(message) if isinstance(message, str) else message)
        self.reason = reason
        self.fix = fix
        self.device = device
        self.engine = engine
        self.status = status


class CudaError(XpuRuntimeError):
    """A CUDA call failed, or the CUDA device that was asked for is missing."""


class OutOfMemoryError(XpuRuntimeError, MemoryError):
    """An allocation failed, or would pass the limit of a pool."""


class UnsupportedOperationError(XpuRuntimeError):
    """What was asked cannot be done here; under ``mode: strict``, a policy key that cannot be enforced.

    Attributes
    ----------
    candidates : tuple of (str, str)
        Every kernel of an operation that none of them serves, as the policy asks: ``id`` or ``id@config``, and the
        reason. Else empty.
    passed_over : tuple of (str, str)
        Kernels that a policy asks for and that cannot serve a call of PyTorch's, each with the reason; else empty.
    """

    candidates: tuple[tuple[str, str], ...] = ()
    passed_over: tuple[tuple[str, str], ...] = ()


class PolicyError(XpuRuntimeError, ValueError):
    """A policy has an unknown key or a bad value, or is no policy at all."""


class ModelError(XpuRuntimeError, ValueError):
    """A model file is missing, corrupt, truncated, or refers to data outside its own folder."""


class InputError(XpuRuntimeError, ValueError):
    """An argument is wrong: its name, dtype, rank, shape or layout."""


class EngineError(XpuRuntimeError):
    """An engine or the device it needs is missing, it refused the model, or it failed while running it."""


class EngineUnavailable(EngineError):  # noqa: N818 - a state, as HTTP's 503 names it
    """An engine, or a library or device that it needs, is not here, cannot be loaded, or is not registered."""


class EngineFailed(EngineError):  # noqa: N818 - the other state
    """An engine failed while it loaded, compiled or ran a model: its own error is in the message."""


class AccuracyError(EngineError):
    """Results are out of tolerance, so the model is not used."""


class PlanError(XpuRuntimeError):
    """A plan does not fit the model, policy, machine or engine that it is opened with."""


class LockError(XpuRuntimeError):
    """A lock cannot be read, or does not match what it is compared with.

    Parameters
    ----------
    message : str
    fix : str, optional
    drifts : tuple of Difference
        Every difference, where a lock was compared; see `xpuruntime.evidence.Difference`.
    """

    def __init__(self, message: str, *, fix: str | None = None, drifts: tuple[Any, ...] = ()) -> None:
        super().__init__(message, fix=fix)
        self.drifts = drifts


class QueueFullError(XpuRuntimeError):
    """As many asynchronous runs wait as may; see `InferenceSession.run_async`."""


class DeadlineError(XpuRuntimeError, TimeoutError):
    """An asynchronous run did not begin in time, and does not run; see `InferenceSession.run_async`."""


class XpuRuntimeWarning(UserWarning):
    """What a ``prefer`` policy could not enforce."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args))


def warn(message: str) -> None:
    """Warn with an `XpuRuntimeWarning` that names the line of the caller's code, not one of this package or PyTorch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in _INSIDE:
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = str(frame.f_globals.get("__name__", "<unknown>"))
    file = frame.f_code.co_filename
    warnings.warn_explicit(message, XpuRuntimeWarning, file, frame.f_lineno, module, registry)
