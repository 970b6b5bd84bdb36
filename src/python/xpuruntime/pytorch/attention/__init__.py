# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Attention under a policy: entry points, requests, and PyTorch's SDPA backends."""
