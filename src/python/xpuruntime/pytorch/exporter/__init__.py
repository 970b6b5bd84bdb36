# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Export of a trained module with its kernel policy, as one file."""

from __future__ import annotations

from xpuruntime.pytorch.exporter.export_module import Exported, export

__all__ = ["Exported", "export"]
