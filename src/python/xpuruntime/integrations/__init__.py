# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""xpuruntime in tools that projects already use. Each module imports its tool, and this package imports none."""
