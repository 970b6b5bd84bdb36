# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`render_serving`: the state of a server as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.evidence.page.document import assemble
from xpuruntime.notebook import escaped, fragment, fragment_table

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["render_serving"]

_PARTS = ("elements", "served", "shell", "serving")


def render_serving(plain: Mapping[str, Any]) -> str:
    """Return the page of a server."""
    state = "ready" if plain["ready"] else "not ready"
    rows = [
        (one["name"], one["version"] or "-", one["state"], one["reason"] or one["engine"]) for one in plain["models"]
    ]
    kind = "honoured" if plain["ready"] else "substituted"
    told = fragment(
        (
            f"<p class='xrt-headline xrt-{kind}'>{escaped(state)} {escaped(plain['reason'])}</p>",
            fragment_table("Models", ("model", "version", "state", "engine"), rows),
        )
    )
    return assemble("serving.html", "status", _PARTS, f"{state} - xpuruntime", dict(plain), told)
