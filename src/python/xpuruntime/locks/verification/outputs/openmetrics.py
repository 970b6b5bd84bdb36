# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A verification as OpenMetrics text: counts by verdict, each claim, and the figures of claims."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from xpuruntime.locks.verification.vocabulary import VERDICTS
from xpuruntime.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from xpuruntime.locks.verification.claims import VerificationResult

__all__ = ["to_openmetrics"]


def to_openmetrics(result: VerificationResult) -> str:
    """Return the text, which ends in ``# EOF``."""
    counts = [({"verdict": verdict}, len(result.of(verdict))) for verdict in VERDICTS]
    passed = [
        ({"claim": one.id, "section": one.section, "verdict": one.verdict}, int(one.verdict == "pass"))
        for one in result.claims
    ]
    figures = [
        ({"claim": one.id, "figure": name}, value) for one in result.claims for name, value in one.figures.items()
    ]
    lines = [
        *_family("xrt_verify_claims", "Claims by verdict.", counts),
        *_family("xrt_verify_claim_passed", "Whether a claim passed.", passed),
        *_family("xrt_verify_figure", "Measured figures of claims.", figures),
        *_family("xrt_verify_exit_code", "Exit code of xrt verify.", [({}, result.exit_code)]),
    ]
    return "\n".join([*lines, "# EOF", ""])


def _family(name: str, text: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> Iterable[str]:
    lines = [f"{name}{_labels(labels)} {_number(value)}" for labels, value in samples]
    return [f"# TYPE {name} gauge", f"# HELP {name} {text}", *lines] if lines else []


def _labels(labels: Mapping[str, str]) -> str:
    shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{shown}}}" if shown else ""


def _escaped(text: str) -> str:
    return printable(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return f"{value:.17g}" if isinstance(value, float) else str(value)
