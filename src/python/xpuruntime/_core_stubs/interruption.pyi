# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Calls that are undone where an interruption breaks them off, and what a forked child does at its end."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

def guarded(
    function: Callable[P, R], undo: Callable[[Any], object], check: Callable[[Any], object] | None = None
) -> Callable[P, R]:
    """Return a method after which, where it raises anything, ``undo(self)`` is called until it has run to its end.

    However often `undo` is interrupted, it is begun anew: it may be called at any point of the method and of itself.
    ``check(self)`` is called before; where that raises, nothing has begun, and nothing is undone.
    """

class OnLoss:
    """Calls a function when it is dropped, as `guarded` calls `undo`: of a block that Python never leaves.

    That is so where an interruption comes after ``__enter__`` and before the ``with`` block begins or is left. Unlike
    a method ``__del__`` it runs no Python otherwise, in which an interruption would be lost.
    """

    def __init__(self, function: Callable[[], object]) -> None: ...
    def disarm(self) -> None:
        """Call nothing any more."""

def keep_forever(object: object) -> None:
    """Never drop an object, not even at the end of the process."""

def skip_exit_handlers() -> None:
    """End this process, when it exits, without the exit handlers of C and the destructors that are registered now.

    Those of Python have run by then. For a child of a fork, where libraries would wait for threads that are not there.
    """

def context_block(
    variable: ContextVar[Any], value: str, given: str, stranger: str
) -> tuple[Callable[[Any], Any], Callable[..., None]]:
    """Return ``__enter__`` and ``__exit__`` of a class whose blocks a context variable lists, each in one step.

    The variable has the innermost block: a tuple of the attribute `value` of who entered it, the block around it or
    ``None``, and who that was. Blocks may be left in any order. ``__enter__`` gives the attribute `given`; `stranger`
    is what a `RuntimeError` says of a block that is left in another context than it was entered in.
    """
