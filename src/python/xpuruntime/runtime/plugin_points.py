# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Entry points of plugins: a plugin that fails does so alone."""

from __future__ import annotations

import contextlib
import sys
from importlib import metadata
from typing import TYPE_CHECKING, TypeVar

from xpuruntime.errors import XpuRuntimeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from importlib.metadata import EntryPoint

__all__ = ["error_text", "failed_plugins", "guarded", "load_points"]

_Result = TypeVar("_Result")

#: Characters of an error's text.
_LONGEST = 500
_OURS = __name__.partition(".")[0]
#: Sentence by group and name of each plugin that failed to load in this process.
_failed: dict[tuple[str, str], str] = {}


def load_points(group: str, load: Callable[[EntryPoint], object]) -> Iterator[tuple[str, str]]:
    """Load every entry point of a group, in order of name; yield name with package, and reason, of those that fail.

    A plugin that exits, raises what is no `Exception`, or raises an error without a text fails as any other. What it
    prints on stdout goes to stderr, for on stdout may be the JSON of a command.
    """
    for point in sorted(metadata.entry_points(group=group), key=lambda point: (point.name, point.value)):
        try:
            with contextlib.redirect_stdout(sys.stderr):
                load(point)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a package of somebody else may fail in any way
            name, reason = _named(point), error_text(error)
            _failed[group, name] = f"the plugin {name} of the group {group} failed to load: {reason}"
            yield name, reason


def failed_plugins() -> tuple[str, ...]:
    """Return a sentence for each plugin that failed to load in this process."""
    return tuple(_failed.values())


def guarded(owner: object, call: Callable[[], _Result], failed: Callable[[str], _Result]) -> _Result:
    """Call a method of an object, and where it is a plugin's and fails, return what `failed` makes of the reason.

    What a plugin prints on stdout goes to stderr. Errors of `xpuruntime.errors` and of objects of this package go on.
    """
    if type(owner).__module__.partition(".")[0] == _OURS:
        return call()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return call()
    except (KeyboardInterrupt, XpuRuntimeError):
        raise
    except BaseException as error:
        return failed(error_text(error))


def error_text(error: BaseException) -> str:
    """Return class and text of an error of somebody else's, whose text may itself raise; of one of ours, the text."""
    if isinstance(error, XpuRuntimeError) and str(error):
        return str(error)[:_LONGEST]
    kind = type(error).__name__
    try:
        text = str(error)[:_LONGEST]
    except KeyboardInterrupt:
        raise
    except BaseException:
        text = "an error whose text cannot be shown"
    if isinstance(error, SystemExit):
        return f"it exits with {text or 'code 0'} when it is loaded"
    return f"{kind}: {text}" if text else kind


def _named(point: EntryPoint) -> str:
    try:
        package = f" of {point.dist.name} {point.dist.version}" if point.dist is not None else ""
    except Exception:  # damaged metadata
        package = ""
    return f"{point.name!r}{package}"
