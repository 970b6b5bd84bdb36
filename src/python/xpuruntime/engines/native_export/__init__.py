# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Sessions as native configuration of an engine, and its run in an interpreter without xpuruntime."""
