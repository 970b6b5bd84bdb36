# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`machine_conditions`: what of this machine can change a measurement, as text."""

from __future__ import annotations

import os
import platform
import sys

__all__ = ["machine_conditions"]


def machine_conditions() -> dict[str, str]:
    """Return the processor, the load, and the versions of Python and NumPy."""
    import numpy as np

    facts = {"platform": platform.platform(), "python": sys.version.split()[0], "numpy": np.__version__}
    facts["processors"] = str(os.cpu_count() or "unknown")
    try:
        facts["load average"] = " ".join(f"{load:.2f}" for load in os.getloadavg())
    except (OSError, AttributeError):
        facts["load average"] = "unknown"
    return facts
