# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Policy tuner: finds the fastest policy that satisfies the constraints, or shows that none is faster."""

__all__ = ["spec", "tune", "tune_result"]
