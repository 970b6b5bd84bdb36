# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Export of locks: as native configuration of their engine, and the proof that it runs the same."""
