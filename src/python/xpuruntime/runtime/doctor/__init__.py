# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Doctor: what is wrong with this machine, and the exact command that fixes it."""

from __future__ import annotations

from xpuruntime.runtime.doctor.diagnosis import CHECKS, Diagnosis, diagnose, examine
from xpuruntime.runtime.doctor.facts import Finding

__all__ = ["CHECKS", "Diagnosis", "Finding", "diagnose", "examine"]
