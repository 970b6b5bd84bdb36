# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Locks and verification: determinism grades, claims, and checks that a session still runs as recorded."""

__all__ = ["bisect_versions", "determinism", "diff", "export", "relock", "verification"]
