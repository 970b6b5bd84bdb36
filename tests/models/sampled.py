# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A part of a long list of cases: `make test-patterns`, which runs each night, takes all of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ALL", "part"]

Case = TypeVar("Case")

#: Whether all cases are asked for.
ALL = bool(os.environ.get("XPURUNTIME_ALL_PATTERNS"))


def part(cases: Iterable[Case], every: int) -> list[Case]:
    """Return every n-th case, or all of them."""
    return list(cases)[:: 1 if ALL else every]
