# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""How a recording becomes a trace that Perfetto opens, and a file of it."""
