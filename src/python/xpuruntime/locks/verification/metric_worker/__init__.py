# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The worker process of a metric: its two sides, and the values that pass between them."""
