# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Book`: one control for each policy key that is stated."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from xpuruntime.evidence.records import Control

if TYPE_CHECKING:
    from xpuruntime.evidence.records import Enforceability

__all__ = ["Book", "show"]


class Book:
    """Collects one control for each stated key.

    Parameters
    ----------
    stated : dict
        As `Policy.stated` gives it.
    """

    def __init__(self, stated: dict[str, Any]) -> None:
        self.stated = stated
        self.controls: list[Control] = []

    def add(self, key: str, resolved: str, level: Enforceability, reason: str, fix: str | None = None) -> None:
        """Add the control of `key`, if the policy states it."""
        if key in self.stated:
            requested = show(self.stated[key])
            self.controls.append(
                Control(key=key, requested=requested, resolved=resolved, enforceability=level, reason=reason, fix=fix)
            )


def show(value: Any) -> str:
    """Return a policy value as a policy file would write it."""
    if hasattr(value, "to_plain"):
        return json.dumps(value.to_plain(), ensure_ascii=False)
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(show(v) for v in value) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
