# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Reports of coverage gaps in code that is compiled: a warning once for each policy, an error where it is strict."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from xpuruntime.errors import PolicyError, XpuRuntimeWarning
from xpuruntime.pytorch.dispatch.context import CONTEXT

if TYPE_CHECKING:
    from xpuruntime.pytorch.coverage.gaps import CoverageGap
    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy

__all__ = ["report_gaps"]


def report_gaps(gaps: list[CoverageGap], active: CompiledPolicy) -> None:
    """Warn of what a policy does not reach, once for each policy, or refuse it where the policy is strict."""
    fresh = [gap for gap in dict.fromkeys(gaps) if (active.number, gap) not in CONTEXT.reported_gaps]
    if active.strict and gaps:
        shown = "; ".join(f"{one.what}: {one.reason}. Fix: {one.fix}" for one in dict.fromkeys(gaps))
        msg = f"the policy is strict, and compiled code would bypass it. {shown}"
        raise PolicyError(msg)
    if not fresh:
        return
    CONTEXT.reported_gaps.update((active.number, gap) for gap in fresh)
    shown = "; ".join(f"{one.what}: {one.reason} ({one.fix})" for one in fresh)
    warnings.warn(f"compiled code bypasses the policy. {shown}", XpuRuntimeWarning, stacklevel=3)
