# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`appearing`: files that appear whole or not at all."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from xpuruntime.errors import XpuRuntimeError
from xpuruntime.files.paths import reason_of
from xpuruntime.files.writing import files_beside

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["appearing"]


@contextlib.contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """Yield a place to write `target` to; its other files, then itself, are moved to their place afterwards."""
    try:
        with files_beside(target) as place:
            yield place
    except OSError as error:
        raise XpuRuntimeError(
            f"cannot write {str(target)!r}: {reason_of(error)}. Fix: free the disk, or name a place that can be written"
        ) from error
