# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Attention under a policy: its entry points, what PyTorch and we can serve of it, and PyTorch's switches for it."""
