# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Shared libraries of vendors: search order, loading, identity, and the builds that packages bring."""
