# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""File access: regular files, atomic writes, locks, caches of one user, and untrusted JSON and ZIP content."""
