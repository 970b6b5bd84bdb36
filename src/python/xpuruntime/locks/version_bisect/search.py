# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`first_bad`: bisection of a list of versions, of which some cannot be judged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["FirstBad", "Judgement", "first_bad"]

Judgement = Literal["good", "bad", "skipped"]


class FirstBad(NamedTuple):
    """What a bisection found."""

    last_good: int
    first_bad: int
    between: tuple[int, ...]


def first_bad(versions: Sequence[str], judge: Callable[[str], Judgement]) -> FirstBad:
    """Find where versions turn from good to bad."""
    low, high, skipped = 0, len(versions) - 1, set[int]()
    while left := [place for place in range(low + 1, high) if place not in skipped]:
        middle = (low + high) / 2
        place = min(left, key=lambda one: (abs(one - middle), one))
        verdict = judge(versions[place])
        if verdict == "good":
            low = place
        elif verdict == "bad":
            high = place
        else:
            skipped.add(place)
    return FirstBad(low, high, tuple(range(low + 1, high)))
