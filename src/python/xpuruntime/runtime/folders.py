# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`cache_folder`: where this package keeps files for its user between processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["cache_folder"]


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return ``xpuruntime`` in the user's cache folder: ``XDG_CACHE_HOME``, ``~/.cache``, or ``LOCALAPPDATA``.

    The folder may not exist yet.
    """
    folder = environment.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", "")
    # The XDG rules: a folder that is not absolute counts as not stated.
    base = Path(folder) if folder and Path(folder).is_absolute() else Path("~/.cache").expanduser()
    return base / "xpuruntime"
