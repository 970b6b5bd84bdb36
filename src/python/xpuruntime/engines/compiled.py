# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Compiled`: the files that an engine compiled a model into."""

from __future__ import annotations

import msgspec

__all__ = ["Compiled"]


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """What `Engine.compile` wrote into its folder.

    Attributes
    ----------
    files : tuple of str
        Names relative to the folder; the first is the one to open.
    node_map : dict of str to tuple of str
        Compiled unit to the source nodes it stands for, as far as the engine reports it.
    notes : tuple of str
        What was converted or could not be kept.
    """

    files: tuple[str, ...]
    node_map: dict[str, tuple[str, ...]] = {}
    notes: tuple[str, ...] = ()
