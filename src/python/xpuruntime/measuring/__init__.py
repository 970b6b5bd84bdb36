# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Worker processes, interleaved rounds, paired statistics and conditions of measurements."""
