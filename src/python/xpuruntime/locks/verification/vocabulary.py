# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Vocabulary of a verification: the sections and verdicts of its claims, in order."""

from __future__ import annotations

from typing import Literal

__all__ = ["SECTIONS", "VERDICTS", "ClaimVerdict", "Section"]

Section = Literal["evidence", "accuracy", "determinism", "speed", "memory", "start", "audit"]
ClaimVerdict = Literal["pass", "fail", "inconclusive", "unobservable", "skipped"]

#: In the order in which they are checked.
SECTIONS: tuple[Section, ...] = ("evidence", "accuracy", "determinism", "memory", "start", "audit", "speed")
#: The worst first.
VERDICTS: tuple[ClaimVerdict, ...] = ("fail", "inconclusive", "unobservable", "skipped", "pass")
