# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Sessions in worker processes, whose interpreter may have another version of xpuruntime."""
