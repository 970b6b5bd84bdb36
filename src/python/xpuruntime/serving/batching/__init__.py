# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Dynamic batching: which requests run together, when, and how their tensors become one batch."""
