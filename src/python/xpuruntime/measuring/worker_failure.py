# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`WorkerFailure`: how a call in a worker process failed."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.errors import XpuRuntimeError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FailureKind", "WorkerFailure", "WorkerResult"]


class FailureKind(enum.StrEnum):
    """How a call in a worker failed. After all but `EXCEPTION` and `OUT_OF_MEMORY` by an exception it has ended."""

    CRASHED = "crashed"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    EXITED = "exited"
    PROTOCOL = "protocol"
    EXCEPTION = "exception"


class WorkerFailure(XpuRuntimeError):  # noqa: N818  the name of a result, which is also raised
    """A call in a worker gave no value."""

    def __init__(
        self,
        kind: FailureKind,
        reason: str,
        *,
        signal: str | None = None,
        exit_code: int | None = None,
        exceptions: Sequence[str] = (),
        error: str = "",
        traceback: str = "",
        output: str = "",
    ) -> None:
        last = output.strip().splitlines()[-12:]
        super().__init__(reason + (f" (its last output: {' | '.join(last)})" if last else ""))
        self.kind, self.reason, self.signal, self.exit_code = kind, reason, signal, exit_code
        self.exceptions, self.error = tuple(exceptions), error
        self.traceback, self.output = traceback, output

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.kind, self.reason, self.__dict__)


def _rebuilt(kind: FailureKind, reason: str, attributes: dict[str, Any]) -> WorkerFailure:
    failure = WorkerFailure(kind, reason, output=attributes["output"])
    failure.__dict__.update(attributes)
    return failure


class WorkerResult(NamedTuple):
    """The value of a call in a worker, or how it failed."""

    value: Any
    failure: WorkerFailure | None
