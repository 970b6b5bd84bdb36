# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""For authors of engines: the conformance suite that every engine here passes, and the small models it runs."""

from __future__ import annotations

from xpuruntime.testing.conformance import EngineSuite

__all__ = ["EngineSuite"]
