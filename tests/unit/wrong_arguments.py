# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Wrong arguments for functions, one at a time, and errors that Python or a library says by itself.

Arguments are those of the signatures, so that one which is added later is tried too.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import numpy as np

import xpuruntime as xrt

if TYPE_CHECKING:
    from collections.abc import Callable


class Odd:
    """An object of no use to anybody."""


WRONG = (3, "3", 1.5, None, b"x", [1], {"a": 1}, Odd(), object, np.zeros(2))
#: What Python, and the modules below, say by themselves.
BARE = re.compile(
    r"not supported between|object is not|has no attribute|unsupported operand|cannot be interpreted|"
    r"must be real number|truth value of|"
    r"argument of type|could not convert|invalid literal|indices must|not iterable|expected .* instance|a bytes-like|"
    r"pattern on|unexpected keyword|required positional|JSON serializable"
)


def bare_errors(
    function: Callable[..., Any],
    right: dict[str, Any],
    *,
    finish: Callable[[Any], None] = lambda made: None,
    more: tuple[Any, ...] = (),
) -> list[str]:
    """Return the calls that raise an error other than an `XpuRuntimeError`; `finish` gets what a call returned."""
    bare = []
    flags = {
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.annotation in (bool, "bool")
    }
    for parameter in (*_parameters(function), "misspelt"):
        for wrong in (*WRONG, *more):
            try:
                made = function(**_arguments(function, right, parameter, wrong))
            except xrt.XpuRuntimeError:
                continue
            except (TypeError, ValueError) as error:
                misspelt = parameter == "misspelt" and "misspelt" in str(error)
                if not misspelt and (not str(error) or BARE.search(str(error))):
                    bare.append(f"{parameter}={wrong!r}: {type(error).__name__}: {error}")
            except Exception as error:
                bare.append(f"{parameter}={wrong!r}: {type(error).__name__}: {error}")
            else:
                if parameter == "misspelt" or parameter in flags:
                    bare.append(f"{parameter}={wrong!r} is taken")
                finish(made)
    return bare


def _parameters(function: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in inspect.signature(function).parameters.values() if parameter.kind in kinds]


def _arguments(function: Callable[..., Any], right: dict[str, Any], parameter: str, wrong: Any) -> dict[str, Any]:
    needed = {
        parameter.name: wrong
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    return {**needed, **right, parameter: wrong}
