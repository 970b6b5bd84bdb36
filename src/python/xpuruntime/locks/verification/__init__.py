# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Verification: the claims that a policy and a lock make, checked one by one, and the formats they are written in."""
