# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Layer norm and RMS norm."""

from __future__ import annotations

from xpuruntime.pytorch.overriding.native import Override

__all__ = ["OVERRIDES"]

OVERRIDES: tuple[Override, ...] = ()
