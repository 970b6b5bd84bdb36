# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`SampleError`: samples that cannot be read, for callers that know them by other names than calibration."""

from __future__ import annotations

from xpuruntime.errors import InputError

__all__ = ["SampleError"]


class SampleError(InputError):
    """Samples that cannot be read."""

    def __init__(self, reason: str, *, argument: str = "calibration:") -> None:
        super().__init__(f"{argument} {reason}")
        self.reason = reason
