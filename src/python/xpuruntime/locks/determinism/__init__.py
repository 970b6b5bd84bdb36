# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Determinism grades, tested on the engine itself: `determinism`."""

from __future__ import annotations

from xpuruntime.locks.determinism.testing import determinism, session_determinism

__all__ = ["determinism", "session_determinism"]
