# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The command line, ``xrt``: parse, call, print."""

from __future__ import annotations

from xpuruntime.cli.entry import main
from xpuruntime.cli.exit_codes import ExitCode

__all__ = ["ExitCode", "main"]
