# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`FlexChoice`: the kernel that a call of ``flex_attention`` was given when its code was compiled."""

from __future__ import annotations

import threading
from typing import NamedTuple

from xpuruntime.pytorch.dispatch.context import CONTEXT

__all__ = ["FlexChoice", "choices", "forget", "note"]


class FlexChoice(NamedTuple):
    """What was chosen while code was compiled, for `explain` to tell when that code runs."""

    kernel: str
    asked: tuple[str, ...]
    source: str
    status: str
    reason: str
    module: str


_lock = threading.Lock()
#: Choices that are kept; with one more, all are forgotten.
_MOST = 4096


def note(choice: FlexChoice) -> None:
    """Keep what was chosen for code that may run from now on."""
    with _lock:
        if len(CONTEXT.flex_choices) >= _MOST:
            CONTEXT.flex_choices.clear()
        CONTEXT.flex_choices[CONTEXT.compiled_for, choice] = None


def forget() -> None:
    """Forget all, since all code is dropped."""
    with _lock:
        CONTEXT.flex_choices.clear()


def choices(module: str) -> tuple[FlexChoice, ...]:
    """Return the active policy's choice for code inside a module, or for all code where it has none there."""
    with _lock:
        every = tuple(choice for key, choice in CONTEXT.flex_choices if key == CONTEXT.compiled_for)
    inside = tuple(one for one in every if one.module == module or one.module.startswith(f"{module}."))
    return inside if module and inside else every
