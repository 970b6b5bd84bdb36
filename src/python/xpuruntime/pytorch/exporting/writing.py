# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`appearing`: files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from xpuruntime.errors import XpuRuntimeError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["appearing"]


@contextlib.contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """Yield a place beside `target` to write it to; its other files, then itself, are moved there afterwards.

    Parameters
    ----------
    target : Path

    Yields
    ------
    Path
        Of the same name, in an empty folder of its own.

    Raises
    ------
    XpuRuntimeError
        It cannot be written; what was there before stays.
    """
    folder: Path | None = None
    try:
        folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".new"))
        place = folder / target.name
        yield place
        for file in sorted(folder.iterdir(), key=lambda one: one == place):
            with file.open("rb") as written:
                os.fsync(written.fileno())
            file.replace(target.parent / file.name)
    except OSError as error:
        reason = error.strerror or str(error)
        raise XpuRuntimeError(
            f"cannot write {str(target)!r}: {reason}. Fix: mend that, or name another place"
        ) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
