# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`TuningPolicy`: how ``auto_strategy: best_performance`` measures kernels, and when one replaces another."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from xpuruntime.policies.kinds import Kind, Number
from xpuruntime.policies.quantities import Duration, Percentage
from xpuruntime.policies.value import PolicyValue

__all__ = ["TuningPolicy"]


class TuningPolicy(PolicyValue, frozen=True, kw_only=True):
    """How ``auto_strategy: best_performance`` measures kernels, and when one replaces another.

    Attributes
    ----------
    min_effect : float
        Share by which a kernel has to be faster than the one that would run otherwise: 0.02, or ``"2%"`` in a file.
    confidence : float
        One minus the chance that any candidate of one operation falsely replaces that one, from 0.5 to 0.9999.
    budget : float
        Seconds that measuring one operation may take; what is undecided by then replaces nothing. ``"3s"`` in a file.

    Examples
    --------
    >>> TuningPolicy(min_effect=0.05, budget=1.0)
    TuningPolicy(min_effect=0.05, budget=1.0)
    """

    KINDS: ClassVar[dict[str, Kind]] = {
        "min_effect": Percentage("Percentage by which a kernel has to be faster to replace another.", most=0.9),
        "confidence": Number(0.5, 0.9999, "Confidence of all decisions about one operation together."),
        "budget": Duration("Time that measuring one operation may take."),
    }

    min_effect: float = 0.02
    confidence: float = 0.99
    budget: float = 3.0

    if TYPE_CHECKING:

        def __init__(
            self, *, min_effect: float | str = 0.02, confidence: float = 0.99, budget: float | str = 3.0
        ) -> None: ...
