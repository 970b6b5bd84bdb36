# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The command line, ``xrt``: parse, call, print."""

from __future__ import annotations

from xpuruntime.cli.entry import ExitCode, main

__all__ = ["ExitCode", "main"]
