# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Explanation of PyTorch code while it runs: which kernel ran, who requested it, how often, and how long."""
