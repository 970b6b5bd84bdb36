# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Installed Python distributions, listed by the names of their folders: quick also where there are hundreds."""

from __future__ import annotations

import csv
import io
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from xpuruntime.files.reading import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Distribution", "distributions"]

_FOLDER = re.compile(r"(?P<name>[^-]+(?:-[^-]+)*?)-(?P<version>\d[^-]*)(?:-py[\d.]+)?\.(?:dist|egg)-info")


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """One distribution: normalised name (lower case with hyphens), version, and where it is."""

    name: str
    version: str
    location: str
    record: str

    def files(self) -> tuple[str, ...] | None:
        """Return its files relative to `location`, or ``None`` when the installer kept no list."""
        try:
            with open_regular(Path(self.record, "RECORD")) as raw, io.TextIOWrapper(raw, "utf-8", newline="") as file:
                return tuple(row[0] for row in csv.reader(file) if row)
        except (OSError, UnicodeDecodeError, csv.Error):
            return None


def distributions(paths: Sequence[str] | None = None) -> Iterator[Distribution]:
    """List what is installed in folders; default `sys.path`. A folder that cannot be read is passed over."""
    seen: set[str] = set()
    for path in sys.path if paths is None else paths:
        folder = Path(path or ".")
        try:
            location = str(folder.resolve())
            names = sorted(entry.name for entry in folder.iterdir())
        except OSError:
            continue
        if location in seen:
            continue
        seen.add(location)
        for name in names:
            match = _FOLDER.fullmatch(name)
            if match:
                yield Distribution(
                    name=re.sub(r"[-_.]+", "-", match["name"]).lower(),
                    version=match["version"],
                    location=str(folder),
                    record=str(folder / name),
                )
