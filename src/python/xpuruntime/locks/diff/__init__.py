# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Differences between two environments: from packages to plan, placement, kernels, numbers and time."""
