# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The units of a compiled model, kept beside it: when it is loaded, QNN reports them no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from xpuruntime.errors import ModelError
from xpuruntime.evidence.records import Unit
from xpuruntime.files.reading import decode_json

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
    path = request.artifact.folder / _UNITS
    try:
        units: tuple[Unit, ...] = decode_json(path.read_bytes(), tuple[Unit, ...])
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"the artifact's {path} cannot be read: {error}. Fix: compile the model again") from None
    return units
