# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What one state costs over another that was measured in the same rounds, and how sure that is."""

from __future__ import annotations

import random
import statistics
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

#: How often rounds are drawn anew, and what part of the medians of those lies in the interval.
_DRAWS, _INSIDE = 2000, 0.95


class Over(NamedTuple):
    """The median of the rounds, as a part of the other state's time, and its interval."""

    part: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """How far the interval goes to one side, on average."""
        return (self.high - self.low) / 2


def over(times: Sequence[float], others: Sequence[float]) -> Over:
    """Return how much longer `times` are than `others`, round by round.

    The interval is that of the bootstrap: rounds are drawn anew, with the same seed each time.
    """
    ratios = [time / other - 1 for time, other in zip(times, others, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(_DRAWS))
    outside = round(_DRAWS * (1 - _INSIDE) / 2)
    return Over(statistics.median(ratios), medians[outside], medians[-1 - outside])
