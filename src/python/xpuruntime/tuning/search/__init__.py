# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Search algorithm: which candidates are tried, raced and dueled, from journaled measurements."""
