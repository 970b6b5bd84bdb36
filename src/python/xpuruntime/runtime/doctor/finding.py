# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Finding`: one thing `doctor` has to say."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Finding"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong, or worth knowing.

    Attributes
    ----------
    code : str
        Stable word for scripts, such as ``"ort_clash"``.
    severity : {"error", "warning", "info"}
        An error stops something that this machine should be able to do; a warning may change what runs; the rest is
        information.
    what, why : str
        One sentence each.
    fix : str or None
        The exact command, or what to do where no command does it.
    """

    code: str
    severity: Literal["error", "warning", "info"]
    what: str
    why: str
    fix: str | None = None
