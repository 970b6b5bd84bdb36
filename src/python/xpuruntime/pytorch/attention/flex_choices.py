# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`FlexChoice`: the kernel that a call of ``flex_attention`` was given when its code was compiled."""

from __future__ import annotations

import threading
from typing import NamedTuple

from xpuruntime.pytorch.dispatch.context import CONTEXT

__all__ = ["FlexChoice", "choices", "forget", "note"]


class FlexChoice(NamedTuple):
    """What was chosen while code was compiled, for `explain` to tell when that code runs.

    Attributes
    ----------
    kernel : str
        Such as ``"torch.flex_triton"``.
    asked : tuple of str
    source : str
        As of a `Route`.
    status, reason : str
        As of a `Row`.
    module : str
        Path of the module whose code it is; empty where it is not known.
    """

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
    """Return what was chosen for the active policy's code inside a module, or for all of it where none is known there.

    Parameters
    ----------
    module : str
        Path of the module in which compiled code runs; empty where it is not known.
    """
    with _lock:
        every = tuple(choice for key, choice in CONTEXT.flex_choices if key == CONTEXT.compiled_for)
    inside = tuple(one for one in every if one.module == module or one.module.startswith(f"{module}."))
    return inside if module and inside else every
