# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Compiled`: the files that an engine compiled a model into."""

from __future__ import annotations

import msgspec

__all__ = ["Compiled"]


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """What `Engine.compile` wrote into its folder."""

    files: tuple[str, ...]
    node_map: dict[str, tuple[str, ...]] = {}
    notes: tuple[str, ...] = ()
