# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""PyTorch's allocator on our pools: for a block of one thread (`scope`), or for the process (`process`)."""
