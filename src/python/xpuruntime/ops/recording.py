# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Decisions of the dispatcher as the reports of sessions hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.evidence.kernels.decisions import KernelDecision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpuruntime.ops.decision_log import Decision

__all__ = ["as_record"]


def as_record(one: Decision, nodes: Sequence[str], *, count: int | None = None) -> KernelDecision:
    """Return a decision as a report holds it."""
    return KernelDecision(
        op=one.op,
        description=one.description,
        nodes=tuple(nodes),
        module=one.module,
        shapes=one.shapes,
        dtype=one.dtype,
        device=one.device,
        phase=one.phase,
        asked=one.asked,
        asked_by=one.asked_by,
        source=one.source,
        chosen=one.chosen,
        config=one.config,
        candidates=one.candidates,
        notes=one.notes,
        count=one.count if count is None else count,
    )
