# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Proof that a session still runs as it did: determinism grades, claims and their verification."""
