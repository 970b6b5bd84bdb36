# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""PyTorch as an engine: exported programs (``.pt2``) and modules. PyTorch is imported when one is read."""

from __future__ import annotations

from xpuruntime.engines.torch.engine import TorchEngine

__all__ = ["TorchEngine"]
