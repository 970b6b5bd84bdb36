# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Calls that no interruption breaks off: KeyboardInterrupt, and whatever else a signal handler or a thread raises."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

def call_aside(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function in a thread of its own, with a copy of the context, and wait for it.

    Python handles signals in the main thread and raises asynchronous exceptions, and those of a trace function, where
    the thread that they are meant for runs Python. Here that runs none: when this returns or raises, the function has.
    What the function is to leave behind must not be a part of its thread. Inside of such a call, calls are direct.
    """

def shielded(function: Callable[P, R], /) -> Callable[P, R]:
    """Return a method, or a decorator's result, that is called as by `call_aside`."""

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
