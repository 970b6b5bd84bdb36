# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Dynamic batching: scheduling of requests into batches, and the layout of their tensors in one batch."""
