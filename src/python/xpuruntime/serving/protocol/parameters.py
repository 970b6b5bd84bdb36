# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Parameters of a request that the protocol or this server reserves: deadline, priority, evidence, extensions."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from xpuruntime.serving.status import ServingError, Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from xpuruntime.serving.messages import Parameter

__all__ = ["deadline_of", "priority_of", "refuse_duplicates", "refuse_extensions"]

#: Parameters of extensions that are not served. Ignoring one would answer another question than was asked.
_EXTENSIONS = {
    "sequence_id": "sequences",
    "sequence_start": "sequences",
    "sequence_end": "sequences",
    "shared_memory_region": "shared memory",
    "shared_memory_offset": "shared memory",
    "shared_memory_byte_size": "shared memory",
    "classification": "classification",
}


def deadline_of(parameters: Mapping[str, Parameter], now: float | None) -> float | None:
    """Return the deadline that the parameter ``timeout`` (microseconds) states, on the clock of `time.monotonic`."""
    stated = parameters.get("timeout")
    if stated is None:
        return None
    microseconds = _whole_number("timeout", stated)
    if microseconds == 0:  # as in Triton: none
        return None
    return (time.monotonic() if now is None else now) + microseconds / 1e6


def priority_of(parameters: Mapping[str, Parameter]) -> int:
    """Return the parameter ``priority``, 0 for the model's default."""
    stated = parameters.get("priority")
    return 0 if stated is None else _whole_number("priority", stated)


def _whole_number(name: str, stated: Parameter) -> int:
    if isinstance(stated, str) and stated.isascii() and stated.isdecimal() and len(stated) < 20:
        stated = int(stated)  # tritonclient sends `timeout` of a stream as text
    if isinstance(stated, bool) or not isinstance(stated, int) or not 0 <= stated < 2**64:
        raise ServingError(
            Status.INVALID_ARGUMENT, f"the parameter {name} is {stated!r}. Fix: state a whole number, 0 or more"
        )
    return stated


def refuse_extensions(parameters: Mapping[str, Parameter], where: str) -> None:
    """Raise where a parameter belongs to an extension that is not served, unless it says no (0 or false).

    So does one with the server's own prefix that it does not have, or whose value would be passed over. Others are the
    client's own.
    """
    for name in parameters:
        if name.startswith("xrt_") and not (
            name == "xrt_evidence" and where == "the request" and isinstance(parameters[name], bool)
        ):
            raise ServingError(
                Status.INVALID_ARGUMENT,
                f"{where} has the parameter {name[:64]} {parameters[name]!r:.80}. Fix: of those that begin with xrt_ "
                "a request may have xrt_evidence, true or false",
            )
        extension = _EXTENSIONS.get(name)
        if extension is not None and (parameters[name] or extension == "shared memory"):
            raise ServingError(
                Status.UNIMPLEMENTED,
                f"{where} has the parameter {name}, of the extension for {extension}, which is not served. "
                f"Fix: leave it out, and see the extensions in the server's metadata",
            )


def refuse_duplicates(names: Iterable[str], what: str) -> None:
    """Raise where a name comes twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ServingError(Status.INVALID_ARGUMENT, f"the {what} {name!r} is given twice. Fix: name each once")
        seen.add(name)
