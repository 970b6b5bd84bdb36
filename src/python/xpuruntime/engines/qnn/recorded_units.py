# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The units of a compiled model, kept beside it: when it is loaded, QNN tells them no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from xpuruntime.evidence.records import Unit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from xpuruntime.engines.base import Request

__all__ = ["read_units", "write_units"]

_UNITS = "units.json"


def write_units(folder: Path, units: Sequence[Unit]) -> None:
    """Write them into the folder of an artifact."""
    (folder / _UNITS).write_bytes(msgspec.json.encode(units))


def read_units(request: Request) -> tuple[Unit, ...] | None:
    """Return the units that were recorded when the artifact of `request` was compiled; ``None`` without an artifact."""
    if request.artifact is None:
        return None
    return msgspec.json.decode((request.artifact.folder / _UNITS).read_bytes(), type=tuple[Unit, ...])
