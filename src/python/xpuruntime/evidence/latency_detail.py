# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Types of ``latency.detail`` in a saved report, which tables compute with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["check_detail"]


class _Instrumented(msgspec.Struct, kw_only=True):
    run_us: float
    runs: int
    statistic: str
    units_us: float = 0.0
    units: int = 0
    coverage: float = 0.0
    outside_us: float = 0.0
    outside: dict[str, float] = {}
    cut_us: float = 0.0


class _Detail(msgspec.Struct):
    instrumented: dict[str, Any] = {}
    inputs: dict[str, Any] | None = None


def check_detail(detail: Mapping[str, Any]) -> None:
    """Check the keys that are read; others may be there."""
    found = msgspec.convert(detail, _Detail)
    if found.instrumented:
        msgspec.convert(found.instrumented, _Instrumented)
