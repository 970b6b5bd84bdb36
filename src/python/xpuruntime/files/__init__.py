# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""File access: paths that users give, regular files, atomic writes, locks between processes, caches of one user."""
