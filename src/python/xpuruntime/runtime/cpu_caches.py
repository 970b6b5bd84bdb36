# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Sizes of the processor's caches."""

from __future__ import annotations

import os

__all__ = ["second_level_bytes"]

#: Where the system does not say: more than most processors have.
_UNKNOWN = 4 * 2**20


def second_level_bytes() -> int:
    """Return the size of the second-level cache of one core; where the system does not say it, 4 MiB."""
    try:
        size = os.sysconf("SC_LEVEL2_CACHE_SIZE")
    except (ValueError, OSError, AttributeError):
        size = 0
    return size if size > 0 else _UNKNOWN
