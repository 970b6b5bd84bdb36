# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Vendor options that a policy hands on, checked against a table of the engine: engines accept nonsense silently."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import msgspec

from xpuruntime.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BOOL", "Option", "check_options", "own_options"]

#: The words of an option that is on or off; ``true`` and ``false`` of a policy become these.
BOOL = ("0", "1")


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One vendor option."""

    meaning: str
    values: tuple[str, ...] | None = None
    low: int = 0
    high: int = 2**63 - 1
    text: bool = False
    owned_by: str | None = None
    search: tuple[str, ...] = ()
    search_first: bool = False
    needs: dict[str, tuple[str, ...]] = {}


def own_options(given: Mapping[str, Mapping[str, object]], names: tuple[str, ...]) -> dict[str, object]:
    """Return the ``execution.provider_options`` of an engine, under any of its `names`; the first is its own."""
    found: dict[str, object] = {}
    for name in names:
        options = given.get(name, {})
        twice = sorted(found.keys() & options.keys())
        if twice:
            msg = f"execution.provider_options: {twice[0]!r} is given under two names of one engine; keep one of them"
            raise PolicyError(msg, engine=names[0])
        found.update(options)
    return found


def check_options(
    given: Mapping[str, object], known: Mapping[str, Option], where: str, also: Mapping[str, Option] | None = None
) -> dict[str, str]:
    """Return `given` as the strings the vendor takes."""
    engine = where.rpartition(".")[2]
    checked: dict[str, str] = {}
    for name, value in given.items():
        option = known.get(name)
        if option is None:
            names = sorted({*known, *(also or {})})
            near = difflib.get_close_matches(name, names, n=1) or [n for n in names if n.endswith(f".{name}")]
            hint = f"; did you mean {near[0]!r}?" if near else "."
            msg = f"{where}: unknown option {name!r}{hint} Known: {', '.join(names)}"
            raise PolicyError(msg, engine=engine)
        if option.owned_by is not None:
            msg = f"{where}: {name!r} is set by {option.owned_by}; state it there, so that one fact has one place"
            raise PolicyError(msg, engine=engine)
        checked[name] = _text(name, value, option, where, engine)
    return checked


def _word(value: bool, option: Option) -> str:
    """Return the vendor's word for true or false."""
    return str(value).lower() if "true" in (option.values or ()) else str(int(value))


def _text(name: str, value: object, option: Option, where: str, engine: str) -> str:
    text = _word(value, option) if isinstance(value, bool) else str(value)
    if option.text:
        if isinstance(value, bool) or not text.strip():
            msg = f"{where}.{name}: {text!r} is not text ({option.meaning})"
            raise PolicyError(msg, engine=engine)
        return text
    if option.values is not None:
        if text not in option.values:
            msg = (
                f"{where}.{name}: {text!r} is not one of {', '.join(repr(v) for v in option.values)} ({option.meaning})"
            )
            raise PolicyError(msg, engine=engine)
        return text
    try:
        number = int(text)
    except ValueError:
        msg = f"{where}.{name}: {text!r} is not an integer ({option.meaning})"
        raise PolicyError(msg, engine=engine) from None
    if not option.low <= number <= option.high:
        msg = f"{where}.{name}: {number} is outside {option.low}..{option.high} ({option.meaning})"
        raise PolicyError(msg, engine=engine)
    return str(number)
