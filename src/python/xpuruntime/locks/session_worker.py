# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Workers that import `xrt_session_worker` from its folder, whatever xpuruntime their interpreter has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from xpuruntime.runtime.worker import Worker

if TYPE_CHECKING:
    import os

__all__ = ["MODULE", "session_worker"]

MODULE = "xrt_session_worker"


def session_worker(python: str | os.PathLike[str], *packages: Path) -> Worker:
    """Start a worker; `packages` are folders that it imports from as well."""
    return Worker(python, pythonpath=[*packages, Path(__file__).with_name("worker_side")])
