# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`warn_if_dropped`: a warning where the new value that a method of a frozen policy returns is thrown away."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import TYPE_CHECKING

from xpuruntime.errors import XpuRuntimeWarning

if TYPE_CHECKING:
    from types import CodeType

__all__ = ["warn_if_dropped"]


def warn_if_dropped(call: str) -> None:
    """Warn where the caller of the method that calls this does nothing with the result."""
    caller = sys._getframe(2)
    if not _drops(caller.f_code, caller.f_lasti):
        return
    msg = f"the policy that {call} returns is thrown away, and the one that it is called on stays as it is. "
    msg += f"Fix: policy = {call}"
    warnings.warn(msg, XpuRuntimeWarning, stacklevel=3)


@functools.lru_cache(maxsize=1024)
def _drops(code: CodeType, at: int) -> bool:
    import dis  # policies are read where nothing else is imported yet

    following = next((one for one in dis.get_instructions(code) if one.offset > at), None)
    return following is not None and following.opname == "POP_TOP"
