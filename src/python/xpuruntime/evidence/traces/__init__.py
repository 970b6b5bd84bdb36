# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Traces of recordings, as Perfetto opens them, and their files."""
