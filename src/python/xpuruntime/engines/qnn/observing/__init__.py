# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Observation of QNN: instrumented runs, and the attribution of what ran to the nodes of the source graph."""

from __future__ import annotations

from xpuruntime.engines.qnn.observing.records import SessionTrace, instrumented, observe, read_records
from xpuruntime.engines.qnn.observing.units import units_of

__all__ = ["SessionTrace", "instrumented", "observe", "read_records", "units_of"]
