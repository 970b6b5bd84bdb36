# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Rendezvous of the ranks of a communicator: over TCP, a shared folder, or a store of PyTorch."""

from __future__ import annotations
