# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Verification of the claims of a policy and a lock, one by one, and its output formats."""
