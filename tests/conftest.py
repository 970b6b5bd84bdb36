# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What every test relies on."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    # A shell that starts a job in the background has it ignore Ctrl-C, and every process below inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
