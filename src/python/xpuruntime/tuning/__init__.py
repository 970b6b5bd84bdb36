# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The tuner: the fastest policy that keeps the constraints, or the proof that nothing is faster."""
