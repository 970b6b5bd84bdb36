# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Inference servers of the Open Inference Protocol, for sessions that were planned, locked and verified."""
