# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""How the ranks of a communicator find each other: over TCP, a shared folder, or a store of PyTorch."""

from __future__ import annotations
