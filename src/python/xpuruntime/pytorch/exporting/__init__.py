# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Carrying a trained module and its kernel policy to production, as one file."""

from __future__ import annotations

from xpuruntime.pytorch.exporting.exporter import Exported, export

__all__ = ["Exported", "export"]
