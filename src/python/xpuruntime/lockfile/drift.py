# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`LockDrift`: one difference between a lock and what is found, with what depends on it and what restores it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.errors import LockError
from xpuruntime.lockfile.codes import DriftCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["NOT_IN_LOCK", "LockDrift", "drift_error", "shown"]

#: Stands for what a lock of an earlier release expects of a fact that it does not have.
NOT_IN_LOCK = "not in the lock"

#: Differences and entries that a message names; the error has all of them.
_NAMED = 8
_ENTRIES = 4


class LockDrift(msgspec.Struct, frozen=True, kw_only=True):
    """One difference between a lock and what is found."""

    code: DriftCode
    subject: str
    validator: str = ""
    expected: str
    found: str
    entries: tuple[str, ...] = ()
    restore: str = ""

    @property
    def lacking(self) -> bool:
        """Whether it is a fact that the lock does not have: nothing that the lock has differs."""
        return bool(self.validator) and self.expected == NOT_IN_LOCK

    @property
    def difference(self) -> str:
        """What differs, in one sentence without a full stop."""
        what = self.code if self.validator and self.subject == self.code else f"{self.code} {self.subject}"
        text = f"{what}: expected {self.expected}, found {self.found}"
        return f"{text} (validator {self.validator}; {_listed(self.entries)})" if self.validator else text

    def __str__(self) -> str:
        return f"{self.difference}. Fix: {self.restore}" if self.restore else self.difference


def _listed(entries: Sequence[str]) -> str:
    if not entries:
        return "no entry depends on it"
    shown = ", ".join(entries[:_ENTRIES])
    more = f" and {len(entries) - _ENTRIES} more" if len(entries) > _ENTRIES else ""
    return f"entries {shown}{more}" if len(entries) > 1 else f"entry {shown}"


def shown(value: Any) -> str:
    """Return a value of a validator as short text; ``nothing`` for one that is not there."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(one)}" for name, one in sorted(value.items())) or "none"
    if isinstance(value, (list, tuple)):
        return " ".join(str(one) for one in value) or "none"
    return str(value) or "''"


def drift_error(where: str, drifts: Iterable[LockDrift], *, take: str = "") -> LockError:
    """Return the error of a lock that does not hold, with every difference in its attribute `drifts`."""
    found = tuple(drifts)
    lines = [str(one) for one in found[:_NAMED]]
    if len(found) > _NAMED:
        lines.append(f"and {len(found) - _NAMED} more differences")
    codes = " ".join(f"--accept {code}" for code in dict.fromkeys(one.code for one in found))
    again = f"xrt lock MODEL -o {shlex.quote(where)}"
    tail = f"To take what is here instead: {take or f'`{again} {codes} --why TEXT`, or `{again} --upgrade`'}"
    head = f"the lock {where} does not hold:"
    text = f"{head} {lines[0]}" if len(lines) == 1 else head + "".join(f"\n  {line}" for line in lines)
    return LockError(f"{text}\n  {tail}" if len(lines) > 1 else f"{text}. {tail}", drifts=found)
